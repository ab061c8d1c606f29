// Package birthday finds a pair of open ports between two hosts whose NATs have no port that can be known beforehand.
//
// A symmetric NAT uses another port for every destination, and a port-restricted cone lets in only ports it has sent
// to. So one end opens many sockets towards the other's known port, each with its own mapping, and the other end
// sends from WireGuard's port to many ports of the first end's address. A port that is both open and tried is a hit,
// and the tunnel can use it: dataplane.PortRewrite directs WireGuard's packets through the socket's port.
//
// Ports, Budget and Memory are pure. Engine is the shell: one goroutine for each running attempt, one for its
// sockets. Package agent/path decides which pairs predict ports and when; signals carry the agreement with the peer.
//
// Invariants:
//   - an attempt sends at most MaxProbes packets from WireGuard's port and has at most MaxSockets sockets;
//   - nothing is sent before the peer has agreed, except from the few sockets that a prediction needs;
//   - only packets that prove the pair's key count; nothing that arrives at a socket is answered before WireGuard can
//     use it;
//   - sockets are closed when the attempt ends, whatever ended it, except the one that was hit, until Settle.
//
// Engine is safe for concurrent use. Budget and Memory are not: their owner guards them. Source: DESIGN.md section 8,
// FIELD.md, the WireKube seed document, RFC 4787.
package birthday
