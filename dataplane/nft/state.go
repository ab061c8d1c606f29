package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// State is the content of our table.
type State struct {
	Table   bool
	Numbers dataplane.Numbers // of what is wanted only
	Port    int               // WireGuard's, that rewrites lead to; of what is wanted only
	// Link is the tunnel's, Control the control net's port, Hops says that there are some, and Plain that there are plain
	// peers, for the chain of sources; of what is wanted only.
	Link    string
	Control int
	Hops    bool
	Plain   bool
	// Translations are of networks behind this host; of what is wanted only.
	Translations []dataplane.Translation
	Chains       map[string]Chain
	Sets         map[string]Set
}

// Chain is a base chain. Kind is its type, hook, priority and policy in nft's words.
type Chain struct {
	Kind  string
	Rules []string // in nft's words
}

// Set is an interval set, one of the two that hold the port rewrites, or one of links. Kind is the type of its elements
// and its flags in nft's words.
type Set struct {
	Kind     string
	Ranges   []Range                 // sorted, without overlaps
	Rewrites []dataplane.PortRewrite // sorted
	Links    []Link                  // sorted
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

	kindSources = "type filter hook prerouting priority -310 policy accept"
	kindLinks   = "ifname"

	// Of what enters the tunnel the route is known here, and with it how large a packet may be.
	kindClamp = "type filter hook postrouting priority -150 policy accept"

	// Before conntrack on the way in and after it on the way out: the host's own firewall sees WireGuard's port alone.
	kindRewriteIn  = "type filter hook prerouting priority -300 policy accept"
	kindRewriteOut = "type filter hook postrouting priority 300 policy accept"

	// Behind the check of sources, and before all that others do to packets before conntrack; and behind all of theirs.
	kindTranslateIn  = "type filter hook prerouting priority -305 policy accept"
	kindTranslateOut = "type filter hook postrouting priority 310 policy accept"

	kindPorts = "ipv4_addr . inet_service . inet_service"
	kindPeers = "ipv4_addr . inet_service map"
)

// Want is the table of a Spec, and notes about what in it cannot be.
func Want(s dataplane.Spec) (State, []string) {
	w := wantTargets(s.Numbers.Filled(), s.Targets)
	w.Port = s.WireGuard.Port
	rewrites, notes := usable(s.PortRewrites)
	w.setRewrites(rewrites)
	w.setSources(s)
	w.setTranslations(s.Translations, s.Inside)
	return w, notes
}

// usable sorts the rewrites and leaves out those that the table has no place for.
func usable(all []dataplane.PortRewrite) (out []dataplane.PortRewrite, notes []string) {
	for _, r := range slices.SortedFunc(slices.Values(all), dataplane.PortRewrite.Compare) {
		switch {
		case !r.Remote.Addr().Is4() || r.Remote.Port() == 0 || r.Local == 0:
			notes = append(notes, fmt.Sprintf("port rewrite %s is left out: it takes an IPv4 address and ports other than 0", r))
		case len(out) > 0 && out[len(out)-1].Remote == r.Remote:
			notes = append(notes, fmt.Sprintf("port rewrite %s is left out: there is another one for the same peer", r))
		default:
			out = append(out, r)
		}
	}
	return out, notes
}

// setRewrites puts the chains and sets there that the rewrites need; none need none.
func (s *State) setRewrites(rs []dataplane.PortRewrite) {
	if len(rs) == 0 {
		return
	}
	s.Chains[dataplane.ChainRewriteIn] = Chain{Kind: kindRewriteIn, Rules: []string{rewriteInText(s.Port)}}
	s.Chains[dataplane.ChainRewriteOut] = Chain{Kind: kindRewriteOut, Rules: []string{rewriteOutText(s.Port)}}
	s.Sets[dataplane.SetRewriteIn] = Set{Kind: kindPorts, Rewrites: rs}
	s.Sets[dataplane.MapRewriteOut] = Set{Kind: kindPeers, Rewrites: rs}
}

func rewriteInText(port int) string {
	return fmt.Sprintf("ip saddr . udp sport . udp dport @%s udp dport set %d", dataplane.SetRewriteIn, port)
}

func rewriteOutText(port int) string {
	return fmt.Sprintf("udp sport %d udp sport set ip daddr . udp dport map @%s", port, dataplane.MapRewriteOut)
}

// wantTargets is the table for these destinations.
func wantTargets(n dataplane.Numbers, targets []netip.Prefix) State {
	four, six := ranges(targets)
	rules := rulesText(n)
	return State{
		Table:   true,
		Numbers: n,
		Chains: map[string]Chain{
			dataplane.ChainPrerouting: {Kind: kindPrerouting, Rules: rules},
			dataplane.ChainOutgoing:   {Kind: kindOutgoing, Rules: rules},
			dataplane.ChainClamp:      {Kind: kindClamp, Rules: []string{clampText(n)}},
		},
		Sets: map[string]Set{
			dataplane.SetTargetsIPv4: {Kind: kindIPv4, Ranges: four},
			dataplane.SetTargetsIPv6: {Kind: kindIPv6, Ranges: six},
		},
	}
}

func clampText(n dataplane.Numbers) string {
	return fmt.Sprintf("meta mark & %#08x == %#08x tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu",
		n.MarkMask, n.MarkRoute)
}

func rulesText(n dataplane.Numbers) []string {
	set := func(l3, set string) string {
		return fmt.Sprintf("%s daddr @%s meta mark set meta mark & %#08x | %#08x accept", l3, set,
			^n.MarkMask|n.MarkRoute, n.MarkRoute)
	}
	return []string{
		fmt.Sprintf("meta mark & %#08x == %#08x accept", n.MarkMask, n.MarkWG),
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
