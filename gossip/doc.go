// Package gossip spreads observed state: each node's own signed record, and who is alive.
//
// It runs hashicorp/memberlist over the control net. memberlist carries broadcasts, detects failed nodes, and carries
// in its metadata the (epoch, seq) that each node has reached. Records that are too large for a packet, or that a node
// has missed, are pulled over a stream. Broadcasts are for speed. The guarantee is anti-entropy: every probe's
// acknowledgement carries the hash of all records, and two nodes whose hashes differ exchange digests and then only
// what differs.
//
// In a mesh of sites a record is either for everybody or for its owner's site alone. There are two kinds of pools, each
// a memberlist: one pool of all wide nodes (servers, leaders and whatever nodes other sites must know), and one of the
// nodes of each site. A wide node is in both. There are two tables: the records for everybody are the same at all nodes
// of the mesh, the records for a site are the same at all nodes of the site. Place says which pools a node is in. With
// its zero value there are one pool and one table, and the packets are those of a mesh without sites.
//
// Invariants:
//   - A record is kept only if its owner is in the roster, its signature is good and its shape is
//     within the limits of Verify. Possession of the gossip key gives nothing more than traffic.
//   - Of two records of one node the higher (epoch, seq) wins; with equal numbers the lower content
//     hash does. This is a total order, so all nodes that exchange records end with the same ones.
//   - What is in the table for everybody follows from records for everybody alone, and never from
//     those of a site: so nodes of different sites end with the same one. In a site's table is the
//     newest record of each node that is for the site, unless a newer whole one for everybody is known.
//   - Pools never merge: each packet and stream of a site's pool names it, under the encryption. A
//     node is taken into a pool only if it belongs there by what the receiver knows.
//   - Elections in a site see who of it is alive by memberlist alone. What others say of who is alive
//     is for other sites' nodes only.
//   - No callback of memberlist blocks: each copies what it needs and leaves the work to a goroutine.
//   - Every member of the roster that is not alive is contacted again for ever, at a bounded rate,
//     so partitions of any age heal.
//
// All methods of Gossip are safe for concurrent use. Values returned are immutable.
// Sources: DESIGN.md sections 6, 7 and 9; the SWIM and Lifeguard papers by way of memberlist.
package gossip
