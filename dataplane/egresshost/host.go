package egresshost

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

const nftChain = "postrouting" // in Numbers.EgressNftTable, family inet

// Spec is what a host wants as a gateway. The zero Spec is that of a host which is none.
type Spec struct {
	// Routes lead to gateways' namespaces, sorted by address. One whose link is not there is left out.
	Routes []dataplane.PodRoute
	// Tunnel is the mesh's own link: what enters it keeps its source.
	Tunnel string
	// Uplinks are the links by which answers come back; they forward. A link that has gone is left out.
	Uplinks []string
}

// gateway says that the host is one.
func (s Spec) gateway() bool { return len(s.Routes) > 0 }

// Reconciler keeps a host so.
type Reconciler struct {
	n dataplane.Numbers
	c *rtnl.Conn
	// nft keeps the table. A host without nftables has none, and is a gateway of nothing.
	nft    *nftable.Reconciler
	nftErr error

	listener rtnl.Listener
	watched  atomic.Pointer[watched] // of the latest Spec
}

// New opens sockets in the calling thread's network namespace; zero Numbers are the default ones.
func New(n dataplane.Numbers) (*Reconciler, error) {
	c, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	r := &Reconciler{n: n.Filled(), c: c}
	r.nft, r.nftErr = nftable.NewReconciler(0)
	r.watched.Store(&watched{})
	return r, nil
}

// Close closes the sockets; everything stays.
func (r *Reconciler) Close() {
	_ = r.listener.Close()
	if r.nft != nil {
		_ = r.nft.Close()
	}
	r.c.Close()
}

// route is a way in the table of gateways.
type route struct {
	addr netip.Addr
	link int // index
}

// diff is what turns actual into want. Both are sorted by address.
func diff(want, actual []route) (add, gone []route) {
	for _, w := range want {
		if !slices.Contains(actual, w) {
			add = append(add, w)
		}
	}
	for _, a := range actual {
		if !slices.ContainsFunc(want, func(w route) bool { return w.addr == a.addr }) {
			gone = append(gone, a)
		}
	}
	return add, gone
}

// Reconcile makes the host what the Spec says, and tells how many messages that took. It goes on after an error, and
// returns the first.
func (r *Reconciler) Reconcile(s Spec) (writes int, err error) {
	note := func(n int, e error) {
		writes += n
		if err == nil {
			err = e
		}
	}
	r.watched.Store(watchedOf(s, nil)) // a link that comes from now on is heard of
	links, e := r.links()
	if e != nil {
		return 0, e
	}
	r.watched.Store(watchedOf(s, links))
	if s.gateway() { // an address of the host's own is there before the first packet is
		note(r.masquerade(s.Tunnel))
		for _, l := range s.Uplinks {
			if _, ok := links[l]; ok {
				note(forward(l))
			}
		}
	}
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		note(r.family(f, s, links))
	}
	if !s.gateway() {
		note(r.unmasquerade())
	}
	return writes, err
}

func (r *Reconciler) links() (map[string]int, error) {
	all, err := r.c.One().LinkList()
	if err != nil {
		return nil, fmt.Errorf("read this host's links: %w", err)
	}
	out := map[string]int{}
	for _, l := range all {
		out[l.Attrs().Name] = l.Attrs().Index
	}
	return out, nil
}

// family brings the ways and the rule of one address family up to the Spec.
func (r *Reconciler) family(f int, s Spec, links map[string]int) (writes int, err error) {
	var want []route
	for _, w := range s.Routes {
		if index, ok := links[w.Link]; ok && w.Addr.Is4() == (f == unix.AF_INET) {
			want = append(want, route{addr: w.Addr, link: index})
		}
	}
	actual, err := r.read(f)
	if err != nil {
		return 0, err
	}
	add, gone := diff(want, actual)
	for _, a := range add {
		if e := r.c.One().RouteReplace(a.kernel(r.n.EgressTable())); e != nil && err == nil {
			err = fmt.Errorf("add the route to %s (table %d): %w", a.addr, r.n.EgressTable(), e)
			continue
		}
		writes++
	}
	rules, e := r.c.One().RuleListFiltered(f, &netlink.Rule{Priority: r.n.EgressRule(), Table: r.n.EgressTable()},
		netlink.RT_FILTER_PRIORITY|netlink.RT_FILTER_TABLE)
	if e != nil && !errors.Is(e, unix.EAFNOSUPPORT) {
		return writes, errors.Join(err, fmt.Errorf("read policy rules: %w", e))
	}
	switch {
	case len(want) > 0 && len(rules) == 0:
		if e := r.c.One().RuleAdd(rule(f, r.n)); e != nil && !errors.Is(e, unix.EEXIST) {
			err = errors.Join(err, fmt.Errorf("add the rule to table %d: %w", r.n.EgressTable(), e))
		} else {
			writes++
		}
	case len(want) == 0:
		for range rules {
			if e := r.c.One().RuleDel(rule(f, r.n)); e != nil {
				return writes, errors.Join(err, fmt.Errorf("remove the rule to table %d: %w", r.n.EgressTable(), e))
			}
			writes++
		}
	}
	for _, g := range gone {
		if e := r.c.One().RouteDel(g.kernel(r.n.EgressTable())); e != nil && !errors.Is(e, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("remove the route to %s (table %d): %w", g.addr, r.n.EgressTable(), e))
			continue
		}
		writes++
	}
	return writes, err
}

// read lists the ways in our table; what others have put there is not ours.
func (r *Reconciler) read(f int) ([]route, error) {
	all, err := r.c.Routes(f, r.n.EgressTable())
	var out []route
	for _, k := range all {
		if dst := rtnl.Prefix(k.Dst); dst.IsValid() && k.Protocol == dataplane.RouteProtocol {
			out = append(out, route{addr: dst.Addr(), link: k.LinkIndex})
		}
	}
	return out, err
}

func (w route) kernel(table int) *netlink.Route {
	scope := netlink.SCOPE_UNIVERSE
	if w.addr.Is4() {
		scope = netlink.SCOPE_LINK
	}
	return &netlink.Route{Family: rtnl.Family(w.addr), Dst: rtnl.Host(w.addr), LinkIndex: w.link, Table: table,
		Protocol: dataplane.RouteProtocol, Scope: scope, Type: unix.RTN_UNICAST}
}

func rule(f int, n dataplane.Numbers) *netlink.Rule {
	k := netlink.NewRule()
	k.Family, k.Priority, k.Table, k.Protocol = f, n.EgressRule(), n.EgressTable(), dataplane.RouteProtocol
	return k
}

// forward makes the kernel forward what comes in by a link.
func forward(link string) (int, error) {
	n := 0
	if v, ok := rtnl.ReadSetting(unix.AF_INET, link, "forwarding"); ok && v == 0 {
		if err := rtnl.WriteSetting(unix.AF_INET, link, "forwarding", 1); err != nil {
			return 0, fmt.Errorf("%w: replies to the egress's clients are dropped; the agent needs a writable /proc/sys", err)
		}
		n++
	}
	if _, ok := rtnl.ReadSetting(unix.AF_INET6, link, "forwarding"); !ok {
		return n, nil // this link, or this host, has no IPv6
	}
	return n, podnet.ForwardIPv6(link)
}

// table gives what leaves from gateways' namespaces with their local addresses an address of the host's own.
func table(tunnel string, n dataplane.Numbers) nftable.Table {
	of := func(f nftable.IP, p netip.Prefix) nftable.Rule {
		return nftable.Rule{Text: fmt.Sprintf("%s saddr %s oifname != %q masquerade", f.Word, p, tunnel),
			Exprs: append(f.Source(), nftable.Masked(net.CIDRMask(p.Bits(), p.Addr().BitLen()), nil),
				nftable.Equal(p.Addr().AsSlice()...), nftable.Meta(expr.MetaKeyOIFNAME),
				nftable.Differ(nftable.LinkName(tunnel)...), &expr.Masq{})}
	}
	chain := nftable.Chain{Name: nftChain, Type: nftables.ChainTypeNAT, Hook: nftables.ChainHookPostrouting,
		Priority: int32(*nftables.ChainPriorityNATSource),
		Rules:    []nftable.Rule{of(nftable.IPv4, n.EgressLocal4), of(nftable.IPv6, n.EgressLocal6)}}
	return nftable.Table{Name: n.EgressNftTable, Chains: []nftable.Chain{chain}}
}

// masquerade makes our nft table where it is missing or different.
func (r *Reconciler) masquerade(tunnel string) (int, error) {
	if r.nftErr != nil {
		return 0, r.nftErr
	}
	r.nft.Forget()
	n, err := r.nft.Reconcile(table(tunnel, r.n), true)
	return min(n, 1), err
}

func (r *Reconciler) unmasquerade() (int, error) {
	if r.nftErr != nil {
		return 0, nil // no nftables, no table
	}
	there, err := r.nft.Purge(nftable.Table{Name: r.n.EgressNftTable})
	if !there {
		return 0, err
	}
	return 1, err
}

// Purge removes everything of ours.
func Purge(n dataplane.Numbers) error {
	r, err := New(n)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = r.Reconcile(Spec{})
	return err
}
