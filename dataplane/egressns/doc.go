// Package egressns keeps the network namespace of one egress on a gateway node: a link to the host, tunnels to the
// clients, routes, and the nftables table that says whose packets go where, with which source, and for how long.
//
// Apply takes the whole Spec, reads what is there once, and writes the differences; what others change is noticed by
// the kernel's notifications. Everything is adopted from a former run, and nothing is removed before a Spec is
// complete.
//
// A slot's packets pass only while its lease lives, which the kernel counts down by itself: Begin makes a ticket with a
// time to run out, Grant lets the slot pass as long as that ticket lives. A process that is paused, killed or cut off
// stops forwarding by doing nothing, and an answer that it handles late grants what is over.
//
// Invariants: no packet leaves by eth0 with a slot's own address without its lease, whoever in the namespace made it.
// No packet comes out of a tunnel with another source than its client's. Other tables, of the namespace and of the
// host, are not touched.
//
// Apply and Close belong to one goroutine. Begin, Grant, Drop, Hold and Read may be called at any time beside them.
//
// Sources: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt.
package egressns
