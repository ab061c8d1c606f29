package egressclient

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// kernel talks to one network namespace.
type kernel struct {
	n dataplane.Numbers
	c *rtnl.Conn
	// Results of the last read in the kernel's form, needed for deletion.
	rawRules  map[Rule]netlink.Rule
	rawRoutes map[Route]netlink.Route
	// flows are slots whose tables are read even without a rule: an interrupted run may have left routes there.
	flows []int
}

func openKernel(ns netns.NsHandle, n dataplane.Numbers) (*kernel, error) {
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		return nil, err
	}
	return &kernel{n: n, c: c}, nil
}

func (k *kernel) close() {
	k.c.Close()
}

func toRule(r Rule) *netlink.Rule {
	k := netlink.NewRule()
	k.Family, k.Priority, k.Table, k.Protocol = r.Family.AF(), r.Priority, r.Table, dataplane.RouteProtocol
	k.Src, k.Dst = rtnl.Net(r.From), rtnl.Net(r.To)
	if r.Mask != 0 {
		k.Mark, k.Mask = r.Mark, &r.Mask
	}
	if r.Local {
		k.IifName = "lo"
	}
	return k
}

// fromRule decodes a rule; anything that this package's rules do not have goes into Other.
func fromRule(f Family, k netlink.Rule) Rule {
	r := Rule{Family: f, Priority: k.Priority, Table: k.Table, From: rtnl.Prefix(k.Src), To: rtnl.Prefix(k.Dst),
		Mark: k.Mark, Local: k.IifName == "lo"}
	if k.Mask != nil {
		r.Mask = *k.Mask
	}
	plain, have := *toRule(r), k
	plain.Mask, plain.Src, plain.Dst = nil, nil, nil
	have.Mask, have.Src, have.Dst = nil, nil, nil
	if a, b := fmt.Sprintf("%+v", plain), fmt.Sprintf("%+v", have); a != b {
		r.Other = "(" + k.String() + ")"
	}
	return r
}

func toRoute(r Route, link int) *netlink.Route {
	k := &netlink.Route{Family: dataplane.FamilyOf(r.Dst.Addr()).AF(), Dst: rtnl.Net(r.Dst), Table: r.Table,
		Protocol: dataplane.RouteProtocol}
	switch r.Kind {
	case Unreachable:
		k.Type, k.Priority = unix.RTN_UNREACHABLE, fallbackMetric
	case Throw:
		k.Type = unix.RTN_THROW
	default:
		k.Type, k.LinkIndex, k.Scope = unix.RTN_UNICAST, link, netlink.SCOPE_UNIVERSE
		if r.Src.IsValid() {
			k.Src = r.Src.AsSlice()
		}
	}
	return k
}

// fromRoute decodes a route; linkName returns the name for a link's index.
func fromRoute(f Family, k netlink.Route, linkName func(int) string) Route {
	dst := rtnl.Prefix(k.Dst)
	if !dst.IsValid() {
		dst = rtnl.Prefix(rtnl.Anywhere(f.AF()))
	}
	r := Route{Table: k.Table, Dst: dst}
	plain := len(k.Gw) == 0 && k.Via == nil && len(k.MultiPath) == 0 && k.Tos == 0
	first := k.Priority == rtnl.Metric(f.AF())
	src := rtnl.Addr(k.Src)
	switch {
	case plain && k.Type == unix.RTN_UNREACHABLE && k.Priority == fallbackMetric && !src.IsValid():
		r.Kind = Unreachable
	case plain && k.Type == unix.RTN_THROW && first && !src.IsValid():
		r.Kind = Throw
	case plain && k.Type == unix.RTN_UNICAST && first:
		r.Link, r.Src = linkName(k.LinkIndex), src
	default:
		r.Other = fmt.Sprintf("type %d %s metric %d", k.Type, k, k.Priority)
	}
	return r
}

// read reads this package's rules and routes.
func (k *kernel) read() (State, error) {
	var s State
	k.rawRules, k.rawRoutes = map[Rule]netlink.Rule{}, map[Route]netlink.Route{}
	names := map[int]string{}
	linkName := func(index int) string {
		if _, known := names[index]; !known {
			names[index] = fmt.Sprintf("#%d", index)
			if l, err := k.c.One().LinkByIndex(index); err == nil {
				names[index] = l.Attrs().Name
			}
		}
		return names[index]
	}
	for _, f := range []Family{IPv4, IPv6} {
		rules, err := k.c.Rules(f.AF(), dataplane.RouteProtocol)
		if err != nil {
			return State{}, err
		}
		for _, rule := range rules {
			if ours(rule.Priority, rule.Table, k.n) && rule.Family == f.AF() {
				r := fromRule(f, rule)
				k.rawRules[r] = rule
				s.Rules = append(s.Rules, r)
			}
		}
		for _, table := range k.tables(s.Rules) {
			routes, err := k.c.Routes(f.AF(), table)
			if err != nil {
				return State{}, err
			}
			for _, route := range routes {
				if route.Protocol == dataplane.RouteProtocol {
					r := fromRoute(f, route, linkName)
					k.rawRoutes[r] = route
					s.Routes = append(s.Routes, r)
				}
			}
		}
	}
	s.sort()
	return s, nil
}

// tables are the tables to read: the two of every client, and those of flows by other slots.
func (k *kernel) tables(rules []Rule) []int {
	out := []int{k.n.ClientNarrowTable(), k.n.ClientWideTable()}
	for _, r := range rules {
		if flowTable(r.Table) {
			out = append(out, r.Table)
		}
	}
	for _, slot := range k.flows {
		out = append(out, dataplane.ClientFlowNarrowTable+slot, dataplane.ClientFlowWideTable+slot)
	}
	return set(out)
}

func (k *kernel) apply(o Op) error {
	switch o.Verb {
	case AddRule:
		return rtnl.Ignore(k.c.One().RuleAdd(toRule(o.Rule)), unix.EEXIST)
	case DelRule:
		raw, ok := k.rawRules[o.Rule]
		if !ok {
			raw = *toRule(o.Rule)
		}
		return rtnl.Ignore(k.c.One().RuleDel(&raw), unix.ENOENT)
	case DelRoute:
		raw, ok := k.rawRoutes[o.Route]
		if !ok {
			raw = *toRoute(o.Route, 0)
		}
		return rtnl.Ignore(k.c.One().RouteDel(&raw), unix.ESRCH)
	}
	link := 0
	if o.Route.Kind == Tunnel {
		l, err := k.c.One().LinkByName(o.Route.Link)
		if err != nil {
			return err
		}
		link = l.Attrs().Index
	}
	if o.Verb == ReplaceRoute {
		return k.c.One().RouteReplace(toRoute(o.Route, link))
	}
	err := k.c.One().RouteAdd(toRoute(o.Route, link))
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: another program has added a route to the same destination in this table: remove it", err)
	}
	return err
}

// link is the part of a device's state that this package needs.
type link struct {
	there, up bool
	mtu       int
	tunnel    *fou.Tunnel // set for a tunnel device of the kernel driver
}

func (k *kernel) link(name string) (link, error) {
	l, there, err := k.c.Link(name)
	if err != nil || !there {
		return link{}, err
	}
	a := l.Attrs()
	out := link{there: true, up: a.Flags&net.FlagUp != 0, mtu: a.MTU}
	ends := func(local, remote net.IP, sport uint16) {
		out.tunnel = &fou.Tunnel{Local: rtnl.Addr(local), Remote: rtnl.Addr(remote), SourcePortAuto: sport == 0, MTU: a.MTU}
	}
	switch t := l.(type) {
	case *netlink.Iptun:
		ends(t.Local, t.Remote, t.EncapSport)
	case *netlink.Ip6tnl:
		ends(t.Local, t.Remote, t.EncapSport)
	}
	return out, nil
}

// hasTunnels reports whether tunnel devices exist.
func (k *kernel) hasTunnels() (bool, error) {
	links, err := k.c.One().LinkList()
	if err != nil {
		return false, fmt.Errorf("reading links: %w", err)
	}
	return slices.ContainsFunc(links, func(l netlink.Link) bool { return tunnelName(l.Attrs().Name) }), nil
}

func tunnelName(name string) bool {
	return strings.HasPrefix(name, "fou4_") || strings.HasPrefix(name, "fou6_")
}

// own returns a host's addresses outside the mesh: those of all links except skein's.
func (k *kernel) own(uplink string, not ...netip.Addr) ([]netip.Addr, error) {
	links, err := k.c.One().LinkList()
	if err != nil {
		return nil, fmt.Errorf("reading links: %w", err)
	}
	foreign := map[int]bool{}
	for _, l := range links {
		name := l.Attrs().Name
		foreign[l.Attrs().Index] = name != "lo" && name != uplink && !ourLink(name)
	}
	list, err := k.c.One().AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("reading addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range list {
		if addr := rtnl.Addr(a.IP); foreign[a.LinkIndex] && addr.IsGlobalUnicast() {
			out = append(out, addr)
		}
	}
	return distinct(out, not), nil
}

// ourLink reports whether a link's name is that of a tunnel, a pod's link or a gateway's.
func ourLink(name string) bool {
	const podLink = len("sk") + 12 // podnet.HostLink: sk and 12 digits
	return tunnelName(name) || strings.HasPrefix(name, "sk") && len(name) == podLink
}

// Addresses returns the first usable address of each family of a link in a network namespace.
func Addresses(path, device string) (ipv4, ipv6 netip.Addr, err error) {
	ns, err := rtnl.Namespace(path)
	if err != nil {
		return ipv4, ipv6, err
	}
	defer ns.Close()
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		return ipv4, ipv6, fmt.Errorf("entering the network namespace %s: %w", path, err)
	}
	defer c.Close()
	l, err := c.One().LinkByName(device)
	if err != nil {
		return ipv4, ipv6, fmt.Errorf("link %s in the network namespace %s: %w", device, path, err)
	}
	list, err := c.One().AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return ipv4, ipv6, fmt.Errorf("addresses of %s in the network namespace %s: %w", device, path, err)
	}
	for _, one := range list {
		switch a := rtnl.Addr(one.IP); {
		case !a.IsGlobalUnicast():
		case a.Is4() && !ipv4.IsValid():
			ipv4 = a
		case a.Is6() && !ipv6.IsValid():
			ipv6 = a
		}
	}
	if !ipv4.IsValid() && !ipv6.IsValid() {
		err = fmt.Errorf("link %s in the network namespace %s has no address", device, path)
	}
	return ipv4, ipv6, err
}
