// Package witness finds leaders that are alive but do not forward (topology site).
//
// A Watcher sends echoes through a leader of its site to nodes of other sites, the mirrors. Each second it sends four
// kinds: small and as large as the path carries, over IPv4 and IPv6. Each echo is a new flow. It is encapsulated to the
// leader as a hop (docs/decisions/0054), whatever the routes are, so that the leader's kernel forwards it like any
// other packet. A Mirror answers through the same leader. When several tries get no answer, the Watcher checks two more
// things at the same moment: whether the leader itself answers, and whether another leader gets the same echo answered.
// The leader is silent if both do. Where there is no other leader to compare with, the Watcher waits longer before it
// reports. A host that is dead, cut off, or late itself proves nothing about a leader.
//
// A Book keeps the outcomes and the reports that follow from them, with a hold time, and is pure. Package agent puts
// the reports into the node's record, and package sites demotes a leader when enough witnesses report it.
//
// Watcher and Mirror are safe for concurrent use. Decision: docs/decisions/0056-witnesses.md.
package witness
