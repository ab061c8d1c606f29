// Package reflexive is the step of discovery that asks STUN servers: the address that a NAT gives to WireGuard's port,
// asked from that very port, and what kind of NAT that is.
//
// What was observed (Evidence) and what follows from it (Assess) are kept apart: Assess is pure and
// tested by tables, the rest is a thin shell that asks. Step runs that shell.
//
// Mapping is learned from WireGuard's port, by comparing what several servers, and two ports of each, saw. Filtering is
// learned in two ways. A fresh socket asks one server to have the answer sent from its other port and from another node
// (RFC 5780). WireGuard's port asks for an answer from a port that nobody has ever sent to, which a firewall or a port
// forwarding on that port may treat differently from all others. DESIGN.md tells how both are weighed.
//
// Invariants: an answer counts only with the transaction's ID and from where it was due; only XOR-MAPPED-ADDRESS is
// believed; all tables are bounded. Step is safe for concurrent use as far as its methods say.
// Source: DESIGN.md section 8 of the project, RFC 4787, RFC 5780, RFC 8489.
package reflexive
