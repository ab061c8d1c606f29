package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// State is the content of our table.
type State struct {
	Table  bool
	Chains map[string]Chain
	Sets   map[string]Set
}

// Chain is a base chain. Kind is its type, hook, priority and policy in nft's words.
type Chain struct {
	Kind  string
	Rules []string // in nft's words
}

// Set is an interval set. Kind is the type of its elements and its flags in nft's words.
type Set struct {
	Kind   string
	Ranges []Range // sorted, without overlaps
}

// Range is an inclusive range of addresses of one family.
type Range struct{ From, To netip.Addr }

// String is a prefix where the range is one.
func (r Range) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	for bits := r.From.BitLen(); bits >= 0; bits-- {
		p := netip.PrefixFrom(r.From, bits).Masked()
		if p.Addr() != r.From {
			break
		}
		if last(p) == r.To {
			return p.String()
		}
	}
	return r.From.String() + "-" + r.To.String()
}

const (
	kindPrerouting = "type filter hook prerouting priority 0 policy accept"
	kindOutgoing   = "type route hook output priority 0 policy accept"
	kindIPv4       = "ipv4_addr interval"
	kindIPv6       = "ipv6_addr interval"
)

// Want is the table for these destinations.
func Want(targets []netip.Prefix) State {
	four, six := ranges(targets)
	rules := rulesText()
	return State{
		Table: true,
		Chains: map[string]Chain{
			dataplane.ChainPrerouting: {Kind: kindPrerouting, Rules: rules},
			dataplane.ChainOutgoing:   {Kind: kindOutgoing, Rules: rules},
		},
		Sets: map[string]Set{
			dataplane.SetTargetsIPv4: {Kind: kindIPv4, Ranges: four},
			dataplane.SetTargetsIPv6: {Kind: kindIPv6, Ranges: six},
		},
	}
}

func rulesText() []string {
	set := func(l3, set string) string {
		return fmt.Sprintf("%s daddr @%s meta mark set meta mark & %#08x | %#08x accept", l3, set, ^uint32(dataplane.MarkMask)|dataplane.MarkRoute, dataplane.MarkRoute)
	}
	return []string{
		fmt.Sprintf("meta mark & %#08x == %#08x accept", dataplane.MarkMask, dataplane.MarkWG),
		set("ip", dataplane.SetTargetsIPv4),
		set("ip6", dataplane.SetTargetsIPv6),
	}
}

// ranges turns prefixes into sorted ranges by family; a prefix inside another is dropped.
func ranges(ps []netip.Prefix) (four, six []Range) {
	for _, p := range ps {
		if !p.IsValid() {
			continue
		}
		p = p.Masked()
		r := Range{From: p.Addr(), To: last(p)}
		if p.Addr().Is4() {
			four = append(four, r)
		} else {
			six = append(six, r)
		}
	}
	return disjoint(four), disjoint(six)
}

// disjoint sorts ranges and drops those inside others. Prefixes nest or are apart, never overlap.
func disjoint(rs []Range) []Range {
	slices.SortFunc(rs, func(a, b Range) int {
		if c := a.From.Compare(b.From); c != 0 {
			return c
		}
		return b.To.Compare(a.To)
	})
	out := rs[:0]
	for _, r := range rs {
		if n := len(out); n > 0 && r.To.Compare(out[n-1].To) <= 0 {
			continue
		}
		out = append(out, r)
	}
	return out
}

func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
