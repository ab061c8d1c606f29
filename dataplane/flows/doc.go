// Package flows moves established flows of an egress slot from one gateway to another: it reads them from the
// connection table of a network namespace into small self-contained entries, and writes such entries into another's, so
// that source translation goes on with the same address and port.
//
// An entry is what it takes to translate on, and no more: the original direction, address and port of the translation,
// the protocol's state, timeout, mark and zone. What the kernel calls the reply direction follows. Counters,
// identifiers, helpers, expectations and destination translation have no place in it. An entry comes from another node
// and is not trusted: each byte is checked, and an entry that is not of the given Match is refused.
//
// How far TCP's windows have come is not carried over, since the kernel neither tells nor takes it: the entry is marked
// liberal about windows, so that no packet of the flow counts as invalid.
//
// Protocols: TCP, UDP, UDP-Lite, SCTP, ICMP and ICMPv6 queries. Others are not moved; their flows start anew.
//
// Dump and Load are safe for concurrent use and need CAP_NET_ADMIN and CAP_SYS_ADMIN. Source: DESIGN.md section 11 of
// the project; linux/netfilter/nfnetlink_conntrack.h and the kernel's nf_conntrack_netlink.c.
package flows
