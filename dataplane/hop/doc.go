// Package hop carries packets from node to node inside other packets (dataplane.Hops): IP in IP (RFC 2003, RFC 4213)
// with an IPv4 header of 20 bytes in front, ECN by RFC 6040. Table is the pure part: what is wrapped for whom, and
// whose packets are unwrapped. Device does it between wireguard-go and a TUN link, so that the kernel sees inner
// packets only.
package hop
