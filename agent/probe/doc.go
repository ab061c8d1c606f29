// Package probe sends and receives datagrams from WireGuard's own UDP port without owning it, and
// speaks the small authenticated ping and pong by which two agents find out whether a path works.
//
// Socket is a pair of raw sockets (IPv4 and IPv6). What it sends carries WireGuard's port as source,
// so a NAT maps it exactly as it maps WireGuard's packets. What it receives is chosen by a classic BPF
// filter inside the kernel: STUN and pings to that port, nothing else. It works beside WireGuard in
// the kernel and in userspace alike, because neither has to know of it.
//
// Codec is the message format, Window drops replayed pings, Prober ties them to the peers' keys:
// it answers pings, measures pongs and hands STUN on.
//
// Invariants: a datagram that does not prove a peer's key changes nothing and is never answered; an
// answer is never longer than its question; memory is bounded by the number of peers and of pings
// under way; nothing allocates in proportion to what strangers send.
//
// Socket and Prober are safe for concurrent use. Codec and Window are not: their owner guards them.
// Needs CAP_NET_RAW. Source: DESIGN.md sections 8 and 13; see DESIGN.md here for the packet.
package probe
