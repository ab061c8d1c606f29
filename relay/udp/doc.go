// Package udp is a relay's reserved UDP ports: pairs of ports through which packets of two nodes pass the relay as
// plain UDP, in its kernel or in this process.
//
// What always holds:
//   - Packets are forwarded only between two mappings that the ends of a pair have proven: by a bind with the key of
//     the reservation, which carries the nonce that was sent to where it comes from.
//   - What comes from anywhere else reaches the relay's socket and nobody else.
//   - On the wire both ways of forwarding are the same.
//
// A Relay belongs to a server, which tells it of sessions and of what clients say. All exported methods may be called
// concurrently. The reasons are in relay/DESIGN.md.
package udp
