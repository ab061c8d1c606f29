// Package control is the control net: authenticated streams and small packets between nodes for
// Raft, gossip and RPC, by two independent ways. The first is the tunnel (the peer's overlay
// address), the second the relay session; neither needs the other, so that a wrong data plane can
// always be repaired.
//
// Streams are TLS 1.3; both ends prove their identity key against the roster, and ALPN splits them.
// Packets that come by the tunnel are attributed by their overlay source address, which WireGuard has
// authenticated: what comes by another link is dropped. Between nodes that both know of it they carry a code
// besides that only the sender can make, as those by a relay always do. Streams by the tunnel are taken from
// members' overlay addresses only. Streams and packets by the tunnel leave by its link or not at all.
//
// All methods are safe for concurrent use. Source: DESIGN.md section 7.
package control
