// Package witness finds leaders that live and do not forward (topology site).
//
// A Watcher sends echoes through a leader of its site to nodes of other sites, the mirrors, each second, of four
// kinds: small and as large as the path carries, IPv4 and IPv6. Each is a new flow. It travels as a hop does, inside a
// packet for the leader (docs/decisions/0054), whatever routes there are, so that the leader's kernel forwards it like
// any other packet. A Mirror answers by the same leader. When nothing comes back after several tries the Watcher asks
// two more questions at the same moment: does the leader itself answer, and does another leader get the same echo
// answered? Only if both do is the leader silent. Who is dead, cut off, or asks too late, proves nothing about a
// leader.
//
// A Book keeps what was found, with a hold time, and is pure. Package agent puts it into the node's record, and
// package sites has the witnesses' findings decide.
//
// Watcher and Mirror are safe for concurrent use. Decision: docs/decisions/0056-witnesses.md.
package witness
