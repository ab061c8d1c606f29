package sites

import (
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Members are the nodes in the log, with what plans need of them that only the log says. All plans of the same members
// share one value: among ten thousand, reading IDs and addresses costs more than the plan. It is immutable and safe for
// concurrent use.
type Members struct {
	ids   []identity.ID // sorted
	nodes []logged      // in the order of ids
	at    map[identity.ID]int32
	slice Slicer
}

// logged is what the log says of a node.
type logged struct {
	*skeinv1.Node
	home  string // the site that the log implies for the node, if homed
	homed bool
	slice uint8 // the node's slice of home
}

// Slicer returns the slice of a site that a member of the site is in, less than events.Slices.
type Slicer func(n *skeinv1.Node, id identity.ID, site string) int

// NewMembers reads nodes, and leaves out those with unreadable IDs. home returns the site that the log implies for a
// member; nil: it implies none. Without slice, members are bound to leaders one by one; see Order.
func NewMembers(nodes []*skeinv1.Node, home func(identity.ID) (site string, ok bool), slice Slicer) *Members {
	type read struct {
		id identity.ID
		n  *skeinv1.Node
	}
	all := make([]read, 0, len(nodes))
	for _, n := range nodes {
		if id, err := identity.ParseID(n.GetId()); err == nil {
			all = append(all, read{id, n})
		}
	}
	byID := func(a, b read) int { return a.id.Compare(b.id) }
	if !slices.IsSortedFunc(all, byID) {
		slices.SortFunc(all, byID)
	}
	m := &Members{ids: make([]identity.ID, len(all)), nodes: make([]logged, len(all)),
		at: make(map[identity.ID]int32, len(all)), slice: slice}
	for i, r := range all {
		l := logged{Node: r.n}
		if home != nil {
			l.home, l.homed = home(r.id)
		}
		if l.homed && slice != nil {
			l.slice = uint8(slice(r.n, r.id, l.home))
		}
		m.ids[i], m.nodes[i], m.at[r.id] = r.id, l, int32(i)
	}
	return m
}

// index returns the position of a member in ids.
func (m *Members) index(id identity.ID) (int, bool) {
	i, ok := m.at[id]
	return int(i), ok
}

// sliceAt returns the slice of a member that is in the given site.
func (m *Members) sliceAt(i int, site string) uint8 {
	switch n := &m.nodes[i]; {
	case m.slice == nil:
		return 0
	case n.homed && n.home == site:
		return n.slice
	default:
		return uint8(m.slice(n.Node, m.ids[i], site))
	}
}

// recordsOf returns the records of the members in the order of ids; nil where there is none.
func (m *Members) recordsOf(records map[identity.ID]*skeinv1.Record) []*skeinv1.Record {
	out := make([]*skeinv1.Record, len(m.ids))
	for id, r := range records {
		if i, ok := m.at[id]; ok {
			out[i] = r
		}
	}
	return out
}
