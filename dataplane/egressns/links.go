package egressns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// links manages the veth pair, addresses, routes and rules of one namespace.
type links struct {
	file, egress string
	ns, host     *os.File   // the two namespaces
	in, out      *rtnl.Conn // sockets in each
	name         string     // of the host's end
	cache        *linkState
	writes       int

	mu       sync.Mutex
	expected expectation
}

// linkState is the kernel's state.
type linkState struct {
	uplink, lo, end netlink.Link // end: the host's; the other two are in the namespace
	addrs           []netip.Addr // of the uplink, in order, without those that the kernel generates
	endAddrs        []netip.Addr
	main            []netlink.Route // of the uplink, in the main table
	rules           map[int]bool    // by family
	slots           map[slotRule]bool
	clients         map[clientWay]int
	strays          []netlink.Route // skein's routes in the clients' tables not to a single address
	devices         map[string]int  // index by name
}

// clientWay identifies the route to a client.
type clientWay struct {
	table int
	addr  netip.Addr
}

// slotRule identifies the rule that sends the answers of a slot's flows to the slot's table.
type slotRule struct{ family, slot int }

func openLinks(file, owner, egress string, ns *os.File) (*links, error) {
	l := &links{file: file, egress: egress, ns: ns, name: HostLink(owner, egress)}
	var err error
	if l.host, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		return nil, fmt.Errorf("opening the host's network namespace: %w", err)
	}
	if l.in, err = rtnl.OpenAt(netns.NsHandle(ns.Fd())); err == nil {
		l.out, err = rtnl.OpenAt(netns.NsHandle(l.host.Fd()))
	}
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

func (l *links) close() error {
	for _, c := range []*rtnl.Conn{l.in, l.out} {
		if c != nil {
			c.Close()
		}
	}
	return l.host.Close()
}

func (l *links) forget() { l.cache = nil }

// alias is the alias of the host's end. It cannot be mistaken for a pod's.
func (l *links) alias() string { return "skein-egress/1 " + l.egress }

// ensurePair makes the veth pair unless it is intact, and reads both ends.
func (l *links) ensurePair(mtu int) (up, end netlink.Link, err error) {
	for try := 0; ; try++ {
		up, err = l.in.One().LinkByName(Uplink)
		if err == nil {
			end, err = l.out.One().LinkByName(l.name)
		}
		switch {
		case err == nil && up.Type() == "veth" && end.Type() == "veth" && up.Attrs().ParentIndex == end.Attrs().Index &&
			end.Attrs().ParentIndex == up.Attrs().Index:
			return up, end, nil
		case err != nil && !errors.As(err, new(netlink.LinkNotFoundError)):
			return nil, nil, fmt.Errorf("reading link %s of egress %s: %w", l.name, l.egress, err)
		case try > 0:
			return nil, nil, fmt.Errorf("link %s of egress %s does not lead to %s in %s, although it was just created: "+
				"another program changes it; stop that program", l.name, l.egress, Uplink, l.file)
		}
		if err := l.makePair(mtu); err != nil {
			return nil, nil, err
		}
	}
}

func (l *links) makePair(mtu int) error {
	if old, err := l.in.One().LinkByName(Uplink); err == nil {
		if err := l.in.One().LinkDel(old); err != nil {
			return fmt.Errorf("removing %s of egress %s, which leads elsewhere: %w", Uplink, l.egress, err)
		}
	}
	if old, err := l.out.One().LinkByName(l.name); err == nil {
		if a := old.Attrs().Alias; !strings.HasPrefix(a, "skein-egress/") {
			return fmt.Errorf("link %s has the name that egress %s needs, and was not created by skein: remove it", l.name,
				l.egress)
		}
		if err := l.out.One().LinkDel(old); err != nil {
			return fmt.Errorf("removing link %s of egress %s, which leads elsewhere: %w", l.name, l.egress, err)
		}
	}
	l.writes++
	return inside(l.host, func() error {
		return podnet.AddUplink(podnet.Uplink{Host: l.name, Alias: l.alias(), Interface: Uplink, NetNS: l.file, MTU: mtu})
	})
}

// read reads the kernel's complete state.
func (l *links) read(mtu int) (*linkState, error) {
	s := &linkState{rules: map[int]bool{}, slots: map[slotRule]bool{}, clients: map[clientWay]int{},
		devices: map[string]int{}}
	var err error
	if s.uplink, s.end, err = l.ensurePair(mtu); err != nil {
		return nil, err
	}
	fail := func(what string, err error) (*linkState, error) {
		return nil, fmt.Errorf("reading %s of egress %s: %w", what, l.egress, err)
	}
	if s.lo, err = l.in.One().LinkByName("lo"); err != nil {
		return fail("lo", err)
	}
	if s.addrs, err = addressesOf(l.in, s.uplink, false); err != nil {
		return fail("addresses", err)
	}
	if s.endAddrs, err = addressesOf(l.out, s.end, true); err != nil {
		return fail("addresses of the host's end", err)
	}
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		main, err := l.in.One().RouteListFiltered(f, &netlink.Route{Table: unix.RT_TABLE_MAIN,
			LinkIndex: s.uplink.Attrs().Index}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
		if err != nil {
			return fail("routes", err)
		}
		s.main = append(s.main, main...)
		rules, err := l.in.One().RuleList(f)
		if err != nil {
			return fail("rules", err)
		}
		for _, r := range rules {
			if slot := r.Table - dataplane.GatewaySlotTable; sameSlotRule(r, slot) {
				s.slots[slotRule{f, slot}] = true
			}
		}
		s.rules[f] = slices.ContainsFunc(rules, func(r netlink.Rule) bool {
			return r.Priority == dataplane.GatewayRule && r.IifName == Uplink && r.Table == dataplane.GatewayTable &&
				r.Src == nil && r.Dst == nil && r.Mark == 0 && !r.Invert
		})
		routes, err := l.in.One().RouteListFiltered(f, &netlink.Route{Table: unix.RT_TABLE_UNSPEC,
			Protocol: dataplane.RouteProtocol}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fail("routes to clients", err)
		}
		for _, r := range routes {
			if !clientTable(r.Table) {
				continue
			}
			if a, ok := single(r); ok && r.LinkIndex != 0 && r.Gw == nil {
				s.clients[clientWay{r.Table, a}] = r.LinkIndex
			} else {
				s.strays = append(s.strays, r)
			}
		}
	}
	return s, nil
}

// clientTable reports whether a table is one with routes to clients.
func clientTable(n int) bool {
	return n == dataplane.GatewayTable || n >= dataplane.GatewaySlotTable && n <= dataplane.GatewaySlotTable+maxAlso
}

// ruleOf is the kernel's form of a slot's rule.
func ruleOf(s slotRule) *netlink.Rule {
	r, mask := netlink.NewRule(), ^uint32(0)
	r.Family, r.Priority, r.IifName, r.Protocol = s.family, dataplane.GatewaySlotRule, Uplink, dataplane.RouteProtocol
	r.Mark, r.Mask, r.Table = Mark(s.slot), &mask, dataplane.GatewaySlotTable+s.slot
	return r
}

func sameSlotRule(r netlink.Rule, slot int) bool {
	return slot >= 0 && slot <= maxAlso && r.Priority == dataplane.GatewaySlotRule && r.IifName == Uplink &&
		r.Mark == Mark(slot) &&
		(r.Mask == nil || *r.Mask == ^uint32(0)) && r.Src == nil && r.Dst == nil && !r.Invert
}

// slotRules are the rules that the plan requires.
func (p plan) slotRules() map[slotRule]bool {
	out := map[slotRule]bool{}
	for _, c := range p.clients {
		if c.also {
			out[slotRule{rtnl.Family(c.addr), c.slot}] = true
		}
	}
	return out
}

// remade forgets the indexes of devices, after tunnels were made or removed.
func (l *links) remade() { l.cache.devices = map[string]int{} }

func single(r netlink.Route) (netip.Addr, bool) {
	p := rtnl.Prefix(r.Dst)
	return p.Addr(), p.IsValid() && p.IsSingleIP()
}

// addressesOf returns a link's addresses in the kernel's order; IPv6 link-local ones only if all is set.
func addressesOf(c *rtnl.Conn, l netlink.Link, all bool) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		as, err := c.One().AddrList(l, f)
		if err != nil {
			return nil, err
		}
		for _, a := range as {
			if ip := rtnl.Addr(a.IP); ip.IsValid() && (all || !ip.Is6() || !ip.IsLinkLocalUnicast()) {
				out = append(out, ip)
			}
		}
	}
	return out, nil
}

// doing counts a write, and adds context to its error.
func (l *links) doing(what string, err error) error {
	l.writes++
	if err != nil {
		return fmt.Errorf("%s, egress %s: %w", what, l.egress, err)
	}
	return nil
}

// uplink brings everything to the plan except the routes to clients.
func (l *links) uplink(p plan) error {
	s := l.cache
	if s == nil {
		var err error
		if s, err = l.read(p.mtu); err != nil {
			return err
		}
		if err := l.settings(); err != nil {
			return err
		}
		l.cache = s
	}
	return errors.Join(l.hostEnd(s, p.mtu), l.ownEnd(s, p.mtu), l.addresses(s, p), l.ways(s, p))
}

// start makes the pair and sets it up; an existing pair keeps its MTU.
func (l *links) start() error {
	up, end, err := l.ensurePair(dataplane.MTU)
	if err != nil {
		return err
	}
	if err := l.settings(); err != nil {
		return err
	}
	s := &linkState{uplink: up, end: end}
	if s.lo, err = l.in.One().LinkByName("lo"); err != nil {
		return fmt.Errorf("reading lo of egress %s: %w", l.egress, err)
	}
	if s.endAddrs, err = addressesOf(l.out, end, true); err != nil {
		return fmt.Errorf("reading addresses of %s: %w", l.name, err)
	}
	return errors.Join(l.hostEnd(s, end.Attrs().MTU), l.ownEnd(s, up.Attrs().MTU))
}

func (l *links) hostEnd(s *linkState, mtu int) error {
	var errs []error
	at := s.end.Attrs()
	if at.MTU != mtu {
		errs = append(errs, l.doing("setting the MTU of "+l.name, l.out.One().LinkSetMTU(s.end, mtu)))
		at.MTU = mtu
	}
	g4, g6 := podnet.Gateways()
	for _, g := range []netip.Prefix{g4, g6} {
		a := g.Addr()
		if slices.Contains(s.endAddrs, a) {
			continue
		}
		na := &netlink.Addr{IPNet: rtnl.Net(g), Scope: unix.RT_SCOPE_LINK}
		if a.Is6() {
			na.Flags = unix.IFA_F_NODAD
		}
		err := rtnl.Ignore(l.out.One().AddrAdd(s.end, na), unix.EEXIST)
		if a.Is6() {
			err = rtnl.Ignore(err, unix.EACCES, unix.EOPNOTSUPP) // no IPv6 on this host
		}
		errs = append(errs, l.doing("adding address "+a.String()+" to "+l.name, err))
		s.endAddrs = append(s.endAddrs, a)
	}
	if at.Flags&net.FlagUp == 0 {
		errs = append(errs, l.doing("setting "+l.name+" up", l.out.One().LinkSetUp(s.end)))
		at.Flags |= net.FlagUp
	}
	return errors.Join(errs...)
}

func (l *links) ownEnd(s *linkState, mtu int) error {
	var errs []error
	at := s.uplink.Attrs()
	if at.MTU != mtu {
		errs = append(errs, l.doing("setting the MTU of "+Uplink, l.in.One().LinkSetMTU(s.uplink, mtu)))
		at.MTU = mtu
	}
	for _, x := range []netlink.Link{s.lo, s.uplink} {
		if x.Attrs().Flags&net.FlagUp == 0 {
			errs = append(errs, l.doing("setting "+x.Attrs().Name+" up", l.in.One().LinkSetUp(x)))
			x.Attrs().Flags |= net.FlagUp
		}
	}
	return errors.Join(errs...)
}

// addresses sets the uplink's addresses. The namespace's own IPv4 address comes first, so that the kernel uses it as
// source.
func (l *links) addresses(s *linkState, p plan) error {
	want := p.addresses()
	var errs []error
	del := func(a netip.Addr) {
		err := rtnl.Ignore(l.in.One().AddrDel(s.uplink, &netlink.Addr{IPNet: rtnl.Host(a)}), unix.EADDRNOTAVAIL)
		errs = append(errs, l.doing("removing address "+a.String(), err))
	}
	first4 := slices.IndexFunc(s.addrs, netip.Addr.Is4)
	displaced := p.local4.IsValid() && first4 >= 0 && s.addrs[first4] != p.local4
	s.addrs = slices.DeleteFunc(s.addrs, func(a netip.Addr) bool {
		gone := p.complete && !slices.Contains(want, a) || displaced && a.Is4()
		if gone {
			del(a)
		}
		return gone
	})
	for _, a := range want {
		if slices.Contains(s.addrs, a) {
			continue
		}
		na := &netlink.Addr{IPNet: rtnl.Host(a)}
		if a.Is6() {
			na.Flags = unix.IFA_F_NODAD
		}
		err := rtnl.Ignore(l.in.One().AddrAdd(s.uplink, na), unix.EEXIST)
		errs = append(errs, l.doing("adding address "+a.String(), err))
		s.addrs = append(s.addrs, a)
	}
	return errors.Join(errs...)
}

// ways adds the routes to the host, and the rule.
func (l *links) ways(s *linkState, p plan) error {
	var errs []error
	index := s.uplink.Attrs().Index
	g4, g6 := podnet.Gateways()
	add := func(r netlink.Route, dst netip.Prefix) {
		there := func(k netlink.Route) bool {
			have := rtnl.Prefix(k.Dst)
			return (k.Family == r.Family || k.Family == 0) && k.Gw.Equal(r.Gw) &&
				(have == dst || !dst.IsValid() && have.Bits() == 0)
		}
		if slices.ContainsFunc(s.main, there) {
			return
		}
		r.LinkIndex, r.Table, r.Dst, r.Protocol = index, unix.RT_TABLE_MAIN, rtnl.Net(dst), unix.RTPROT_BOOT
		k := r
		if r.Dst == nil {
			k.Dst = rtnl.Anywhere(r.Family)
		}
		errs = append(errs, l.doing("adding the way to the host", l.in.One().RouteReplace(&k)))
		s.main = append(s.main, r)
	}
	anywhere := netip.Prefix{}
	add(netlink.Route{Family: unix.AF_INET, Scope: unix.RT_SCOPE_LINK}, g4)
	add(netlink.Route{Family: unix.AF_INET, Gw: g4.Addr().AsSlice()}, anywhere)
	if p.local6.IsValid() {
		add(netlink.Route{Family: unix.AF_INET6, Gw: g6.Addr().AsSlice()}, anywhere)
	}
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		if s.rules[f] {
			continue
		}
		r := netlink.NewRule()
		r.Family, r.Priority, r.IifName, r.Table, r.Protocol = f, dataplane.GatewayRule, Uplink, dataplane.GatewayTable,
			dataplane.RouteProtocol
		err := rtnl.Ignore(l.in.One().RuleAdd(r), unix.EEXIST)
		errs = append(errs, l.doing("adding the rule to the clients' routes", err))
		s.rules[f] = err == nil
	}
	return errors.Join(errs...)
}

func clientRoute(w clientWay, index int) *netlink.Route {
	return &netlink.Route{Family: rtnl.Family(w.addr), Dst: rtnl.Host(w.addr), LinkIndex: index, Table: w.table,
		Protocol: dataplane.RouteProtocol, Scope: unix.RT_SCOPE_UNIVERSE}
}

// unroute removes routes: first those of clients that are gone, before their devices are removed; with late, after
// all other routes are in place, those that remaining clients no longer need. Flows by a slot that becomes their
// client's own use the slot's table until the client's route leads there.
func (l *links) unroute(p plan, late bool) error {
	if !p.complete {
		return nil
	}
	wanted := map[clientWay]bool{}
	for _, c := range p.clients {
		wanted[clientWay{c.table(), c.addr}] = true
	}
	known := map[netip.Addr]bool{}
	for _, c := range p.clients {
		known[c.addr] = true
	}
	s := l.cache
	var errs []error
	for r := range s.slots {
		if late && !p.slotRules()[r] {
			errs = append(errs, l.doing("removing the rule of a slot's flows",
				rtnl.Ignore(l.in.One().RuleDel(ruleOf(r)), unix.ENOENT)))
			delete(s.slots, r)
		}
	}
	gone := func(r *netlink.Route) {
		err := rtnl.Ignore(l.in.One().RouteDel(r), unix.ESRCH)
		errs = append(errs, l.doing("removing the route to "+r.Dst.String(), err))
	}
	for w, index := range s.clients {
		if !wanted[w] && (late || !known[w.addr]) {
			gone(clientRoute(w, index))
			delete(s.clients, w)
		}
	}
	for _, r := range s.strays {
		if r.Dst == nil {
			r.Dst = rtnl.Anywhere(r.Family)
		}
		gone(&r)
	}
	s.strays = nil
	l.depend(s)
	return errors.Join(errs...)
}

// route directs each client's packets into its tunnel. Routes for flows by other slots come first; until they exist,
// those flows use the client's own route.
func (l *links) route(p plan, link func(local, remote netip.Addr) string) error {
	s := l.cache
	var errs []error
	clients := slices.Clone(p.clients)
	slices.SortStableFunc(clients, func(a, b client) int { return dataplane.Bit(b.also) - dataplane.Bit(a.also) })
	rules := p.slotRules()
	led := len(rules) == 0
	for _, c := range clients {
		if !c.also && !led {
			errs, led = append(errs, l.slotRules(rules)...), true
		}
		name, at := link(c.end, c.addr), clientWay{c.table(), c.addr}
		index, known := s.devices[name]
		have, routed := s.clients[at]
		if known && routed && have == index {
			continue
		}
		if !known {
			d, err := l.in.One().LinkByName(name)
			if err != nil {
				errs = append(errs, fmt.Errorf("looking for the tunnel %s to %s, egress %s: %w", name, c.addr, l.egress, err))
				continue
			}
			index = d.Attrs().Index
			s.devices[name] = index
			if routed && have == index {
				continue
			}
		}
		err := l.in.One().RouteReplace(clientRoute(at, index))
		if c.addr.Is6() && routed && err == nil { // IPv6 replaces only a route through the same link
			_ = l.in.One().RouteDel(clientRoute(at, have))
		}
		if errs = append(errs, l.doing("adding the route to "+c.addr.String(), err)); err == nil {
			s.clients[at] = index
		}
	}
	l.depend(s)
	return errors.Join(errs...)
}

// slotRules adds missing rules.
func (l *links) slotRules(want map[slotRule]bool) (errs []error) {
	for r := range want {
		if !l.cache.slots[r] {
			err := rtnl.Ignore(l.in.One().RuleAdd(ruleOf(r)), unix.EEXIST)
			errs = append(errs, l.doing("adding the rule of a slot's flows", err))
			l.cache.slots[r] = err == nil
		}
	}
	return errs
}
