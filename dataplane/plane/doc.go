// Package plane is the whole data plane behind one narrow door: give it a dataplane.Spec as often as
// you like, and the kernel becomes it.
//
// One goroutine, locked to a thread in the chosen network namespace, owns every socket and every
// reconciler; all methods may be called concurrently. Subsystems are independent: one that fails is
// reported and tried again, the others go on. What somebody else changes is noticed by netlink
// notification (WireGuard peers, for which the kernel has none, by reading the status) and repaired
// within a second, at a limited rate.
//
// Close leaves everything as it is; with the kernel driver packets flow on. Purge removes what is ours.
package plane
