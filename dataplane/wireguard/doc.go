// Package wireguard makes one WireGuard device be what a dataplane.Spec says.
//
// Diff is pure: wanted and actual state in, a list of Op out, in an order that never takes an allowed
// IP from a working peer before its new owner has it. A Device applies them: the kernel's through
// generic netlink, or wireguard-go in this process over a TUN device. Both switch an endpoint with one
// message, never replace the peer list and never touch a peer that did not change.
//
// A Reconciler belongs to one goroutine. Sources: DESIGN.md section 9, FIELD.md (WireGuard),
// the cross-platform configuration protocol of wireguard-go.
package wireguard
