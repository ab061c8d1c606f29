// Package tunprobe asks targets from inside a gateway's network namespace whether they can be reached on the way that
// clients' packets take: its packets come in by a TUN device, are forwarded, translated and sent by the kernel, and the
// answers come back by it.
//
// A target is asked by an ICMP echo, or by a TCP SYN; a SYN-ACK (answered by a reset) and a reset both count as
// reached. Answers are matched by address, identifier or port, and by 64 or 32 random bits. An ICMP error about a probe
// ends it with an error.
//
// The probes' source addresses are not addresses of the namespace, which would not forward them: routes lead them to
// the device, in the main table and in the one for answers (dataplane.GatewayTable), with protocol 30. Device and
// routes go with the process.
//
// All methods are safe for concurrent use. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN. Source: DESIGN.md section 11 of the
// project; RFC 791, 792, 4443, 8200, 9293.
package tunprobe
