package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// errThere says that what was to be added is there: podnet made it since it was read, and nothing was written.
var errThere = errors.New("is there already")

// Reconciler keeps link, rules and routes as the Spec says. It remembers what it read and wrote, so
// that an unchanged Spec costs no message and no dump.
type Reconciler struct {
	c     *rtnl.Conn
	link  string
	n     dataplane.Numbers
	cache *State
	host  Host

	hadPods bool // a Spec had pods, and the rule for them is still there
}

// NewReconciler opens a netlink socket in the calling thread's network namespace; zero Numbers are the default ones.
func NewReconciler(link string, n dataplane.Numbers) (*Reconciler, error) {
	c, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	return &Reconciler{c: c, link: link, n: n.Filled()}, nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "route" }

// Forget makes the next Reconcile read the kernel first.
func (r *Reconciler) Forget() { r.cache = nil }

// Close closes the socket; everything stays.
func (r *Reconciler) Close() error {
	r.c.Close()
	return nil
}

// Repair is Reconcile.
func (r *Reconciler) Repair(s dataplane.Spec) (int, []string, error) { return r.Reconcile(s) }

// Reconcile makes the kernel what the Spec says and returns how many messages that took.
func (r *Reconciler) Reconcile(s dataplane.Spec) (writes int, notes []string, err error) {
	defer func() {
		if err != nil {
			r.cache = nil
		}
	}()
	r.noteEnd(s.Pods)
	if r.cache == nil {
		if err := r.load(); err != nil {
			return 0, nil, err
		}
	}
	r.cache.HadPods = r.hadPods
	want, notes := Want(s.Link, s.Pods, r.host)
	if err := r.ready(want, r.cache); err != nil {
		return 0, nil, err
	}
	var first error
	for _, op := range Diff(want, *r.cache, s.Complete) {
		err := r.apply(op)
		switch {
		case err == nil, errors.Is(err, errThere):
			if err == nil {
				writes++
			}
			next := r.cache.Apply([]Op{op})
			r.cache = &next
		case op.Verb == SetForward:
			notes = append(notes, fmt.Sprintf("%s: %v: pods of other nodes do not reach pods here, and nothing is passed on "+
				"for other nodes", op.text(r.n), err))
		case op.Verb == SetRPFilter: // a container's /proc/sys may be read-only; the tunnel works without, mostly
			notes = append(notes, fmt.Sprintf("%s: %v: packets from pods of other nodes may be dropped", op.text(r.n), err))
		case first == nil:
			first = fmt.Errorf("%s: %w", op.text(r.n), err) // the rest need not fail with it
		}
	}
	r.hadPods = r.hadPods && r.cache.hasPodRule()
	if first == nil && r.cache.Link.Index == 0 {
		first = fmt.Errorf("%s: %w", r.link, ErrNoLink)
	}
	return writes, notes, first
}

// Diff tells what Reconcile would do, from a fresh read.
func (r *Reconciler) Diff(s dataplane.Spec) ([]string, error) {
	actual, host, err := r.read()
	if err != nil {
		return nil, err
	}
	want, _ := Want(s.Link, s.Pods, host)
	actual.HadPods = r.hadPods
	if err := r.ready(want, &actual); err != nil {
		return nil, err
	}
	if actual.Link.Index == 0 { // what will be there once the driver has made it
		actual.Link.Index = 1
	}
	var out []string
	for _, op := range Diff(want, actual, s.Complete) {
		out = append(out, op.text(r.n))
	}
	return out, nil
}

// Purge removes our rules and routes and says how many.
func (r *Reconciler) Purge() (int, error) {
	s, _, err := r.read()
	if err != nil {
		return 0, err
	}
	r.cache = nil
	n := 0
	var errs []error
	for _, op := range Diff(State{}, State{Rules: s.Rules, Routes: s.Routes, Hosts: s.Hosts}, true) {
		if err := r.apply(op); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", op.text(r.n), err))
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}

func (r *Reconciler) load() error {
	s, h, err := r.read()
	if err != nil {
		return err
	}
	r.cache, r.host = &s, h
	return nil
}

func (r *Reconciler) read() (State, Host, error) {
	h := r.readHost()
	s := State{RPFilter: -1}
	l, there, err := r.c.Link(r.link)
	if err != nil {
		return s, h, err
	}
	if there {
		a := l.Attrs()
		s.Link = Link{Name: a.Name, Index: a.Index, Up: a.Flags&net.FlagUp != 0, MTU: a.MTU}
		if v, ok := rtnl.ReadSetting(unix.AF_INET, r.link, rpFilter); ok {
			s.RPFilter = v
		}
		s.Forward4, _ = rtnl.ReadSetting(unix.AF_INET, r.link, forwarding)
		s.Forward6, _ = rtnl.ReadSetting(unix.AF_INET6, r.link, forceForwarding)
		if s.Addresses, err = r.readAddresses(l); err != nil {
			return s, h, err
		}
	}
	for _, f := range []Family{IPv4, IPv6} {
		if f == IPv6 && !h.IPv6 {
			continue
		}
		rules, err := r.readRules(f)
		if err != nil {
			return s, h, err
		}
		routes, err := r.readRoutes(f, s.Link.Index)
		if err != nil {
			return s, h, err
		}
		s.Rules, s.Routes = append(s.Rules, rules...), append(s.Routes, routes...)
		if err := r.readPods(f, &s); err != nil {
			return s, h, err
		}
	}
	slices.SortFunc(s.Hosts, compareHosts)
	return s, h, nil
}

func (r *Reconciler) readAddresses(l netlink.Link) ([]netip.Prefix, error) {
	list, err := r.c.One().AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("reading addresses of link %s: %w", r.link, err)
	}
	var out []netip.Prefix
	for _, a := range list {
		if p := rtnl.Prefix(a.IPNet); p.IsValid() && !p.Addr().IsLinkLocalUnicast() {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, comparePrefix)
	return out, nil
}

func (r *Reconciler) readRules(f Family) ([]Rule, error) {
	list, err := r.c.Rules(f.AF(), dataplane.RouteProtocol)
	var out []Rule
	for _, k := range list {
		mark := k.Priority == r.n.RulePriority && k.Table == r.n.RouteTable
		pods := k.Priority == r.n.PodRule() && k.Table == r.n.PodTable()
		if mark || pods {
			out = append(out, fromRule(f, k, r.n))
		}
	}
	return out, err
}

func (r *Reconciler) readRoutes(f Family, link int) ([]Route, error) {
	list, err := r.c.Routes(f.AF(), r.n.RouteTable)
	if err != nil {
		return nil, err
	}
	var out []Route
	for _, k := range list {
		if k.Protocol == dataplane.RouteProtocol {
			out = append(out, fromRoute(f, k, link))
		}
	}
	return out, nil
}

// readPods adds what leads to pods.
func (r *Reconciler) readPods(f Family, s *State) error {
	for _, in := range []Way{ToPods, Exported} {
		list, err := r.c.Routes(f.AF(), in.table(r.n))
		if err != nil {
			return err
		}
		for _, k := range list {
			if b, ok := fromBlock(f, k, s.Link.Index, in); ok {
				s.Routes = append(s.Routes, b)
			} else if a, ok := fromHost(k); ok && in == ToPods {
				s.Hosts = append(s.Hosts, dataplane.PodRoute{Addr: a})
			}
		}
	}
	return nil
}

// ready finds out which of the missing ways to pods can be put back: the link is there, and its alias says that the
// address is still its pod's. A Spec may be older than what podnet has done since.
func (r *Reconciler) ready(want State, actual *State) error {
	actual.Ready = nil
	for _, m := range missing(want, *actual) {
		l, there, err := r.c.Link(m.Link)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		if a, ours := podnet.ParseAlias(l.Attrs().Alias); ours && a.Has(m.Addr) && l.Attrs().Flags&net.FlagUp != 0 {
			actual.Ready = append(actual.Ready, m)
		}
	}
	return nil
}

// addHost puts back the way to a pod; errThere says that podnet was quicker.
func (r *Reconciler) addHost(h dataplane.PodRoute) error {
	l, err := r.c.One().LinkByName(h.Link)
	if err != nil {
		return err
	}
	err = r.c.One().RouteAdd(toHost(h.Addr, l.Attrs().Index, r.n))
	if errors.Is(err, unix.EEXIST) {
		return errThere
	}
	return err
}

func (r *Reconciler) apply(o Op) error {
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: r.link}}
	if r.cache != nil {
		link.Index = r.cache.Link.Index
	}
	switch o.Verb {
	case SetRPFilter:
		return rtnl.WriteSetting(unix.AF_INET, r.link, rpFilter, o.Number)
	case SetForward:
		if o.Family == IPv6 {
			return podnet.ForwardIPv6(r.link)
		}
		return rtnl.WriteSetting(unix.AF_INET, r.link, forwarding, o.Number)
	case AddHost:
		return r.addHost(o.Host)
	case SetMTU:
		return r.c.One().LinkSetMTU(link, o.Number)
	case SetUp:
		err := r.c.One().LinkSetUp(link)
		if errors.Is(err, unix.EADDRINUSE) { // kernel WireGuard opens its port now
			return fmt.Errorf("%w: another program has WireGuard's UDP port: stop it or set ports.wireguard", err)
		}
		return err
	case AddAddress:
		return rtnl.Ignore(r.c.One().AddrReplace(link, toAddr(o.Address)), unix.EEXIST)
	case DelAddress:
		return rtnl.Ignore(r.c.One().AddrDel(link, toAddr(o.Address)), unix.EADDRNOTAVAIL)
	case AddRule:
		return rtnl.Ignore(r.c.One().RuleAdd(toRule(o.Rule, r.n)), unix.EEXIST)
	case DelRule:
		return rtnl.Ignore(r.c.One().RuleDel(toRule(o.Rule, r.n)), unix.ENOENT)
	case AddRoute:
		return r.c.One().RouteReplace(toRoute(o.Route, link.Index, r.n))
	case DelRoute:
		return rtnl.Ignore(r.delRoute(o.Route, link.Index), unix.ESRCH)
	}
	return nil
}

// delRoute deletes a route of ours; one that is neither of the two is looked up again by its text.
func (r *Reconciler) delRoute(o Route, link int) error {
	if o.Other == "" {
		return r.c.One().RouteDel(toRoute(o, link, r.n))
	}
	list, err := r.c.Routes(o.Family.AF(), r.n.RouteTable)
	if err != nil {
		return err
	}
	for _, k := range list {
		if k.Protocol == dataplane.RouteProtocol && fromRoute(o.Family, k, link) == o {
			return r.c.One().RouteDel(&k)
		}
	}
	return nil
}

func (r *Reconciler) readHost() Host {
	h := Host{Numbers: r.n}
	h.RPFilterAll, h.HasRPFilter = rtnl.ReadSetting(unix.AF_INET, "all", rpFilter)
	off, ok := rtnl.ReadSetting(unix.AF_INET6, "all", "disable_ipv6")
	h.IPv6 = ok
	h.IPv6OnLink = ok && off == 0
	if v, ok := rtnl.ReadSetting(unix.AF_INET6, r.link, "disable_ipv6"); ok && v != 0 {
		h.IPv6OnLink = false
	}
	_, h.HasForward4 = rtnl.ReadSetting(unix.AF_INET, "all", forwarding)
	_, h.HasForward6 = rtnl.ReadSetting(unix.AF_INET6, "default", forceForwarding)
	all, _ := rtnl.ReadSetting(unix.AF_INET6, "all", forwarding)
	h.ForwardAll6 = all != 0
	return h
}

// Settings of links. forceForwarding is IPv6's, of Linux 6.17: before, the host's own switch is the only one.
const (
	rpFilter        = "rp_filter"
	forwarding      = "forwarding"
	forceForwarding = "force_forwarding"
)
