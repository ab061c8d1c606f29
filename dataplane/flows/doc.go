// Package flows moves established flows of an egress slot from one gateway to another: it reads them from the
// connection table of one network namespace into small self-contained entries, and writes these into another's, so
// that source translation continues with the same address and port.
//
// An entry holds only what translation needs: the original direction, address and port of the translation, the
// protocol's state, timeout, mark and zone. The kernel's reply direction follows from these. Counters, identifiers,
// helpers, expectations and destination translation are left out. An entry comes from another node and is not
// trusted: every byte is checked, and an entry that does not fit the given Match is refused.
//
// The positions of TCP's windows are not moved, since the kernel neither shows nor accepts them. Instead the entry is
// marked liberal about windows, so that no packet of the flow counts as invalid.
//
// Protocols: TCP, UDP, UDP-Lite, SCTP, ICMP and ICMPv6 queries. Flows of other protocols are not moved and start
// anew.
//
// Dump and Load are safe for concurrent use and need CAP_NET_ADMIN and CAP_SYS_ADMIN. Source: DESIGN.md section 11 of
// the project; linux/netfilter/nfnetlink_conntrack.h and the kernel's nf_conntrack_netlink.c.
package flows
