// Package candidate finds out how the world can reach this host's WireGuard port: interface addresses,
// the address a NAT gives it (STUN from that very port), what kind of NAT that is, and what the
// configuration forces. It also holds the STUN server that public nodes run, so that a mesh needs nobody else's.
//
// What was observed (Evidence) and what follows from it (Assess) are kept apart: Assess is pure and
// tested by tables, the rest is a thin shell that asks. Discoverer runs that shell and tells of a Result
// only when it changed.
//
// Mapping is learned from WireGuard's port, by comparing what several servers, and two ports of each, saw.
// Filtering is learned in two ways. A fresh socket asks one server to have the answer sent from its other port and
// from another node (RFC 5780). WireGuard's port asks for an answer from a port that nobody has ever sent to, which a
// firewall or a port forwarding on that port may treat differently from all others. DESIGN.md tells how both are weighed.
//
// Invariants: an answer counts only with the transaction's ID and from where it was due; only XOR-MAPPED-ADDRESS is
// believed; the server never sends more bytes than it got (the smallest possible answer excepted); all tables are bounded.
//
// Discoverer and StunServer are safe for concurrent use. Source: DESIGN.md section 8, RFC 4787, RFC 5780, RFC 8489.
package candidate
