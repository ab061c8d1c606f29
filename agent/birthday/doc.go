// Package birthday finds a pair of open ports between two hosts whose NATs cannot be told where to send.
//
// A symmetric NAT uses another port for every destination, and a port-restricted cone lets in only ports it has sent
// to. So the one end opens many sockets towards the other's one known port, each with a mapping of its own, and the
// other end sends from WireGuard's port to many ports of the first one's address. A port that is both open and tried is
// a hit, and the tunnel can use it: dataplane.PortRewrite leads WireGuard's packets through the socket's port.
//
// Ports, Budget and Memory are pure. Engine is the shell: one goroutine for each attempt under way, one for its
// sockets. Who shall guess and when is agent/path's decision; the agreement with the peer travels as a signal.
//
// Invariants:
//   - an attempt sends at most MaxProbes packets from WireGuard's port and has at most MaxSockets sockets;
//   - nothing is sent before the peer has agreed, but for the few sockets that a prediction needs;
//   - only packets that prove the pair's key count; nothing that arrives at a socket is answered before WireGuard can
//     use it;
//   - sockets are closed when the attempt ends, whatever ended it, but for the one that was hit, until Settle.
//
// Engine is safe for concurrent use. Budget and Memory are not: their owner guards them. Source: DESIGN.md section 8,
// FIELD.md, the WireKube seed document, RFC 4787.
package birthday
