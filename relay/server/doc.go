// Package server is a relay: it carries packets and streams between members that cannot reach each other directly.
//
// A Server runs in public agents and gets TLS connections whose identity is already proven. Its clients are of package
// client, and what passes between them is of package wire. UDP ports that it reserves are of package udp.
//
// What always holds:
//   - The source of a packet is the identity that the relay saw proven, never what a client says.
//   - A node has one session per relay; a newer one replaces the older at once.
//   - No reader ever waits for a slow destination.
//   - A relay is trusted to deliver and with nothing else: it sees ciphertext of WireGuard and of the TLS
//     inside streams, and what travels on the channels of gossip and signals must prove its sender itself.
//
// All exported methods may be called concurrently. The reasons are in relay/DESIGN.md.
package server
