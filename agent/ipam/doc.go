// Package ipam assigns addresses to this host's pods, from the blocks that the log has allocated to this host.
//
// Invariants: no address is assigned to two attachments, even if file and kernel disagree; an address with a route in
// the kernel is never assigned; held blocks serve a request without any other node, and no request waits for another;
// a released address rests. All methods may be called concurrently.
//
// Source: DESIGN.md section 10; this package's own DESIGN.md gives the reasons.
package ipam
