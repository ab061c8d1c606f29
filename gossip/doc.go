// Package gossip spreads observed state: each node's own signed record, and who is alive.
//
// It runs hashicorp/memberlist over the control net. memberlist carries broadcasts, detects failed
// nodes and tells in its metadata which (epoch, seq) each node has reached; records that are too
// large for a packet, or that a node finds it has missed, are pulled over a stream. Broadcasts are
// for speed. The guarantee is anti-entropy: every probe's acknowledgement carries the hash of all
// records, and two nodes whose hashes differ exchange digests and then only what differs.
//
// Invariants:
//   - A record is kept only if its owner is in the roster, its signature is good and its shape is
//     within the limits of Verify. Possession of the gossip key gives nothing more than traffic.
//   - Of two records of one node the higher (epoch, seq) wins; with equal numbers the lower content
//     hash does. This is a total order, so all nodes that exchange records end with the same ones.
//   - No callback of memberlist blocks: each copies what it needs and leaves the work to a goroutine.
//   - Every member of the roster that is not alive is contacted again for ever, at a bounded rate,
//     so partitions of any age heal.
//
// All methods of Gossip are safe for concurrent use. Values returned are immutable.
// Sources: DESIGN.md sections 6 and 7; the SWIM and Lifeguard papers by way of memberlist.
package gossip
