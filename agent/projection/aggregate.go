package projection

import (
	"cmp"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// holder is a member as far as aggregates need to know it.
type holder struct {
	id    identity.ID
	site  string
	known bool       // the site is
	place int32      // the same for all of a site, from 1 on; 0: it is not known
	via   netip.Addr // overlay IPv4 address of the node that passes packets on to it; invalid: none does
	mtu   int
	// last is set where each of its prefixes has a route of its own for what is passed on. By that this host's own
	// packets go straight to it, so a route to others may lie around it.
	last bool
}

// dest is a prefix of a member: small, since there are thousands to be sorted.
type dest struct {
	prefix netip.Prefix
	of     int32 // its holder
	pod    bool  // a route of pods' leads there, too
}

// way is where packets for a prefix go, as far as routes differ by it.
type way struct {
	via netip.Addr // overlay IPv4 address of the next node; invalid: none passes on
	mtu int
	pod bool // a route of pods' leads there, too
}

// route is a way of all that lies in a prefix, and in no longer one.
type route struct {
	prefix netip.Prefix
	way
}

// aggregates finds single routes for what lies in the ranges of other sites. What nobody has there leads to a leader of
// that site, and ends there.
type aggregates struct {
	holders []holder
	dests   []dest // of all other members, by address
	parts   []part
	routes  []route // to all that other nodes pass packets on to; the longest prefix wins

	of map[identity.ID]int32 // holders, by ID
}

// part is a prefix of another site's range, and what lies in it or around it.
type part struct {
	place  int32 // of the site; see holder
	pod    bool
	prefix netip.Prefix
	dests  []int          // in aggregates.dests
	others []netip.Prefix // that are no other member's, and must not be covered
}

// newAggregates takes what all other members have, and what else leads elsewhere.
func (in *Input) newAggregates(holders []holder, dests []dest, kept ...[]netip.Prefix) *aggregates {
	a := &aggregates{holders: holders, dests: dests, of: make(map[identity.ID]int32, len(holders))}
	others := slices.Concat(kept...)
	slices.SortFunc(a.dests, func(x, y dest) int { return byAddress(x.prefix, y.prefix) })
	places := map[string]int32{}
	for i := range holders {
		h := &holders[i]
		if a.of[h.id] = int32(i); !h.known {
			continue
		}
		if places[h.site] == 0 {
			places[h.site] = int32(len(places) + 1)
		}
		h.place = places[h.site]
	}
	wide := a.wide(in.State.SiteRanges())
	for _, r := range in.State.SiteRanges() {
		if r.Site == in.Reach.Site || places[r.Site] == 0 {
			continue
		}
		for _, p := range []netip.Prefix{r.IPv4, r.IPv6} {
			if !p.IsValid() {
				continue
			}
			v := part{place: places[r.Site], pod: r.Pool != "", prefix: p}
			for _, i := range wide {
				if d := &a.dests[i]; d.prefix.Bits() < p.Bits() && d.prefix.Contains(p.Addr()) {
					v.dests = append(v.dests, i)
				}
			}
			from, _ := slices.BinarySearchFunc(a.dests, p, func(d dest, p netip.Prefix) int { return byAddress(d.prefix, p) })
			for i := from; i < len(a.dests) && p.Contains(a.dests[i].prefix.Addr()); i++ {
				v.dests = append(v.dests, i)
			}
			for _, o := range others {
				if o.Overlaps(p) {
					v.others = append(v.others, o.Masked())
				}
			}
			a.parts = append(a.parts, v)
		}
	}
	a.routes = a.ways()
	return a
}

// wide are the dests that may have a range within them, by index.
func (a *aggregates) wide(ranges []events.SiteRange) (out []int) {
	longest := map[bool]int{} // by family
	for _, r := range ranges {
		longest[false], longest[true] = max(longest[false], r.IPv4.Bits()), max(longest[true], r.IPv6.Bits())
	}
	for i := range a.dests {
		if p := a.dests[i].prefix; p.Bits() < longest[p.Addr().Is6()] {
			out = append(out, i)
		}
	}
	return out
}

// byAddress orders prefixes without host bits.
func byAddress(a, b netip.Prefix) int { return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits()) }

// pick takes those of a part's site for which f holds, by index; others are what is not to be covered. ok is false
// where f does not hold for one of the site, or for none. What lies there and lives elsewhere has a route of its own,
// if f holds for it. A dest for which within holds may be covered all the same; nil: none.
func (a *aggregates) pick(v *part, f, within func(*dest) bool) (in []int, others []netip.Prefix, ok bool) {
	if !slices.ContainsFunc(v.dests, func(i int) bool { return f(&a.dests[i]) && a.home(v, i) }) {
		return nil, nil, false
	}
	ok, others = true, slices.Clone(v.others)
	for _, i := range v.dests {
		d, home := &a.dests[i], a.home(v, i)
		switch picked := f(d); {
		case picked && home:
			in = append(in, i)
		case !picked:
			if within == nil || !within(d) {
				others = append(others, d.prefix)
			}
			ok = ok && !home
		}
	}
	return in, others, ok
}

// home reports whether a dest is its member's who is at the site of a part.
func (a *aggregates) home(v *part, i int) bool {
	return a.holders[a.dests[i].of].place == v.place
}

// way is that of a dest.
func (a *aggregates) way(i int) way {
	d := &a.dests[i]
	h := &a.holders[d.of]
	return way{h.via, h.mtu, d.pod}
}

func (a *aggregates) ways() (out []route) {
	hop := func(d *dest) bool { return a.holders[d.of].via.IsValid() }
	last := func(d *dest) bool { return a.holders[d.of].last }
	covered := make([]bool, len(a.dests))
	for n := range a.parts {
		v := &a.parts[n]
		in, others, _ := a.pick(v, hop, last)
		entries := make([]route, len(in))
		for n, i := range in {
			entries[n] = route{a.dests[i].prefix, a.way(i)}
			entries[n].pod, covered[i] = v.pod, true
		}
		out = append(out, cover(v.prefix, entries, others)...)
	}
	for i := range a.dests {
		if d := &a.dests[i]; !covered[i] && hop(d) {
			out = append(out, route{d.prefix, a.way(i)})
		}
	}
	return shorten(out)
}

// straight are the dests that this host's own packets go straight to within a route to others.
func (a *aggregates) straight() (out []*dest) {
	var around []netip.Prefix
	n := 0
	for i := range a.dests {
		d := &a.dests[i]
		for ; n < len(a.routes) && byAddress(a.routes[n].prefix, d.prefix) <= 0; n++ {
			around = append(around, a.routes[n].prefix)
		}
		for len(around) > 0 && !around[len(around)-1].Contains(d.prefix.Addr()) {
			around = around[:len(around)-1]
		}
		if len(around) > 0 && a.holders[d.of].last {
			out = append(out, d)
		}
	}
	return out
}

// sources are the prefixes of some members, and of nobody else that is known.
func (a *aggregates) sources(of []identity.ID) (out []netip.Prefix) {
	set := make([]bool, len(a.holders))
	for _, id := range of {
		if n, ok := a.of[id]; ok {
			set[n] = true
		}
	}
	pick := func(d *dest) bool { return set[d.of] }
	covered := make([]bool, len(a.dests))
	for n := range a.parts {
		v := &a.parts[n]
		in, others, ok := a.pick(v, pick, nil)
		if !ok { // of a part of a site alone nothing is believed that nobody has
			continue
		}
		entries := make([]route, len(in))
		for n, i := range in {
			entries[n].prefix, covered[i] = a.dests[i].prefix, true
		}
		for _, r := range cover(v.prefix, entries, others) {
			out = append(out, r.prefix)
		}
	}
	for i := range a.dests {
		if d := &a.dests[i]; !covered[i] && pick(d) {
			out = append(out, d.prefix)
		}
	}
	return siblings(merge(out))
}

// cover is the fewest routes in a prefix that lead each entry its way and cover none of the others. What nobody has
// goes any of these ways. Entries lie in the prefix; when they overlap each other each has its own route.
func cover(p netip.Prefix, entries []route, others []netip.Prefix) []route {
	slices.SortFunc(entries, func(a, b route) int { return byAddress(a.prefix, b.prefix) })
	for i := range entries {
		if i > 0 && entries[i-1].prefix.Overlaps(entries[i].prefix) ||
			slices.ContainsFunc(others, func(o netip.Prefix) bool { return o.Overlaps(entries[i].prefix) }) {
			return entries
		}
	}
	var ways []way
	for i, e := range entries {
		if (i == 0 || e.way != entries[i-1].way) && !slices.Contains(ways, e.way) {
			ways = append(ways, e.way)
		}
	}
	if len(ways) > 64 {
		return entries
	}
	slices.SortFunc(ways, func(a, b way) int { return cmp.Or(a.via.Compare(b.via), a.mtu-b.mtu) })
	c := coverer{ways: ways}
	c.around(p, entries, others)
	return c.out
}

type coverer struct {
	ways []way
	out  []route
}

// around covers the entries in the largest prefixes that have none of the others in them.
func (c *coverer) around(p netip.Prefix, entries []route, others []netip.Prefix) {
	switch {
	case len(entries) == 0:
		return
	case len(others) == 0:
		c.assign(c.build(p, entries), p, -1)
		return
	case p.Bits() == p.Addr().BitLen(): // unreachable: an entry and another are not the same
		return
	}
	for _, half := range halves(p) {
		var in []route
		for _, e := range entries {
			if half.Overlaps(e.prefix) {
				in = append(in, e)
			}
		}
		var rest []netip.Prefix
		for _, o := range others {
			if half.Overlaps(o) {
				rest = append(rest, o)
			}
		}
		c.around(half, in, rest)
	}
}

// tree has the ways that the top of a prefix may lead, in the fewest routes, as bits; nil: any.
type tree struct {
	ways uint64
	kids [2]*tree
}

// build finds them from the bottom up: what both halves may lead, else what either may.
func (c *coverer) build(p netip.Prefix, entries []route) *tree {
	if len(entries) == 0 {
		return nil
	}
	t := &tree{ways: 1 << slices.Index(c.ways, entries[0].way)}
	if !slices.ContainsFunc(entries, func(e route) bool { return e.way != entries[0].way }) {
		return t
	}
	low, high := halves(p)[0], halves(p)[1]
	from, _ := slices.BinarySearchFunc(entries, high.Addr(), func(e route, a netip.Addr) int {
		return e.prefix.Addr().Compare(a)
	})
	t.kids = [2]*tree{c.build(low, entries[:from]), c.build(high, entries[from:])}
	a, b := t.kids[0].any(), t.kids[1].any()
	if t.ways = a & b; t.ways == 0 {
		t.ways = a | b
	}
	return t
}

func (t *tree) any() uint64 {
	if t == nil {
		return ^uint64(0)
	}
	return t.ways
}

// assign makes the routes from the top down; up is the way of the route around p, -1: there is none.
func (c *coverer) assign(t *tree, p netip.Prefix, up int) {
	if t == nil {
		return
	}
	if up < 0 || t.ways&(1<<up) == 0 {
		up = bits.TrailingZeros64(t.ways)
		c.out = append(c.out, route{p, c.ways[up]})
	}
	if t.kids[0] == nil && t.kids[1] == nil {
		return
	}
	for i, half := range halves(p) {
		c.assign(t.kids[i], half, up)
	}
}

// halves of a prefix that is longer than none of its addresses.
func halves(p netip.Prefix) [2]netip.Prefix {
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	b := p.Addr().AsSlice()
	b[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	high, _ := netip.AddrFromSlice(b)
	return [2]netip.Prefix{low, netip.PrefixFrom(high, p.Bits()+1)}
}

// shorten drops routes that the one around them makes superfluous, and makes one of two halves that lead the same way.
func shorten(routes []route) []route {
	slices.SortFunc(routes, func(a, b route) int { return cmp.Or(byAddress(a.prefix, b.prefix), a.via.Compare(b.via)) })
	routes = slices.CompactFunc(routes, func(a, b route) bool { return a.prefix == b.prefix })
	of := make(map[netip.Prefix]way, len(routes))
	var around []route
	for _, r := range routes {
		for len(around) > 0 && !around[len(around)-1].prefix.Overlaps(r.prefix) {
			around = around[:len(around)-1]
		}
		if n := len(around); n > 0 && around[n-1].way == r.way {
			continue
		}
		around = append(around, r)
		of[r.prefix] = r.way
	}
	join(of)
	out := make([]route, 0, len(of))
	for p, w := range of {
		out = append(out, route{p, w})
	}
	slices.SortFunc(out, func(a, b route) int { return byAddress(a.prefix, b.prefix) })
	return out
}

// join makes one prefix of two halves that have the same value, again and again.
func join[V comparable](of map[netip.Prefix]V) {
	byLength := [129][]netip.Prefix{}
	for p := range of {
		byLength[p.Bits()] = append(byLength[p.Bits()], p)
	}
	for length := 128; length > 0; length-- {
		for _, p := range byLength[length] {
			v, ok := of[p]
			parent := netip.PrefixFrom(p.Addr(), length-1).Masked()
			if _, taken := of[parent]; !ok || taken {
				continue
			}
			both := halves(parent)
			if a, ok := of[both[0]]; !ok || a != v {
				continue
			}
			if b, ok := of[both[1]]; !ok || b != v {
				continue
			}
			delete(of, both[0])
			delete(of, both[1])
			of[parent] = v
			byLength[length-1] = append(byLength[length-1], parent)
		}
	}
}

// siblings makes one prefix of two that are its halves. They are disjoint.
func siblings(ps []netip.Prefix) []netip.Prefix {
	of := make(map[netip.Prefix]struct{}, len(ps))
	for _, p := range ps {
		of[p] = struct{}{}
	}
	join(of)
	out := ps[:0]
	for p := range of {
		out = append(out, p)
	}
	slices.SortFunc(out, byAddress)
	return out
}

// fewer makes one of two halves of pods' routes that are the same, and sorts them.
func fewer(all []dataplane.Narrow) []dataplane.Narrow {
	routes := make([]route, len(all))
	for i, n := range all {
		routes[i] = route{n.Prefix, way{mtu: n.MTU}}
	}
	out := all[:0]
	for _, r := range shorten(routes) {
		out = append(out, dataplane.Narrow{Prefix: r.prefix, MTU: r.mtu})
	}
	return out
}
