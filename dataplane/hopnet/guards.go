package hopnet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

const (
	chainGuards = "skein_hop_guards"
	chainOwn    = "skein_hop_own"
	setGuards4  = "skein_hop_sources_ipv4"
	setGuards6  = "skein_hop_sources_ipv6"
	beforeAll   = -311 // the chain's priority: before all others of ours

	behind = unix.NFT_REG32_01 // the register behind the first four bytes of nftable.Reg
)

// guardRules let pass what the sets have, and drop whatever else is for the link: also what is not whole or has
// options, where the inner source would be elsewhere.
func guardRules(self netip.Addr) (out []nftable.Rule) {
	address := self.As4()
	for _, c := range []struct {
		protocol byte
		set      string
		inside   nftable.IP
	}{{unix.IPPROTO_IPIP, setGuards4, nftable.IPv4}, {unix.IPPROTO_IPV6, setGuards6, nftable.IPv6}} {
		ours := slices.Concat(nftable.IPv4.Destination(), []expr.Any{nftable.Equal(address[:]...)}, nftable.L4(c.protocol))
		add := func(what string, exprs ...expr.Any) {
			out = append(out, nftable.Rule{Text: fmt.Sprintf("ip daddr %s protocol %d %s", self, c.protocol, what),
				Exprs: slices.Concat(ours, exprs)})
		}
		drop := nftable.CountedDrop()
		add("malformed options drop", append([]expr.Any{nftable.LoadIP(0, 1), nftable.Differ(0x45)}, drop...)...)
		add("malformed fragments drop", append([]expr.Any{nftable.LoadIP(6, 2), nftable.Masked([]byte{0xbf, 0xff}, nil),
			nftable.Differ(0, 0)}, drop...)...)
		add("saddr and saddr inside @"+c.set+" accept", nftable.LoadIP(nftable.IPv4.Src, 4),
			nftable.Load(expr.PayloadBaseNetworkHeader, dataplane.HopOverhead+c.inside.Src, c.inside.Len, behind),
			nftable.In(c.set), nftable.Accept)
		add("refused drop", drop...)
	}
	return out
}

// ownRules keep what is for this host's own overlay addresses here. When the tunnel is deleted its addresses go, and
// errors of the kernel about what was sent from them, with the packets in them, would leave by the default route.
func ownRules(g Guards) (out []nftable.Rule) {
	add := func(f nftable.IP, a netip.Addr) {
		out = append(out, nftable.Rule{Text: fmt.Sprintf("daddr %s oifname != lo drop", a), Exprs: slices.Concat(
			f.Destination(), []expr.Any{nftable.Equal(a.AsSlice()...), nftable.Meta(expr.MetaKeyOIFNAME),
				nftable.Differ(nftable.LinkName("lo")...)}, nftable.CountedDrop())})
	}
	add(nftable.IPv4, g.Self)
	if g.Self6.IsValid() {
		add(nftable.IPv6, g.Self6)
	}
	return out
}

// guardTable is the table of guards.
func guardTable(name string, g Guards) nftable.Table {
	t := nftable.Table{Name: name, Chains: []nftable.Chain{
		{Name: chainGuards, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookPrerouting, Priority: beforeAll,
			Rules: guardRules(g.Self)},
		{Name: chainOwn, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookOutput, Rules: ownRules(g)},
	}}
	for f, inside := range []nftable.IP{nftable.IPv4, nftable.IPv6} {
		set := nftable.Set{Name: []string{setGuards4, setGuards6}[f], Interval: true, Concat: true,
			Elements: map[string]string{}, Key: nftables.MustConcatSetType(nftable.IPv4.Addr, inside.Addr)}
		for _, s := range g.Sources {
			if family(s.First) == f {
				from := s.From.AsSlice()
				set.Elements[string(slices.Concat(from, s.First.AsSlice(), from, s.Last.AsSlice()))] = ""
			}
		}
		t.Sets = append(t.Sets, set)
	}
	return t
}

// readGuards reads the table, which should be for a node with these addresses. One that is not as it is written for it
// is as good as one for nobody: it has no sources, and another address than any.
func (r *Reconciler) readGuards(self, self6 netip.Addr) (g Guards, err error) {
	have, err := r.guards.Read(nftable.Table{Name: r.n.HopNftTable})
	if err != nil || !have.There && len(have.Chains) == 0 {
		return Guards{}, err
	}
	foreign := Guards{Self: netip.IPv4Unspecified()}
	if !self.IsValid() {
		return foreign, nil
	}
	g.Self, g.Self6 = self, self6
	if slices.ContainsFunc(nftable.Diff(guardTable(r.n.HopNftTable, g), have, true), func(o nftable.Op) bool {
		return o.Verb != nftable.DelElements // which are the sources
	}) {
		return foreign, nil
	}
	for _, name := range []string{setGuards4, setGuards6} {
		for key := range have.Sets[name].Elements {
			first, last := key[:len(key)/2], key[len(key)/2:]
			if len(first) < 8 {
				return foreign, nil
			}
			s := Source{}
			s.From, _ = netip.AddrFromSlice([]byte(first[:4]))
			s.First, _ = netip.AddrFromSlice([]byte(first[4:]))
			s.Last, _ = netip.AddrFromSlice([]byte(last[4:]))
			g.Sources = append(g.Sources, s)
		}
	}
	slices.SortFunc(g.Sources, compareSources)
	return g, nil
}

// setGuards writes the table.
func (r *Reconciler) setGuards(g Guards) error {
	_, err := r.guards.Reconcile(guardTable(r.n.HopNftTable, g), true)
	return err
}

func (r *Reconciler) deleteGuards() error {
	_, err := r.guards.Purge(nftable.Table{Name: r.n.HopNftTable})
	return err
}

// dropped is what the rules dropped. The kernel has them in the order of guardRules.
func dropped(rules []*nftables.Rule) (refused, malformed uint64) {
	ours := guardRules(netip.IPv4Unspecified()) // the texts differ by the address alone
	for i, rule := range rules[:min(len(rules), len(ours))] {
		for _, e := range rule.Exprs {
			n, ok := e.(*expr.Counter)
			switch {
			case !ok:
			case what(ours[i].Text) == "malformed":
				malformed += n.Packets
			default:
				refused += n.Packets
			}
		}
	}
	return refused, malformed
}

// what is the first word of a rule's text behind those that all have.
func what(text string) string {
	const behind = 5
	if w := strings.Fields(text); len(w) > behind {
		return w[behind]
	}
	return ""
}
