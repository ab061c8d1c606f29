// Package ipam gives this host's pods their addresses, out of the blocks that the log has given to this host.
//
// Invariants: no address is given to two attachments, whatever file and kernel say; what the kernel has a route for is
// never given; a request is answered from held blocks without asking anybody, and none waits for another's; an
// address that was given back rests. All methods may be called concurrently.
//
// Source: DESIGN.md section 10; this package's own DESIGN.md says why it is built so.
package ipam
