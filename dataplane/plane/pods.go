package plane

import (
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// podSet is the Spec's information about pods, for comparison with notifications. Changes by podnet and this process
// concern objects that the Spec does not have yet or no longer has. So a change of an object in the Spec was made by
// another program.
type podSet struct {
	links map[string]bool
	dsts  map[netip.Prefix]bool // blocks and single addresses
}

func newPodSet(p dataplane.Pods) *podSet {
	s := &podSet{links: map[string]bool{}, dsts: map[netip.Prefix]bool{}}
	for _, b := range slices.Concat(p.Blocks, p.Refused, p.Pools, p.Elsewhere) {
		s.dsts[b.Masked()] = true
	}
	for _, a := range p.Exported {
		s.dsts[netip.PrefixFrom(a, a.BitLen())] = true
	}
	for _, n := range p.Remote {
		s.dsts[n.Prefix.Masked()] = true
	}
	for _, r := range p.Routes {
		s.links[r.Link] = true
		s.dsts[netip.PrefixFrom(r.Addr, r.Addr.BitLen())] = true
	}
	return s
}

// lost reports whether a notification says that a route or rule of the Spec's pods was deleted or replaced, or that a
// pod's link has come up again: the kernel deleted its routes without notification when it went down.
func (s *podSet) lost(m netlink.Message, n dataplane.Numbers) bool {
	if s == nil || len(s.dsts) == 0 {
		return false
	}
	switch m.Header.Type {
	case unix.RTM_DELRULE:
		return rtnl.Table(m) == n.PodTable()
	case unix.RTM_NEWROUTE:
		return m.Header.Flags&netlink.Replace != 0 && s.has(m, n)
	case unix.RTM_DELROUTE:
		return s.has(m, n)
	case unix.RTM_NEWLINK:
		flags, changed := rtnl.LinkFlags(m)
		return flags&changed&unix.IFF_UP != 0 && s.links[rtnl.LinkName(m)]
	}
	return false
}

// has reports whether the route's destination is one of the Spec's, in one of the two tables.
func (s *podSet) has(m netlink.Message, n dataplane.Numbers) bool {
	if t := rtnl.Table(m); t != n.PodTable() && t != n.ExportTable() {
		return false
	}
	return s.dsts[rtnl.Destination(m)]
}
