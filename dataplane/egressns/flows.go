package egressns

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// Flows are how many flows go by each slot, by the namespace's connection table. TCP connections that have ended do not
// count.
func (n *NS) Flows() (map[int]int, error) {
	h, err := netlink.NewHandleAt(netns.NsHandle(n.ns.Fd()), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening conntrack's netlink socket: %w", err)
	}
	defer h.Close()
	out := map[int]int{}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		err := error(netlink.ErrDumpInterrupted)
		var list []*netlink.ConntrackFlow
		for try := 0; try < 10 && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
			list, err = nlcount.One(h).ConntrackTableList(netlink.ConntrackTable, family)
		}
		if err != nil {
			return nil, fmt.Errorf("reading the connection table of egress %s: %w", n.o.Egress, err)
		}
		for _, f := range list {
			if slot, ok := toSlot(number(f.Mark)); ok && !over(f) {
				out[slot]++
			}
		}
	}
	return out, nil
}

// over tells whether a flow is a TCP connection that has ended, and is only remembered.
func over(f *netlink.ConntrackFlow) bool {
	const timeWait, closed = 7, 8 // of linux/netfilter/nf_conntrack_tcp.h
	tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP)
	return ok && (tcp.State == timeWait || tcp.State == closed)
}
