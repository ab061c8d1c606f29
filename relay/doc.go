// Package relay carries packets and streams between members that cannot reach each other directly.
//
// A Server runs in public agents and gets TLS connections whose identity is already proven. A Pool
// is a node's side: one session with each relay, the choice of a relay per peer, packets, streams.
// Proxies give WireGuard a local UDP address for each relayed peer. UDP reserves pairs of ports through which
// packets pass the relay as plain UDP, in its kernel or in this process.
//
// What always holds:
//   - The source of a packet is the identity that the relay saw proven, never what a client says.
//   - A node has one session per relay; a newer one replaces the older at once.
//   - No reader ever waits for a slow destination: each destination has a bounded queue that drops
//     its oldest packets, and senders share it fairly.
//   - Control frames leave before packets, and packets of the control net before WireGuard's.
//   - A relay is trusted to deliver and with nothing else: it sees ciphertext of WireGuard and of the TLS
//     inside streams, and what travels on the channels of gossip and signals must prove its sender itself.
//
// All exported methods may be called concurrently. Slices given to callbacks are valid only
// until the callback returns. See DESIGN.md here for the frames; sources are DESIGN.md sections 7, 8
// and 13 of the project.
package relay
