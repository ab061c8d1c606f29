package nftable

import (
	"bytes"
	"net/netip"
	"slices"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/internal/inet"
)

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
		if inet.Last(p) == r.To {
			return p.String()
		}
	}
	return r.From.String() + "-" + r.To.String()
}

// Ranges turns prefixes into sorted ranges by family; a prefix inside another is dropped.
func Ranges(ps []netip.Prefix) (four, six []Range) {
	for _, p := range ps {
		if !p.IsValid() {
			continue
		}
		p = p.Masked()
		r := Range{From: p.Addr(), To: inet.Last(p)}
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

// Without is what of a is not in b; both are sorted and without overlaps, and so is the result.
func Without(a, b []Range) (out []Range) {
	for _, r := range a {
		for _, e := range b {
			if e.To.Less(r.From) || r.To.Less(e.From) {
				continue
			}
			if r.From.Less(e.From) {
				out = append(out, Range{From: r.From, To: e.From.Prev()})
			}
			if !e.To.Less(r.To) {
				r = Range{}
				break
			}
			r.From = e.To.Next()
		}
		if r.From.IsValid() {
			out = append(out, r)
		}
	}
	return out
}

// merge covers what either covers. Ranges that overlap become one; the others stay as they are.
func merge(a, b []Range) []Range {
	all := slices.Concat(a, b)
	slices.SortFunc(all, func(x, y Range) int {
		if c := x.From.Compare(y.From); c != 0 {
			return c
		}
		return y.To.Compare(x.To)
	})
	var out []Range
	for _, r := range all {
		if n := len(out); n > 0 && r.From.Compare(out[n-1].To) <= 0 {
			if r.To.Compare(out[n-1].To) > 0 {
				out[n-1].To = r.To
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// fromElements pairs the starts and ends of an interval set. A start without an end of its own lasts
// until the next start, the last one to the end of the address space.
func fromElements(es []nftables.SetElement) []Range {
	es = slices.Clone(es)
	slices.SortFunc(es, func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 {
			return c
		}
		return endFirst(a) - endFirst(b)
	})
	var out []Range
	open := false
	for _, e := range es {
		a, ok := netip.AddrFromSlice(e.Key)
		if !ok {
			continue
		}
		if open {
			out[len(out)-1].To = a.Prev()
		}
		open = !e.IntervalEnd
		if open {
			out = append(out, Range{From: a})
		}
	}
	if open {
		n := &out[len(out)-1]
		n.To = inet.Last(netip.PrefixFrom(n.From, 0))
	}
	return out
}

func endFirst(e nftables.SetElement) int {
	if e.IntervalEnd {
		return 0
	}
	return 1
}

func toElements(rs []Range) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, 2*len(rs))
	for _, r := range rs {
		out = append(out, nftables.SetElement{Key: r.From.AsSlice()})
		if end := r.To.Next(); end.IsValid() { // else it lasts to the end of the address space
			out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}
