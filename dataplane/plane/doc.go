// Package plane is the complete data plane behind a narrow interface: pass a dataplane.Spec to Apply as often as
// needed, and the kernel is brought to it.
//
// One goroutine, locked to a thread in the chosen network namespace, owns every socket and every reconciler; all
// methods are safe for concurrent use. Subsystems are independent: a failing one is reported and retried, the others
// continue. Drift is detected by netlink notifications (for WireGuard peers, which have none, by reading the status)
// and repaired within a second, at a limited rate.
//
// Close leaves the kernel unchanged; with the kernel driver packets continue to flow. Purge removes everything of
// skein.
package plane
