package sites

import (
	"cmp"
	"slices"

	"github.com/skeinmesh/skein/identity"
)

// DefaultLeaders is how many leaders a site has where the settings say nothing.
const DefaultLeaders = 2

// Node is what an election needs to know of a member.
type Node struct {
	ID   identity.ID
	Site string

	Chosen    bool   // the log says that it shall lead
	Wish      bool   // it says itself that it wishes to lead
	Unfit     bool   // it cannot lead: it forwards nothing, or nothing is known of it
	Reluctant bool   // it leads only where nobody else can: it drains, or the log says that it shall not lead
	Public    bool   // other sites can reach an endpoint of it
	Silent    bool   // its witnesses find that it does not forward; see Judge
	Term      uint64 // in which it says that it leads; 0: it does not
	Alive     bool
	Lawful    bool // this host has seen it act as a leader within HandOver, by right; see Input.Lawful
}

// class orders nodes by how well they suit. Only the best class that has a leader carries traffic.
func (n *Node) class() int {
	switch {
	case n.Silent && n.Reluctant:
		return 0
	case n.Silent: // one that drains forwards, at least
		return 1
	case n.Reluctant:
		return 2
	case n.Chosen, n.Wish:
		return 5
	case n.Public:
		return 4
	}
	return 3
}

// Leader is a node that was elected.
type Leader struct {
	ID     identity.ID
	Term   uint64
	Acting bool // it says that it leads, or no leader of its site does
	// Reserve is set while an acting leader of a better class is there: this one has its sessions, and carries packets
	// only for those who find the better ones dead.
	Reserve bool
	// Silent is set when its witnesses find that it does not forward, and another one leads that does: this one is a
	// reserve.
	Silent bool
	// HandsOver is set while it goes on only because none of those says yet that it leads that the log has chosen.
	HandsOver bool
	Slot      uint32 // which share of the site it carries, from 1 on; 0: none. See TakeSlots.
}

// Elect gives each site at most perSite leaders, the best first, and behind them those that led before, as long as none
// of them says that it leads. Where the log has chosen leaders of a site and one of them is alive, only those lead, and
// until one of them says so those that led by right before the log chose: what a node says of itself then decides
// nothing. Else those that wish to lead come first, then those with a public endpoint, then those that lead already, in
// the newest term first, then the lowest ID. So of equals none that returns takes the place of one that leads. Nodes
// that are not alive are passed over, unless all of the site are: who is cut off from a site goes on trying its
// leaders. Silent ones come after those that are not, and are judged as if they were not where they are all that could
// lead: a finding leaves no site without leaders, and gives none that the log has chosen leaders for to others.
func Elect(nodes []Node, perSite int) map[string][]Leader {
	bySite := map[string][]*Node{}
	for i := range nodes {
		if n := &nodes[i]; !n.Unfit {
			bySite[n.Site] = append(bySite[n.Site], n)
		}
	}
	out := make(map[string][]Leader, len(bySite))
	for site, all := range bySite {
		able, before := ranked(all)
		out[site] = lead(able, before, perSite)
	}
	return out
}

// Heirs are the nodes of a site that would be elected if its leaders went away, the best first: as many as lead, and
// with the leaders at least one more than a leader has witnesses. Other sites know the records of the leaders and heirs
// alone, and of those that say something of a leader. That is enough to elect the same leaders as the site itself, and
// to demote the same: see Judge.
func Heirs(nodes []Node, site string, leaders []Leader, perSite int) (out []identity.ID) {
	var rest []*Node
	for i := range nodes {
		n := &nodes[i]
		leads := slices.ContainsFunc(leaders, func(l Leader) bool { return l.ID == n.ID })
		if n.Site == site && n.Alive && !n.Unfit && !leads {
			rest = append(rest, n)
		}
	}
	for want := max(perSite, MaxWitnesses+1-len(leaders)); len(rest) > 0 && len(out) < want; {
		able, _ := ranked(rest)
		best := able[0].ID // where the log has chosen some, others come after all of those
		out = append(out, best)
		rest = slices.DeleteFunc(rest, func(n *Node) bool { return n.ID == best })
	}
	return out
}

// ranked are the nodes that can be elected, the best first, and those that may hand over to them.
func ranked(all []*Node) (able, before []*Node) {
	alive := make([]*Node, 0, len(all))
	for _, n := range all {
		if n.Alive {
			alive = append(alive, n)
		}
	}
	if len(alive) == 0 {
		alive = append(alive, all...)
	}
	if slices.ContainsFunc(alive, (*Node).chosen) {
		for _, n := range alive {
			if !n.chosen() && n.Alive && n.Lawful {
				before = append(before, n)
			}
		}
		alive = slices.DeleteFunc(alive, func(n *Node) bool { return !n.chosen() })
	}
	if !slices.ContainsFunc(alive, func(n *Node) bool { return !n.Reluctant && !n.Silent }) {
		for i, n := range alive {
			heard := *n
			heard.Silent = false
			alive[i] = &heard
		}
	}
	slices.SortFunc(alive, suitsBetter)
	slices.SortFunc(before, suitsBetter)
	return alive, before
}

func suitsBetter(a, b *Node) int {
	return cmp.Or(
		cmp.Compare(b.class(), a.class()),
		compareFlags(b.Public, a.Public), // of those that wish
		cmp.Compare(b.Term, a.Term),
		a.ID.Compare(b.ID))
}

// chosen reports whether the log has the node lead.
func (n *Node) chosen() bool { return n.Chosen && !n.Reluctant }

func compareFlags(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func lead(ranked, before []*Node, perSite int) []Leader {
	elected := ranked[:min(max(perSite, 1), len(ranked))]
	says := func(n *Node) bool { return n.Term > 0 && !n.Silent }
	nobody := !slices.ContainsFunc(elected, says)
	if nobody { // those who led before them go on until they are ready
		for _, n := range slices.Concat(ranked[len(elected):], before) {
			if says(n) && len(elected) < 2*max(perSite, 1) {
				elected, nobody = append(slices.Clip(elected), n), false
			}
		}
	}
	acts := func(n *Node) bool { return nobody && !n.Silent || n.Term > 0 }
	best := -1
	for _, n := range elected {
		if acts(n) {
			best = max(best, n.class())
		}
	}
	out := make([]Leader, 0, len(elected))
	for _, n := range elected {
		out = append(out, Leader{ID: n.ID, Term: n.Term, Acting: acts(n), Reserve: acts(n) && n.class() < best,
			Silent: n.Silent, HandsOver: slices.Contains(before, n)})
	}
	return out
}

// Term is the term that a leader's record should name, if the election of its own site found it; 0: it leads nothing.
// A term is that of a set of leaders. Where one of the set is no leader any more, the others go on in the next term: so
// one that was away and still says that it leads comes after them.
func Term(nodes []Node, leaders []Leader, self identity.ID) uint64 {
	elected := func(id identity.ID) bool {
		return slices.ContainsFunc(leaders, func(l Leader) bool { return l.ID == id })
	}
	if !elected(self) {
		return 0
	}
	site := ""
	for i := range nodes {
		if nodes[i].ID == self {
			site = nodes[i].Site
		}
	}
	newest := uint64(1)
	for i := range nodes {
		if nodes[i].Site == site {
			newest = max(newest, nodes[i].Term)
		}
	}
	for i := range nodes {
		if n := &nodes[i]; n.Site == site && n.Term == newest && !elected(n.ID) {
			return max(newest+1, newest) // a record may name the highest number there is
		}
	}
	return newest
}
