package hopnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Reconciler keeps the kernel as the Spec's hops say. It remembers what it read and wrote.
type Reconciler struct {
	c      *rtnl.Conn
	guards *nftable.Reconciler
	n      dataplane.Numbers
	cache  *State
	host   Host
	active bool // else nothing is wanted, whatever a Spec says
	used   bool // there may be something of ours in the kernel
}

// NewReconciler opens netlink sockets in the calling thread's network namespace. One that is not active takes away
// what a former run has left, with whose driver hops were the kernel's. Zero Numbers are the default ones.
func NewReconciler(active bool, n dataplane.Numbers) (r *Reconciler, err error) {
	n = n.Filled()
	r = &Reconciler{active: active, used: true, n: n}
	if r.c, err = rtnl.Open(); err != nil {
		return nil, err
	}
	if r.guards, err = nftable.NewReconciler(0); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "hop" }

// PortID is the netlink address under which this writes to nftables.
func (r *Reconciler) PortID() uint32 { return r.guards.PortID() }

// Forget makes the next Reconcile read the kernel first.
func (r *Reconciler) Forget() {
	r.cache = nil
	r.guards.Forget()
}

// Close closes the sockets; everything stays.
func (r *Reconciler) Close() error {
	r.c.Close()
	if r.guards != nil {
		return r.guards.Close()
	}
	return nil
}

// Repair is Reconcile.
func (r *Reconciler) Repair(s dataplane.Spec) (int, []string, error) { return r.Reconcile(s) }

// Reconcile makes the kernel what the Spec says and returns how many messages that took. A host that never had hops
// is not read again.
func (r *Reconciler) Reconcile(s dataplane.Spec) (writes int, notes []string, err error) {
	s = r.wanted(s)
	if !s.Hops.Self.IsValid() && !r.used {
		return 0, nil, nil
	}
	defer func() {
		if err != nil {
			r.Forget()
		}
	}()
	if r.cache == nil {
		r.host = readHost()
	}
	want, notes := Want(s, r.host)
	if r.cache == nil {
		st, err := r.read(r.host, want.Guards)
		if err != nil {
			return 0, nil, err
		}
		r.cache = &st
	}
	ops := Diff(want, *r.cache, s.Complete)
	r.used = want.Self.IsValid() || !s.Complete || len(ops) > 0
	var first error
	for _, op := range ops {
		switch err := r.apply(op); {
		case err == nil:
			writes++
			next := r.cache.Apply([]Op{op})
			r.cache = &next
		case op.Verb == SetForward4 || op.Verb == SetForward6:
			notes = append(notes, fmt.Sprintf("%s: %v: nothing comes here for pods of this host, and nothing is passed on for "+
				"other nodes", op.text(r.n), err))
		case op.Verb == SetRPFilter:
			notes = append(notes, fmt.Sprintf("%s: %v: packets from nodes of other sites may be dropped", op.text(r.n), err))
		case first == nil:
			first = fmt.Errorf("%s: %w", op.text(r.n), err) // the rest need not fail with it
		}
	}
	return writes, notes, first
}

// wanted is the Spec, or one without hops.
func (r *Reconciler) wanted(s dataplane.Spec) dataplane.Spec {
	if !r.active {
		s.Hops, s.Complete = dataplane.Hops{}, true
	}
	return s
}

// Diff tells what Reconcile would do, from a fresh read.
func (r *Reconciler) Diff(s dataplane.Spec) (lines []string, err error) {
	h := readHost()
	s = r.wanted(s)
	want, _ := Want(s, h)
	actual, err := r.read(h, want.Guards)
	if err != nil {
		return nil, err
	}
	for _, op := range Diff(want, actual, s.Complete) {
		lines = append(lines, op.text(r.n))
	}
	return lines, nil
}

// Counts are the packets of hops since the link was made; what was dropped, since the guards were.
func (r *Reconciler) Counts() (c hop.Counts, err error) {
	if !r.used {
		return c, nil
	}
	table := &nftables.Table{Name: r.n.HopNftTable, Family: nftables.TableFamilyINet}
	chain := &nftables.Chain{Table: table, Name: chainGuards}
	if rules, err := r.guards.Nft().GetRules(table, chain); err == nil { // else there are none
		c.Refused, c.Malformed = dropped(rules)
	}
	l, there, err := r.c.Link(r.n.HopLink)
	if err != nil || !there {
		return c, err
	}
	if s := l.Attrs().Statistics; s != nil {
		c.Wrapped, c.Unwrapped = s.TxPackets, s.RxPackets
	}
	return c, nil
}

// Purge removes everything of ours.
func (r *Reconciler) Purge() error {
	st, err := r.read(readHost(), Guards{})
	if err != nil {
		return err
	}
	r.Forget()
	var errs []error
	for _, op := range Diff(State{}, st, true) {
		if err := r.apply(op); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", op.text(r.n), err))
		}
	}
	return errors.Join(errs...)
}

// read reads the kernel; guards are for whom the guards should be.
func (r *Reconciler) read(h Host, guards Guards) (s State, err error) {
	s.RPFilter = -1
	index := 0
	l, there, err := r.c.Link(r.n.HopLink)
	if err != nil {
		return s, err
	}
	if there {
		sit, ok := l.(*netlink.Sittun)
		if !ok {
			return s, fmt.Errorf("link %s is a %s link, not skein's: remove it", r.n.HopLink, l.Type())
		}
		a := l.Attrs()
		s.Self, _ = netip.AddrFromSlice(sit.Local.To4())
		if !s.Self.IsValid() || len(sit.Remote) > 0 && !sit.Remote.IsUnspecified() {
			s.Self = netip.IPv4Unspecified() // another one than any that we make
		}
		index, s.Up, s.MTU = a.Index, a.Flags&net.FlagUp != 0, a.MTU
		if v, ok := rtnl.ReadSetting(unix.AF_INET, r.n.HopLink, "rp_filter"); ok {
			s.RPFilter = v
		}
		v, _ := rtnl.ReadSetting(unix.AF_INET, r.n.HopLink, "forwarding")
		s.Forward4 = v != 0
		v, _ = rtnl.ReadSetting(unix.AF_INET6, r.n.HopLink, "force_forwarding")
		s.Forward6 = v != 0 || h.ForwardAll6
	}
	for _, f := range families(h) {
		rules, err := r.readRules(f)
		if err != nil {
			return s, err
		}
		s.Rules = append(s.Rules, rules...)
		for _, last := range []bool{false, true} {
			routes, err := r.readRoutes(f, last, index)
			if err != nil {
				return s, err
			}
			s.Routes = append(s.Routes, routes...)
		}
	}
	slices.SortFunc(s.Routes, compareRoutes)
	slices.SortFunc(s.Rules, compareRules)
	s.Guards, err = r.readGuards(guards.Self, guards.Self6)
	if err != nil && r.active { // a host without nftables has none to be taken away
		return s, err
	}
	return s, nil
}

func families(h Host) []int {
	if h.IPv6 {
		return []int{4, 6}
	}
	return []int{4}
}

func af(family int) int { return dataplane.Family(family).AF() }

func (r *Reconciler) readRules(f int) (out []Rule, err error) {
	list, err := r.c.Rules(af(f), dataplane.RouteProtocol)
	for _, k := range list {
		switch {
		case k.Priority == r.n.HopRule() && k.Table == r.n.HopTable() && k.Invert && k.Mark == r.n.MarkWG:
			out = append(out, Rule{Family: f})
		case k.Priority == r.n.HopLastRule() && k.Table == r.n.HopLastTable() && k.IifName == r.n.HopLink:
			out = append(out, Rule{Family: f, Last: true})
		}
	}
	return out, err
}

func (r *Reconciler) readRoutes(f int, last bool, link int) (out []Route, err error) {
	list, err := r.list(f, Route{Last: last}.table(r.n))
	for _, k := range list {
		out = append(out, fromRoute(f, last, k, link))
	}
	return out, err
}

// list reads our routes of a table.
func (r *Reconciler) list(f, table int) ([]netlink.Route, error) {
	list, err := r.c.Routes(af(f), table)
	return slices.DeleteFunc(list, func(k netlink.Route) bool {
		return k.Protocol != dataplane.RouteProtocol || k.Dst == nil
	}), err
}

// fromRoute keeps what a route of ours has, and of another kind its text.
func fromRoute(f int, last bool, k netlink.Route, link int) Route {
	route := Route{Last: last, MTU: k.MTU, Prefix: rtnl.Prefix(k.Dst), Source: rtnl.Addr(k.Src)}
	if gw := k.Gw.To16(); gw != nil {
		route.Via = netip.AddrFrom4([4]byte(gw[12:]))
	}
	if k.Type == unix.RTN_THROW && !last && len(k.MultiPath) == 0 && k.Gw == nil && k.Priority == rtnl.Metric(af(f)) {
		route.Plain = true
		return route
	}
	if k.LinkIndex != link || k.Type != unix.RTN_UNICAST || len(k.MultiPath) > 0 || k.Gw == nil ||
		k.Priority != rtnl.Metric(af(f)) {
		route.Other = fmt.Sprintf(" (%s metric %d)", k, k.Priority)
	}
	return route
}

// delRoute deletes the very one that was read: another may have its destination.
func (r *Reconciler) delRoute(o Route) error {
	f := map[bool]int{false: 4, true: 6}[o.Prefix.Addr().Is6()]
	list, err := r.list(f, o.table(r.n))
	if err != nil {
		return err
	}
	index := 0
	if l, err := r.c.One().LinkByName(r.n.HopLink); err == nil {
		index = l.Attrs().Index
	}
	for _, k := range list {
		if fromRoute(f, o.Last, k, index) == o {
			return rtnl.Ignore(r.c.One().RouteDel(&k), unix.ESRCH)
		}
	}
	return nil
}

func (r *Reconciler) apply(o Op) error {
	switch o.Verb {
	case SetGuards:
		return r.setGuards(o.Guards)
	case DelGuards:
		return r.deleteGuards()
	case AddLink:
		return r.addLink(o)
	case DelLink:
		l, there, err := r.c.Link(r.n.HopLink)
		if err != nil || !there {
			return err
		}
		return r.c.One().LinkDel(l)
	case SetMTU:
		return r.onLink(func(l netlink.Link) error { return r.c.One().LinkSetMTU(l, o.Number) })
	case SetUp:
		return r.onLink(r.setUp)
	case SetRPFilter:
		return rtnl.WriteSetting(unix.AF_INET, r.n.HopLink, "rp_filter", o.Number)
	case SetForward4:
		return rtnl.WriteSetting(unix.AF_INET, r.n.HopLink, "forwarding", 1)
	case SetForward6:
		return podnet.ForwardIPv6(r.n.HopLink)
	case AddRule:
		return rtnl.Ignore(r.c.One().RuleAdd(toRule(o.Rule, r.n)), unix.EEXIST)
	case DelRule:
		return rtnl.Ignore(r.c.One().RuleDel(toRule(o.Rule, r.n)), unix.ENOENT)
	case AddRoute:
		if o.Route.Plain {
			return r.c.One().RouteReplace(toRoute(o.Route, 0, r.n))
		}
		return r.onLink(func(l netlink.Link) error {
			return r.c.One().RouteReplace(toRoute(o.Route, l.Attrs().Index, r.n))
		})
	case DelRoute:
		return r.delRoute(o.Route)
	}
	return nil
}

func (r *Reconciler) onLink(f func(netlink.Link) error) error {
	l, err := r.c.One().LinkByName(r.n.HopLink)
	if err != nil {
		return err
	}
	return f(l)
}

// addLink makes the link: what it sends has the class and the mark of congestion of what is inside, and is not cut.
func (r *Reconciler) addLink(o Op) error {
	const inherit, dontFragment, ttl, genModeNone = 1, 1, 64, 1
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = r.n.HopLink, o.Number
	err := r.c.One().LinkAdd(&netlink.Sittun{LinkAttrs: attrs, Local: o.Self.AsSlice(), Ttl: ttl, Tos: inherit,
		PMtuDisc: dontFragment})
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTSUP):
		return fmt.Errorf("%w: this kernel has no IP-in-IP links: load the module sit, or set "+
			"dataplane.wireguard: userspace; until then this host reaches no node of another site by way of a leader, and "+
			"passes nothing on for others", err)
	case err != nil:
		return err
	}
	return r.onLink(func(l netlink.Link) error {
		_ = r.c.One().LinkSetIP6AddrGenMode(l, genModeNone) // without IPv6 this fails, and need not succeed
		return nil
	})
}

// setUp sets the link up, and takes the address away that the kernel gives such links, ::SELF in ::/96: nothing here
// has to do with automatic tunnels to any IPv4 address.
func (r *Reconciler) setUp(l netlink.Link) error {
	if err := r.c.One().LinkSetUp(l); err != nil {
		return err
	}
	list, err := r.c.One().AddrList(l, netlink.FAMILY_V6)
	if err != nil {
		return nil // no IPv6
	}
	for _, a := range list {
		if err := r.c.One().AddrDel(l, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return err
		}
	}
	return nil
}

func toRule(r Rule, n dataplane.Numbers) *netlink.Rule {
	k := netlink.NewRule()
	k.Family, k.Protocol = af(r.Family), dataplane.RouteProtocol
	if r.Last {
		k.Priority, k.Table, k.IifName = n.HopLastRule(), n.HopLastTable(), n.HopLink
		return k
	}
	mask := n.MarkMask
	k.Priority, k.Table, k.Mark, k.Mask, k.Invert = n.HopRule(), n.HopTable(), n.MarkWG, &mask, true
	return k
}

func toRoute(r Route, link int, n dataplane.Numbers) *netlink.Route {
	a := r.Prefix.Addr()
	k := &netlink.Route{Family: rtnl.Family(a), Dst: rtnl.Net(r.Prefix), Table: r.table(n),
		Protocol: dataplane.RouteProtocol}
	if r.Plain {
		k.Type = unix.RTN_THROW
		return k
	}
	k.Type, k.MTU, k.LinkIndex, k.Flags = unix.RTN_UNICAST, r.MTU, link, int(netlink.FLAG_ONLINK)
	via := r.Via.As4()
	k.Gw = via[:]
	if a.Is6() {
		k.Gw = append(make([]byte, 12), via[:]...) // ::VIA, as such links have it
	}
	if r.Source.IsValid() {
		k.Src = r.Source.AsSlice()
	}
	return k
}

func readHost() (h Host) {
	off, ok := rtnl.ReadSetting(unix.AF_INET6, "all", "disable_ipv6")
	h.IPv6 = ok && off == 0
	if h.RPFilterAll, ok = rtnl.ReadSetting(unix.AF_INET, "all", "rp_filter"); !ok {
		h.RPFilterAll = -1
	}
	v, _ := rtnl.ReadSetting(unix.AF_INET6, "all", "forwarding")
	h.ForwardAll6 = v != 0
	return h
}
