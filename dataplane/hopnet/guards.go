package hopnet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/nftable"
)

const (
	chainGuards = "skein_hop_guards"
	chainOwn    = "skein_hop_own"
	setGuards4  = "skein_hop_sources_ipv4"
	setGuards6  = "skein_hop_sources_ipv6"
	beforeAll   = -311 // the chain's priority: before all others of ours

	reg, reg2 = unix.NFT_REG_1, unix.NFT_REG32_01 // the latter is behind the first four bytes of the former
	header    = expr.PayloadBaseNetworkHeader
)

// guardRules let pass what the sets have, and drop whatever else is for the link: also what is not whole or has
// options, where the inner source would be elsewhere.
func guardRules(self netip.Addr) (out []nftable.Rule) {
	address := self.As4()
	for _, c := range []struct {
		protocol     byte
		set          string
		offset, size uint32 // of the source inside
	}{{unix.IPPROTO_IPIP, setGuards4, 32, 4}, {unix.IPPROTO_IPV6, setGuards6, 28, 16}} {
		ours := []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equals(unix.NFPROTO_IPV4),
			load(16, 4, reg), equals(address[:]...),
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, equals(c.protocol),
		}
		add := func(what string, exprs ...expr.Any) {
			out = append(out, nftable.Rule{Text: fmt.Sprintf("ip daddr %s protocol %d %s", self, c.protocol, what),
				Exprs: slices.Concat(ours, exprs)})
		}
		drop := []expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
		add("malformed options drop", append([]expr.Any{load(0, 1, reg), differs(0x45)}, drop...)...)
		add("malformed fragments drop", append([]expr.Any{load(6, 2, reg),
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 2, Mask: []byte{0xbf, 0xff}, Xor: []byte{0, 0}},
			differs(0, 0)}, drop...)...)
		add("saddr and saddr inside @"+c.set+" accept", load(12, 4, reg), load(c.offset, c.size, reg2),
			&expr.Lookup{SourceRegister: reg, SetName: c.set}, &expr.Verdict{Kind: expr.VerdictAccept})
		add("refused drop", drop...)
	}
	return out
}

// ownRules keep what is for this host's own overlay addresses here. When the tunnel is deleted its addresses go, and
// errors of the kernel about what was sent from them, with the packets in them, would leave by the default route.
func ownRules(g Guards) (out []nftable.Rule) {
	leaves := []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: append([]byte("lo"), make([]byte, unix.IFNAMSIZ-len("lo"))...)},
		&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
	add := func(family byte, offset uint32, a netip.Addr) {
		b := a.AsSlice()
		out = append(out, nftable.Rule{Text: fmt.Sprintf("daddr %s oifname != lo drop", a), Exprs: slices.Concat([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equals(family),
			load(offset, uint32(len(b)), reg), equals(b...)}, leaves)})
	}
	add(unix.NFPROTO_IPV4, 16, g.Self)
	if g.Self6.IsValid() {
		add(unix.NFPROTO_IPV6, 24, g.Self6)
	}
	return out
}

func load(offset, length, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: header, Offset: offset, Len: length}
}

func equals(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

func differs(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: data}
}

// guardTable is the table of guards.
func guardTable(name string, g Guards) nftable.Table {
	t := nftable.Table{Name: name, Chains: []nftable.Chain{
		{Name: chainGuards, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookPrerouting, Priority: beforeAll,
			Rules: guardRules(g.Self)},
		{Name: chainOwn, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookOutput, Rules: ownRules(g)},
	}}
	for f, name := range []string{setGuards4, setGuards6} {
		set := nftable.Set{Name: name, Interval: true, Concat: true, Elements: map[string]string{},
			Key: nftables.MustConcatSetType(nftables.TypeIPAddr, []nftables.SetDatatype{nftables.TypeIPAddr,
				nftables.TypeIP6Addr}[f])}
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
