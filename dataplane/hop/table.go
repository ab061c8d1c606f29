package hop

import (
	"fmt"
	"net/netip"

	"github.com/skeinmesh/skein/dataplane"
)

// Table is dataplane.Hops in the form in which packets look it up. It does not change.
type Table struct {
	self   [4]byte
	routes ranges[[4]byte]
	guards map[[4]byte]*ranges[bool]
}

// NewTable makes a table; nil: there are no hops. What cannot be used is left out, and a note says what.
func NewTable(h dataplane.Hops) (t *Table, notes []string) {
	switch {
	case !h.Self.IsValid():
		return nil, nil
	case !h.Self.Is4():
		return nil, []string{fmt.Sprintf("hops: own address %s is no IPv4 address: packets for other sites are lost", h.Self)}
	}
	t = &Table{self: h.Self.As4(), guards: make(map[[4]byte]*ranges[bool], len(h.Guards))}
	routes := make([]entry[[4]byte], 0, len(h.Routes))
	for _, r := range h.Routes {
		if !r.Via.Is4() || !r.Prefix.IsValid() {
			notes = append(notes, fmt.Sprintf("hops: %s via %s: the next node needs an IPv4 address of the overlay", r.Prefix, r.Via))
			continue
		}
		routes = append(routes, entry[[4]byte]{r.Prefix, r.Via.As4()})
	}
	t.routes = newRanges(routes)
	for _, g := range h.Guards {
		if !g.From.Is4() {
			notes = append(notes, fmt.Sprintf("hops: from %s: the node needs an IPv4 address of the overlay", g.From))
			continue
		}
		sources := make([]entry[bool], 0, len(g.Sources))
		for _, p := range g.Sources {
			sources = append(sources, entry[bool]{p, true})
		}
		rs := newRanges(sources)
		t.guards[g.From.As4()] = &rs
	}
	return t, notes
}

// via is the next node for a destination; false: it is no destination of ours.
func (t *Table) via(dst netip.Addr) ([4]byte, bool) {
	v := t.routes.of(dst)
	return v, v != [4]byte{}
}

// allows tells whether a node may bring packets of that source.
func (t *Table) allows(from [4]byte, source netip.Addr) bool {
	g := t.guards[from]
	return g != nil && g.of(source)
}
