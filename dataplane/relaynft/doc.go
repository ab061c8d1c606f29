// Package relaynft forwards the UDP of relayed pairs inside the kernel: nftables maps translate what one end sends to
// its reserved port into a packet from the other end's reserved port to the other end, and the connection table carries
// every later packet of both directions.
//
// All of it is one table, inet skein_relay: two maps for each family, a chain that leads packets to the other end, one
// that gives them the reserved port as their source, and one that keeps them out of this host's own tunnel. A pair
// costs one transaction. Its elements have a lifetime, so that they do not stay for ever when their agent does not come
// back.
//
// Only the exact flow of a proven mapping is translated (source and destination, address and port). Strangers' packets
// are not touched, and go to the socket that holds the port.
//
// Table is safe for concurrent use. Needs CAP_NET_ADMIN, and net.ipv4.ip_forward (net.ipv6.conf.all.forwarding), which
// is looked at and never set. Source: DESIGN.md section 8 of the project; nftables' wiki and the kernel's nft_nat.c.
package relaynft
