// Package egressns manages the network namespace of one egress on a gateway node: a link to the host, tunnels to the
// clients, routes, and an nftables table that decides which client's packets may pass, with which source address, and
// for how long.
//
// Apply takes the complete Spec, reads the kernel once, and writes the differences. The kernel's notifications report
// changes by others. Everything that an earlier run left is adopted, and nothing is removed before a Spec is
// complete.
//
// A slot's packets pass only while its lease runs, which the kernel counts down by itself: Begin makes a ticket with
// a timeout, and Grant lets the slot's packets pass while that ticket lives. A process that is paused, killed or cut
// off thereby stops forwarding without doing anything, and an answer that it handles late grants a ticket that has
// ended.
//
// Invariants: no packet leaves by eth0 with a slot's own address without its lease, whichever program in the
// namespace made it. No packet comes out of a tunnel with another source than its client's. Other tables, of the
// namespace and of the host, are not touched.
//
// Apply and Close must be called from one goroutine. Begin, Grant, Drop, Hold and Read may be called concurrently
// with them.
//
// Sources: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt.
package egressns
