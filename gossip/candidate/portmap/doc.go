// Package portmap is the step of discovery that asks the router: it has WireGuard's port mapped by PCP, NAT-PMP or
// UPnP, whichever the gateway speaks, keeps the mapping up, and gives it back at the end.
//
// A mapping is published only when it can be true: an address that is public and a port that is not zero. A router
// whose own address outside is private stands behind another NAT, and what it grants is not published. When the router
// forgets (its epoch jumps back, it announces itself, or the entry is gone), the mapping is asked for anew at once. The
// protocols are in packages of their own below; they hold no state.
//
// Step is used as candidate.Step says. DESIGN.md has the order of things. Source: RFC 6886, RFC 6887, UPnP
// WANIPConnection.
package portmap
