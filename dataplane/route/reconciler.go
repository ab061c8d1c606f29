package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// errThere says that what was to be added is there: podnet made it since it was read, and nothing was written.
var errThere = errors.New("is there already")

// Reconciler keeps link, rules and routes as the Spec says. It remembers what it read and wrote, so
// that an unchanged Spec costs no message and no dump.
type Reconciler struct {
	h      *netlink.Handle
	routes *netlink.Handle // for listing routes: checks requests strictly, which the library's others do not pass
	link   string
	n      dataplane.Numbers
	cache  *State
	host   Host

	hadPods bool // a Spec had pods, and the rule for them is still there
}

// NewReconciler opens a netlink socket in the calling thread's network namespace; zero Numbers are the default ones.
func NewReconciler(link string, n dataplane.Numbers) (*Reconciler, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening rtnetlink socket: %w", err)
	}
	routes, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("opening rtnetlink socket: %w", err)
	}
	// With strict checking the kernel itself sends only the table asked for. Old kernels have it not.
	_ = routes.SetStrictCheck(true)
	return &Reconciler{h: h, routes: routes, link: link, n: n.Filled()}, nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "route" }

// Forget makes the next Reconcile read the kernel first.
func (r *Reconciler) Forget() { r.cache = nil }

// Close closes the socket; everything stays.
func (r *Reconciler) Close() error {
	r.h.Close()
	r.routes.Close()
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
		case errors.Is(err, errThere):
			next := r.cache.Apply([]Op{op})
			r.cache = &next
		case err == nil:
			writes++
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
	l, err := nlcount.One(r.h).LinkByName(r.link)
	switch {
	case errors.As(err, &netlink.LinkNotFoundError{}):
	case err != nil:
		return s, h, fmt.Errorf("reading link %s: %w", r.link, err)
	default:
		a := l.Attrs()
		s.Link = Link{Name: a.Name, Index: a.Index, Up: a.Flags&net.FlagUp != 0, MTU: a.MTU}
		if v, ok := readInt(rpFilterPath(r.link)); ok {
			s.RPFilter = v
		}
		s.Forward4, _ = readInt(forward4Path(r.link))
		s.Forward6, _ = readInt(forward6Path(r.link))
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
	list, err := nlcount.One(r.h).AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("reading addresses of link %s: %w", r.link, err)
	}
	var out []netip.Prefix
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); !ok || ip.IsLinkLocalUnicast() {
			continue
		}
		bits, _ := a.Mask.Size()
		out = append(out, netip.PrefixFrom(ip, bits))
	}
	slices.SortFunc(out, comparePrefix)
	return out, nil
}

func (r *Reconciler) readRules(f Family) ([]Rule, error) {
	list, err := nlcount.One(r.h).RuleListFiltered(f.af(), &netlink.Rule{Protocol: dataplane.RouteProtocol},
		netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return nil, fmt.Errorf("reading %s rules: %w", f, err)
	}
	var out []Rule
	for _, k := range list {
		mark := k.Priority == r.n.RulePriority && k.Table == r.n.RouteTable
		pods := k.Priority == r.n.PodRule() && k.Table == r.n.PodTable()
		if (mark || pods) && k.Protocol == dataplane.RouteProtocol {
			out = append(out, fromRule(f, k, r.n))
		}
	}
	return out, nil
}

func (r *Reconciler) readRoutes(f Family, link int) ([]Route, error) {
	list, err := r.list(f, r.n.RouteTable)
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
		list, err := r.list(f, in.table(r.n))
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

// list reads one table.
func (r *Reconciler) list(f Family, table int) ([]netlink.Route, error) {
	list, err := nlcount.One(r.routes).RouteListFiltered(f.af(), &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	if errors.Is(err, unix.ENOENT) { // no such table yet
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s routes of table %d: %w", f, table, err)
	}
	return slices.DeleteFunc(list, func(k netlink.Route) bool { return k.Table != table }), nil
}

// ready finds out which of the missing ways to pods can be put back: the link is there, and its alias says that the
// address is still its pod's. A Spec may be older than what podnet has done since.
func (r *Reconciler) ready(want State, actual *State) error {
	actual.Ready = nil
	for _, m := range missing(want, *actual) {
		l, err := nlcount.One(r.h).LinkByName(m.Link)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading link %s: %w", m.Link, err)
		}
		if a, ours := podnet.ParseAlias(l.Attrs().Alias); ours && a.Has(m.Addr) && l.Attrs().Flags&net.FlagUp != 0 {
			actual.Ready = append(actual.Ready, m)
		}
	}
	return nil
}

// addHost puts back the way to a pod; errThere says that podnet was quicker.
func (r *Reconciler) addHost(h dataplane.PodRoute) error {
	l, err := nlcount.One(r.h).LinkByName(h.Link)
	if err != nil {
		return err
	}
	err = nlcount.One(r.h).RouteAdd(toHost(h.Addr, l.Attrs().Index, r.n))
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
		return os.WriteFile(rpFilterPath(r.link), []byte(strconv.Itoa(o.Number)), 0o644)
	case SetForward:
		if o.Family == IPv6 {
			return podnet.ForwardIPv6(r.link)
		}
		return os.WriteFile(forward4Path(r.link), []byte(strconv.Itoa(o.Number)), 0o644)
	case AddHost:
		return r.addHost(o.Host)
	case SetMTU:
		return nlcount.One(r.h).LinkSetMTU(link, o.Number)
	case SetUp:
		err := nlcount.One(r.h).LinkSetUp(link)
		if errors.Is(err, unix.EADDRINUSE) { // kernel WireGuard opens its port now
			return fmt.Errorf("%w: another program has WireGuard's UDP port: stop it or set ports.wireguard", err)
		}
		return err
	case AddAddress:
		return ignore(nlcount.One(r.h).AddrReplace(link, toAddr(o.Address)), unix.EEXIST)
	case DelAddress:
		return ignore(nlcount.One(r.h).AddrDel(link, toAddr(o.Address)), unix.EADDRNOTAVAIL)
	case AddRule:
		return ignore(nlcount.One(r.h).RuleAdd(toRule(o.Rule, r.n)), unix.EEXIST)
	case DelRule:
		return ignore(nlcount.One(r.h).RuleDel(toRule(o.Rule, r.n)), unix.ENOENT)
	case AddRoute:
		return nlcount.One(r.h).RouteReplace(toRoute(o.Route, link.Index, r.n))
	case DelRoute:
		return ignore(r.delRoute(o.Route, link.Index), unix.ESRCH)
	}
	return nil
}

// delRoute deletes a route of ours; one that is neither of the two is looked up again by its text.
func (r *Reconciler) delRoute(o Route, link int) error {
	if o.Other == "" {
		return nlcount.One(r.h).RouteDel(toRoute(o, link, r.n))
	}
	list, err := r.list(o.Family, r.n.RouteTable)
	if err != nil {
		return err
	}
	for _, k := range list {
		if k.Protocol == dataplane.RouteProtocol && fromRoute(o.Family, k, link) == o {
			return nlcount.One(r.h).RouteDel(&k)
		}
	}
	return nil
}

func ignore(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

func (r *Reconciler) readHost() Host {
	h := Host{Numbers: r.n}
	h.RPFilterAll, h.HasRPFilter = readInt(rpFilterPath("all"))
	off, ok := readInt("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	h.IPv6 = ok
	h.IPv6OnLink = ok && off == 0
	if v, ok := readInt("/proc/sys/net/ipv6/conf/" + r.link + "/disable_ipv6"); ok && v != 0 {
		h.IPv6OnLink = false
	}
	_, h.HasForward4 = readInt(forward4Path("all"))
	_, h.HasForward6 = readInt(forward6Path("default"))
	all, _ := readInt("/proc/sys/net/ipv6/conf/all/forwarding")
	h.ForwardAll6 = all != 0
	return h
}

func forward4Path(link string) string { return "/proc/sys/net/ipv4/conf/" + link + "/forwarding" }

// forward6Path is a setting of Linux 6.17. Before, the host's own switch is the only one.
func forward6Path(link string) string {
	return "/proc/sys/net/ipv6/conf/" + link + "/force_forwarding"
}

func rpFilterPath(link string) string { return "/proc/sys/net/ipv4/conf/" + link + "/rp_filter" }

func readInt(path string) (int, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}
