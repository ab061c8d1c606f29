package hop

import (
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/internal/inet"
)

// ranges are values of address ranges: each is that of the longest prefix around. An address has the value of the last
// start that is not behind it. IPv4 comes before IPv6, as netip orders them.
type ranges[V comparable] struct {
	starts []netip.Addr
	values []V
}

// entry is the value of a prefix.
type entry[V comparable] struct {
	prefix netip.Prefix
	value  V
}

// newRanges takes prefixes apart where others lie within them. Of two that are the same the last counts.
func newRanges[V comparable](entries []entry[V]) (r ranges[V]) {
	var none V
	entries = slices.Clone(entries)
	entries = slices.DeleteFunc(entries, func(e entry[V]) bool { return !e.prefix.IsValid() })
	for i := range entries {
		entries[i].prefix = entries[i].prefix.Masked()
	}
	slices.SortStableFunc(entries, func(a, b entry[V]) int { return a.prefix.Compare(b.prefix) })
	var around []entry[V] // prefixes that the next address may lie within, the longest last
	leave := func() {
		last := around[len(around)-1]
		around = around[:len(around)-1]
		value := none
		if len(around) > 0 {
			value = around[len(around)-1].value
		}
		if next, ok := behind(last.prefix); ok {
			r.begin(next, value)
		}
	}
	for _, e := range entries {
		for len(around) > 0 && !around[len(around)-1].prefix.Contains(e.prefix.Addr()) {
			leave()
		}
		r.begin(e.prefix.Addr(), e.value)
		around = append(around, e)
	}
	for len(around) > 0 {
		leave()
	}
	return r
}

// begin says that the value counts from an address on; the addresses come in order.
func (r *ranges[V]) begin(a netip.Addr, value V) {
	n := len(r.starts)
	if n > 0 && r.starts[n-1] == a {
		r.starts, r.values = r.starts[:n-1], r.values[:n-1]
		n--
	}
	var before V
	if n > 0 {
		before = r.values[n-1]
	}
	if before != value {
		r.starts, r.values = append(r.starts, a), append(r.values, value)
	}
}

// of is the value of an address.
func (r *ranges[V]) of(a netip.Addr) (v V) {
	low, high := 0, len(r.starts) // starts before low are not behind a, those from high on are
	for low < high {
		middle := int(uint(low+high) >> 1)
		if a.Less(r.starts[middle]) {
			high = middle
		} else {
			low = middle + 1
		}
	}
	if low == 0 {
		return v
	}
	return r.values[low-1]
}

// behind is the first address behind a prefix; the end of IPv4 is the begin of IPv6. False: there is none.
func behind(p netip.Prefix) (netip.Addr, bool) {
	if next := inet.Last(p).Next(); next.IsValid() {
		return next, true
	}
	return netip.IPv6Unspecified(), p.Addr().Is4()
}
