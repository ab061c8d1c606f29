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

	Chosen    bool   // the log sets it as a leader
	Wish      bool   // its own record asks to lead
	Unfit     bool   // it cannot lead: it is only a relay, or has no record here
	Reluctant bool   // it leads only where nobody else can: it drains, or the log excludes it
	Public    bool   // other sites can send to an endpoint of it first; see Reachable
	Silent    bool   // its witnesses find that it does not forward; see Judge
	Term      uint64 // named by its record; 0: the record does not say that it leads
	Alive     bool
	Lawful    bool // this host saw it lead by right within HandOver; see Input.Lawful
}

// class ranks a node's fitness to lead; higher is better. Only the best class that has an acting leader carries
// traffic.
func (n *Node) class() int {
	switch {
	case n.Silent && n.Reluctant:
		return 0
	case n.Silent: // below a draining node, which does forward
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

// Leader is an elected node.
type Leader struct {
	ID     identity.ID
	Term   uint64
	Acting bool // its record says that it leads, or no record of the site's leaders does
	// Reserve is set while an acting leader of a better class exists. A reserve has its sessions, and carries packets
	// only for nodes that find the better leaders dead.
	Reserve bool
	// Silent is set when its witnesses find that it does not forward while another leader does. It is then a reserve.
	Silent bool
	// HandsOver is set for a former leader that goes on only because no leader that the log has chosen says yet that it
	// leads.
	HandsOver bool
	Slot      uint32 // the share of the site that it carries, from 1; 0: none. See TakeSlots.
}

// Elect returns at most perSite leaders for each site, the best first. Former leaders follow them as long as none of
// the elected says that it leads.
//
// Where the log has chosen leaders of a site and one of them is alive, only those are elected, and only nodes that led
// by right before the log chose may follow them: the claim of a node itself then decides nothing. Elsewhere the order
// is: nodes that wish to lead, nodes with a public endpoint, nodes that lead already (newest term first), lowest ID. So
// a node that returns does not replace an equal one that leads.
//
// Dead nodes are passed over unless the whole site is dead: a host that is cut off from a site keeps trying its
// leaders. Silent nodes come last. Silence is ignored where every candidate is silent or reluctant: a finding leaves no
// site without leaders, and never replaces the leaders that the log has chosen with others.
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

// Heirs returns the nodes that would be elected if a site's leaders went away, the best first. If the site has so many
// nodes, they are at least perSite, and together with the leaders at least one more than a leader has witnesses. Other
// sites hold only the records of leaders, of heirs, and of nodes that report a silent leader. That is enough to elect
// and to demote the same leaders as the site itself does; see Judge.
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
		best := able[0].ID // nodes that the log has chosen come before all others
		out = append(out, best)
		rest = slices.DeleteFunc(rest, func(n *Node) bool { return n.ID == best })
	}
	return out
}

// ranked returns the nodes that can be elected, the best first, and the former leaders that may hand over to them.
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
		compareFlags(b.Public, a.Public), // public nodes first within a class
		cmp.Compare(b.Term, a.Term),
		a.ID.Compare(b.ID))
}

// chosen reports whether the log sets the node as a leader, and it does not drain.
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
	if nobody { // former leaders go on until the elected ones are ready
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

// Term returns the term that a node's record should name by the election of its own site; 0: it is not elected. A term
// belongs to a set of leaders. When one of the set is no longer elected, the others go on in the next term, so a node
// that was away and still claims the former term ranks behind them.
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
			return max(newest+1, newest) // a record may name the highest number, which must not wrap to 0
		}
	}
	return newest
}
