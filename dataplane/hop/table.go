package hop

import (
	"fmt"
	"net/netip"

	"github.com/skeinmesh/skein/dataplane"
)

// Table is dataplane.Hops in the form in which packets look it up. It does not change.
type Table struct {
	self   [4]byte
	own    ranges[bool]
	routes ranges[way]
	guards map[[4]byte]*ranges[bool]
}

// way leads to a next node. The zero value is none.
type way struct {
	via  [4]byte
	last bool // what is from own sources goes as it is
}

// NewTable makes a table; nil: there are no hops. What cannot be used is left out, and a note says what.
func NewTable(h dataplane.Hops) (t *Table, notes []string) {
	switch {
	case !h.Self.IsValid():
		return nil, nil
	case !h.Self.Is4():
		return nil, []string{fmt.Sprintf("hops: own address %s is not an IPv4 address: packets for other sites are lost",
			h.Self)}
	}
	t = &Table{self: h.Self.As4(), own: newRanges(all(h.Own)), guards: make(map[[4]byte]*ranges[bool], len(h.Guards))}
	routes := make([]entry[way], 0, len(h.Routes))
	for _, r := range h.Routes {
		if !r.Via.Is4() || !r.Prefix.IsValid() {
			notes = append(notes,
				fmt.Sprintf("hops: %s via %s: the next node needs an IPv4 address of the overlay", r.Prefix, r.Via))
			continue
		}
		routes = append(routes, entry[way]{r.Prefix, way{r.Via.As4(), r.Last}})
	}
	t.routes = newRanges(routes)
	for _, g := range h.Guards {
		if !g.From.Is4() {
			notes = append(notes, fmt.Sprintf("hops: from %s: the node needs an IPv4 address of the overlay", g.From))
			continue
		}
		rs := newRanges(all(g.Sources))
		t.guards[g.From.As4()] = &rs
	}
	return t, notes
}

// all is true for each of some prefixes.
func all(prefixes []netip.Prefix) []entry[bool] {
	out := make([]entry[bool], 0, len(prefixes))
	for _, p := range prefixes {
		out = append(out, entry[bool]{p, true})
	}
	return out
}

// allows tells whether a node may bring packets of that source.
func (t *Table) allows(from [4]byte, source netip.Addr) bool {
	g := t.guards[from]
	return g != nil && g.of(source)
}
