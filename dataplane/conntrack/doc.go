// Package conntrack reads and writes entries of the kernel's connection table by ctnetlink: the whole table, or single
// entries by their tuples, many in one system call.
//
// It is the only client of the table in the data plane. The libraries at hand do not serve: vishvananda/netlink 1.3.1
// reads the whole table to find one entry; ti-mo/conntrack 0.6.0 creates no entry whose source is translated
// (CTA_NAT_SRC); both wait for the answer to each message, and keep a whole table in memory to walk over it.
//
// A Conn belongs to one goroutine. It needs CAP_NET_ADMIN. Source: linux/netfilter/nfnetlink_conntrack.h and the
// kernel's nf_conntrack_netlink.c.
package conntrack
