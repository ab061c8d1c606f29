package egresshost

import (
	"bytes"
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
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/nlcount"
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
	r.watched.Store(&watched{})
	return r, nil
}

// Close closes the sockets; everything stays.
func (r *Reconciler) Close() {
	_ = r.listener.Close()
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
			err = fmt.Errorf("add the way to %s (table %d): %w", a.addr, r.n.EgressTable(), e)
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
			err = errors.Join(err, fmt.Errorf("remove the way to %s (table %d): %w", g.addr, r.n.EgressTable(), e))
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
			return 0, fmt.Errorf("%w: answers for the egress do not come through; the agent needs a writable /proc/sys", err)
		}
		n++
	}
	if _, ok := rtnl.ReadSetting(unix.AF_INET6, link, "forwarding"); !ok {
		return n, nil // this link, or this host, has no IPv6
	}
	return n, podnet.ForwardIPv6(link)
}

// masqueradeRules are the two rules of our chain.
func masqueradeRules(tunnel string, n dataplane.Numbers) [][]expr.Any {
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, tunnel)
	of := func(proto byte, p netip.Prefix, offset uint32) []expr.Any {
		size := uint32(p.Addr().BitLen() / 8)
		mask := net.CIDRMask(p.Bits(), p.Addr().BitLen())
		return []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: size, Mask: mask, Xor: make([]byte, size)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()},
			&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: name},
			&expr.Masq{},
		}
	}
	return [][]expr.Any{
		of(unix.NFPROTO_IPV4, n.EgressLocal4, 12),
		of(unix.NFPROTO_IPV6, n.EgressLocal6, 8),
	}
}

// masquerade makes our nft table where it is missing or different.
func (r *Reconciler) masquerade(tunnel string) (int, error) {
	c, err := nlcount.NewNft()
	if err != nil {
		return 0, fmt.Errorf("open nftables: %w", err)
	}
	want := masqueradeRules(tunnel, r.n)
	t, chain := table(r.n)
	if rules, err := c.GetRules(t, chain); err == nil && same(rules, want) {
		return 0, nil
	}
	c.AddTable(t) // so that there is one to delete
	c.DelTable(t)
	c.AddTable(t)
	c.AddChain(chain)
	for _, exprs := range want {
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: exprs})
	}
	if err := c.Flush(); err != nil {
		return 0, fmt.Errorf("make the nft table inet %s: %w", t.Name, err)
	}
	return 1, nil
}

func (r *Reconciler) unmasquerade() (int, error) {
	c, err := nlcount.NewNft()
	if err != nil {
		return 0, nil // no nftables, no table
	}
	t, _ := table(r.n)
	all, err := c.ListTablesOfFamily(t.Family)
	if err != nil || !slices.ContainsFunc(all, func(o *nftables.Table) bool { return o.Name == t.Name }) {
		return 0, nil
	}
	c.DelTable(t)
	if err := c.Flush(); err != nil {
		return 0, fmt.Errorf("remove the nft table inet %s: %w", t.Name, err)
	}
	return 1, nil
}

func table(n dataplane.Numbers) (*nftables.Table, *nftables.Chain) {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: n.EgressNftTable}
	return t, &nftables.Chain{Name: nftChain, Table: t, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource}
}

// same compares rules in the kernel's own form.
func same(have []*nftables.Rule, want [][]expr.Any) bool {
	if len(have) != len(want) {
		return false
	}
	for i, rule := range have {
		if len(rule.Exprs) != len(want[i]) {
			return false
		}
		for j, e := range rule.Exprs {
			a, errA := expr.Marshal(unix.NFPROTO_INET, e)
			b, errB := expr.Marshal(unix.NFPROTO_INET, want[i][j])
			if errA != nil || errB != nil || !bytes.Equal(a, b) {
				return false
			}
		}
	}
	return true
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
