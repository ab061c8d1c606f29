// Package client is a node's side of the relays.
//
// A Pool keeps one session with each relay that is needed, chooses the relay for each peer, sends and receives packets,
// and opens streams. Where two nodes share no relay that both can reach, their packets go over two. Proxies give
// WireGuard a local UDP address for each relayed peer. The Pool also asks relays for pairs of UDP ports, proves where
// this node's packets to them come from, and asks relays where a peer's packets come from.
//
// A relay is trusted to deliver and with nothing else: see package server.
//
// All exported methods may be called concurrently. Slices given to callbacks are valid only until the callback returns.
// The reasons are in relay/DESIGN.md.
package client
