// Package fou makes tunnels that carry IPv4 in IPv4 and IPv6 in IPv6 inside UDP ("Foo over UDP"), in one network
// namespace.
//
// There are two drivers that put the same packets on the wire: the kernel's (ipip and ip6tnl devices with FoU
// encapsulation, and a listener for each family), and one over TUN devices in this process for kernels without. Devices
// have the same names with both.
//
// What is wanted and what is there are compared by a pure function, for both drivers. Only devices named fou4_… and
// fou6_… are touched; they are adopted from a former run, and stay when this process ends. With the TUN driver nothing
// passes then.
//
// A Driver belongs to one goroutine; Stats and Link may be called by any. Packets are handled by goroutines of the TUN
// driver's own.
//
// Sources: DESIGN.md sections 9 and 11 of the project; shared/seeds/coil-egress-nat.txt; RFC 2003, 2473 (without the
// encapsulation limit), 6040; virtio 1.2 section 5.1.6 for the header of what a TUN device reads and writes.
package fou
