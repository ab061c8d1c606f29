package sites

import (
	"cmp"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Witnesses of a leader are nodes of its site that send echoes through it to nodes of other sites. Their records say
// when no echo comes back although the leader is alive.

// MaxWitnesses is the most witnesses that a leader has.
const MaxWitnesses = 3

// maxMirrors is the most nodes of other sites to which a witness sends echoes through one leader.
const maxMirrors = 2

// Witnesses returns the witnesses of a leader: of the live nodes of its site that could lead, those with the highest
// weights, the highest first. So a node that dies or joins changes one place.
func Witnesses(nodes []Node, leader identity.ID) []identity.ID {
	site, known := "", false
	for i := range nodes {
		if nodes[i].ID == leader {
			site, known = nodes[i].Site, true
		}
	}
	if !known {
		return nil
	}
	var out []identity.ID
	for i := range nodes {
		if n := &nodes[i]; n.ID != leader && n.Site == site && n.Alive && !n.Unfit {
			out = append(out, n.ID)
		}
	}
	return heaviest(out, leader, MaxWitnesses)
}

// heaviest returns the n nodes with the highest rendezvous weights for another node. It sorts of in place.
func heaviest(of []identity.ID, node identity.ID, n int) []identity.ID {
	slices.SortFunc(of, func(a, b identity.ID) int {
		return cmp.Or(cmp.Compare(weight(b, node), weight(a, node)), a.Compare(b))
	})
	return of[:min(len(of), n)]
}

// quorum is how many of its witnesses it takes to demote a leader: two of three, both of two, the only one.
func quorum(witnesses int) int { return min(witnesses, 2) }

// Finding is what the witnesses that demote a leader report.
type Finding struct {
	By    []identity.ID // at least a quorum, sorted
	Kinds uint32        // of packets that the leader loses, as in SilentLeader
	Since int64         // when the quorum was complete, Unix seconds by the last witness's clock
}

// Judge returns the nodes that a quorum of their witnesses finds silent. Only reports of the nodes that Witnesses
// returns count: a node that is away, or in another site, or not among the three, is ignored.
func Judge(nodes []Node, records map[identity.ID]*skeinv1.Record) map[identity.ID]Finding {
	said := map[identity.ID]map[identity.ID]*skeinv1.SilentLeader{} // by leader, then witness
	for i := range nodes {
		for _, s := range records[nodes[i].ID].GetSilentLeaders() {
			leader, err := identity.ParseID(s.GetNodeId())
			if err != nil || s.GetKinds() == 0 {
				continue
			}
			if said[leader] == nil {
				said[leader] = map[identity.ID]*skeinv1.SilentLeader{}
			}
			said[leader][nodes[i].ID] = s
		}
	}
	var out map[identity.ID]Finding
	for leader, by := range said {
		witnesses := Witnesses(nodes, leader)
		f, since := Finding{}, []int64(nil)
		for _, w := range witnesses {
			if s := by[w]; s != nil {
				f.By, f.Kinds, since = append(f.By, w), f.Kinds|s.GetKinds(), append(since, s.GetSince())
			}
		}
		if len(f.By) == 0 || len(f.By) < quorum(len(witnesses)) {
			continue
		}
		slices.SortFunc(f.By, identity.ID.Compare)
		slices.Sort(since)
		f.Since = since[quorum(len(witnesses))-1]
		if out == nil {
			out = map[identity.ID]Finding{}
		}
		out[leader] = f
	}
	return out
}

// Watched is a leader of which this host is a witness.
type Watched struct {
	Leader identity.ID
	// Mirrors are nodes of other sites that answer echoes through the leader, of different sites if possible.
	Mirrors []identity.ID
	// Others are the other acting leaders, the best first. If one of them forwards echoes to the same mirrors, the fault
	// is the leader's. This host itself may be among them.
	Others []identity.ID
}

// Watched returns the leaders of which this host is a witness.
func (p *Plan) Watched() []Watched { return p.watched }

func (m *maker) watch() {
	if m.topology[m.Site] != Site {
		return
	}
	var acting []identity.ID
	for _, l := range m.Leaders[m.Site] {
		if l.Acting {
			acting = append(acting, l.ID)
		}
	}
	var gates map[string][]identity.ID
	for _, leader := range acting {
		if leader == m.Self || !slices.Contains(Witnesses(m.eligible, leader), m.Self) {
			continue
		}
		if gates == nil {
			gates = m.gates()
		}
		w := Watched{Leader: leader, Mirrors: mirrors(gates, m.Self, leader)}
		for _, other := range Order(m.Leaders[m.Site], m.Self) {
			if other != leader && slices.Contains(acting, other) {
				w.Others = append(w.Others, other)
			}
		}
		if len(w.Mirrors) > 0 {
			m.watched = append(m.watched, w)
		}
	}
}

// gates returns the live nodes of other sites that leaders of this site peer with, by site.
func (m *maker) gates() map[string][]identity.ID {
	out := map[string][]identity.ID{}
	for i, id := range m.in.Members.ids {
		if n := &m.nodes[i]; n.gate && n.known && n.site != m.Site && m.in.Alive(id) && m.records[i].GetRole() != RoleRelay {
			out[n.site] = append(out[n.site], id)
		}
	}
	return out
}

// mirrors chooses the nodes that answer a witness's echoes through a leader, of different sites if possible.
func mirrors(gates map[string][]identity.ID, witness, leader identity.ID) []identity.ID {
	var first, rest []identity.ID
	for _, of := range gates {
		best := heaviest(slices.Clone(of), pair(witness, leader), len(of))
		first, rest = append(first, best[0]), append(rest, best[1:]...)
	}
	out := heaviest(first, pair(witness, leader), maxMirrors)
	return append(out, heaviest(rest, pair(witness, leader), maxMirrors-len(out))...)
}

// pair combines a witness and a leader into one ID, so that different pairs choose different mirrors.
func pair(a, b identity.ID) (out identity.ID) {
	for i := range out {
		out[i] = a[i] ^ b[len(b)-1-i]
	}
	return out
}
