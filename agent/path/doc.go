// Package path decides how WireGuard reaches each peer: directly at an endpoint, by UDP through a port that a relay
// has reserved, or in a relay's session.
//
// The core is pure. Each peer has one Machine, a value. Step folds one Input into it and returns actions: send a
// ping, ask the peer to punch, use a path, wake up later. Strategy says which of a peer's candidates are worth a ping
// for a pair of NATs, or why none is. Manager is the thin shell: one goroutine owns every machine and one timer wakes
// the earliest of them, so that a thousand idle peers cost nothing between their keepalives.
//
// Invariants:
//   - a direct path or a relay's port is used only after that very endpoint has answered a ping of this host, and a
//     ping as large as the tunnel's packets, unless nothing else reaches the peer;
//   - an address gets three pings before it answers, then single ones at growing intervals;
//   - an endpoint that does not answer gets a bounded number of pings in any window;
//   - a path that stays the same causes no action and no write.
//
// Step and Strategy may be called from anywhere. A Manager's methods are safe for concurrent use and never wait for
// the network. Maps returned by Paths are shared and must not be changed.
//
// Source: DESIGN.md section 8, the WireKube seed document, RFC 4787 (NAT behaviour), RFC 6298 (round-trip
// estimation), RFC 8445 (candidates and connectivity checks).
package path
