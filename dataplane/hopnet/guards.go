package hopnet

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const (
	chainGuards    = "skein_hop_guards"
	chainOwn       = "skein_hop_own"
	setGuards4     = "skein_hop_sources_ipv4"
	setGuards6     = "skein_hop_sources_ipv6"
	beforeAll      = -311 // the chain's priority: before all others of ours
	elementsAtOnce = 400  // in one message: an attribute is at most 64 KiB

	reg, reg2 = unix.NFT_REG_1, unix.NFT_REG32_01 // the latter is behind the first four bytes of the former
	header    = expr.PayloadBaseNetworkHeader
)

// guardRule is one rule, with the text that is kept beside it.
type guardRule struct {
	text  string
	exprs []expr.Any
}

// guardRules let pass what the sets have, and drop whatever else is for the link: also what is not whole or has
// options, where the inner source would be elsewhere.
func guardRules(self netip.Addr) (out []guardRule) {
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
			out = append(out, guardRule{fmt.Sprintf("ip daddr %s protocol %d %s", self, c.protocol, what),
				slices.Concat(ours, exprs)})
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
func ownRules(g Guards) (out []guardRule) {
	leaves := []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: reg},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: append([]byte("lo"), make([]byte, unix.IFNAMSIZ-len("lo"))...)},
		&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}}
	add := func(family byte, offset uint32, a netip.Addr) {
		b := a.AsSlice()
		out = append(out, guardRule{fmt.Sprintf("daddr %s oifname != lo drop", a), slices.Concat([]expr.Any{
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

func (r *Reconciler) guardSet(name string) *nftables.Set {
	inner := nftables.TypeIPAddr
	if name == setGuards6 {
		inner = nftables.TypeIP6Addr
	}
	return &nftables.Set{Table: r.table, Name: name, Interval: true, Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, inner)}
}

// setGuards writes the whole table anew in one transaction: there is always the old one or the new one.
func (r *Reconciler) setGuards(g Guards) error {
	c := r.nft
	c.AddTable(r.table) // so that deleting it cannot fail
	c.DelTable(r.table)
	c.AddTable(r.table)
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{Table: r.table, Name: chainGuards, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(beforeAll), Policy: &policy})
	for f, name := range []string{setGuards4, setGuards6} {
		set := r.guardSet(name)
		if err := c.AddSet(set, nil); err != nil {
			return err
		}
		var elements []nftables.SetElement
		for _, s := range g.Sources {
			if family(s.First) == f {
				from := s.From.AsSlice()
				elements = append(elements, nftables.SetElement{Key: slices.Concat(from, s.First.AsSlice()),
					KeyEnd: slices.Concat(from, s.Last.AsSlice())})
			}
		}
		for part := range slices.Chunk(elements, elementsAtOnce) {
			if err := c.SetAddElements(set, part); err != nil {
				return err
			}
		}
	}
	own := c.AddChain(&nftables.Chain{Table: r.table, Name: chainOwn, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &policy})
	for _, rule := range ownRules(g) {
		c.AddRule(&nftables.Rule{Table: r.table, Chain: own, Exprs: rule.exprs, UserData: []byte(rule.text)})
	}
	for _, rule := range guardRules(g.Self) {
		c.AddRule(&nftables.Rule{Table: r.table, Chain: chain, Exprs: rule.exprs, UserData: []byte(rule.text)})
	}
	return c.Flush()
}

func (r *Reconciler) deleteGuards() error {
	r.nft.DelTable(r.table)
	if err := r.nft.Flush(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// readGuards reads the table. One that is not as we write it is as good as one for nobody: it has no sources, and
// another address than any.
func (r *Reconciler) readGuards() (g Guards, err error) {
	foreign := Guards{Self: netip.IPv4Unspecified()}
	tables, err := r.nft.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil || !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == r.table.Name }) {
		return Guards{}, err
	}
	chain, err := r.nft.ListChain(r.table, chainGuards)
	if err != nil || chain.Hooknum == nil || *chain.Hooknum != *nftables.ChainHookPrerouting ||
		chain.Priority == nil || *chain.Priority != beforeAll {
		return foreign, nil
	}
	rules, err := r.nft.GetRules(r.table, chain)
	if err != nil || len(rules) == 0 {
		return foreign, nil
	}
	var text string
	if _, err := fmt.Sscanf(string(rules[0].UserData), "ip daddr %s", &text); err != nil {
		return foreign, nil
	}
	if g.Self, err = netip.ParseAddr(text); err != nil || !g.Self.Is4() {
		return foreign, nil
	}
	want := guardRules(g.Self)
	if len(want) != len(rules) {
		return foreign, nil
	}
	for i, rule := range rules {
		if string(rule.UserData) != want[i].text {
			return foreign, nil
		}
	}
	if rules, err = r.nft.GetRules(r.table, &nftables.Chain{Table: r.table, Name: chainOwn}); err != nil ||
		len(rules) == 0 {
		return foreign, nil
	}
	if len(rules) > 1 {
		if _, err := fmt.Sscanf(string(rules[1].UserData), "daddr %s", &text); err == nil {
			g.Self6, _ = netip.ParseAddr(text)
		}
	}
	want = ownRules(g)
	if len(want) != len(rules) {
		return foreign, nil
	}
	for i, rule := range rules {
		if string(rule.UserData) != want[i].text {
			return foreign, nil
		}
	}
	sets, err := r.nft.GetSets(r.table)
	if err != nil {
		return foreign, nil
	}
	for _, name := range []string{setGuards4, setGuards6} {
		i := slices.IndexFunc(sets, func(s *nftables.Set) bool { return s.Name == name })
		if i < 0 {
			return foreign, nil
		}
		elements, err := r.nft.GetSetElements(sets[i])
		if err != nil {
			return foreign, err
		}
		for _, e := range elements {
			if len(e.Key) < 8 || len(e.KeyEnd) != len(e.Key) {
				return foreign, nil
			}
			from, _ := netip.AddrFromSlice(e.Key[:4])
			first, _ := netip.AddrFromSlice(e.Key[4:])
			last, _ := netip.AddrFromSlice(e.KeyEnd[4:])
			g.Sources = append(g.Sources, Source{From: from, First: first, Last: last})
		}
	}
	slices.SortFunc(g.Sources, compareSources)
	return g, nil
}

// dropped is what the rules dropped.
func dropped(rules []*nftables.Rule) (refused, malformed uint64) {
	for _, rule := range rules {
		for _, e := range rule.Exprs {
			n, ok := e.(*expr.Counter)
			switch {
			case !ok:
			case what(string(rule.UserData)) == "malformed":
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
