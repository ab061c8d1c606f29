package sites

import (
	"iter"
	"maps"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Reach is how a host reaches the other members, and who may bring it packets of whom. It is immutable and safe for
// concurrent use. nil: every other member is a peer, and nobody forwards.
type Reach struct {
	// Site is this host's site.
	Site string
	// Guards say which peers may bring packets of which other members.
	Guards []Bring

	members *Members // the slices below are in their order
	nodes   []member // a plan's; only the sites are read
	peers   []bool
	next    []Next // Via is zero where packets go to the member unencapsulated, or not at all
}

// Next is where packets for a member go, if some or all of them do not go to it unencapsulated.
type Next struct {
	Via identity.ID // a peer: the member itself, or the one that forwards to it
	// Passed is set when the way is only for packets that this host forwards for others.
	Passed bool
}

// Bring allows a peer to bring packets whose source is one of some members. Other values may share the list: do not
// modify it.
type Bring struct {
	From identity.ID
	Of   []identity.ID
}

// NewReach makes a host's Reach from maps: its peers, the ways to members, and the sites of members as far as they are
// known.
func NewReach(site string, peers map[identity.ID]bool, ways map[identity.ID]Next, known map[identity.ID]string,
	guards []Bring) *Reach {
	all := map[identity.ID]bool{}
	for _, ids := range []iter.Seq[identity.ID]{maps.Keys(peers), maps.Keys(ways), maps.Keys(known)} {
		for id := range ids {
			all[id] = true
		}
	}
	var nodes []*skeinv1.Node
	for id := range all {
		nodes = append(nodes, &skeinv1.Node{Id: id.String()})
	}
	m := NewMembers(nodes, nil, nil)
	r := &Reach{Site: site, Guards: guards, members: m, nodes: make([]member, len(m.ids)),
		peers: make([]bool, len(m.ids)), next: make([]Next, len(m.ids))}
	for i, id := range m.ids {
		r.peers[i], r.next[i] = peers[id], ways[id]
		r.nodes[i].site, r.nodes[i].known = known[id]
	}
	return r
}

// Peer reports whether a member is a peer.
func (r *Reach) Peer(id identity.ID) bool {
	if r == nil {
		return true
	}
	i, ok := r.members.index(id)
	return ok && r.peers[i]
}

// Count returns how many members are peers; all is how many there are.
func (r *Reach) Count(all int) int {
	if r == nil {
		return all
	}
	n := 0
	for _, peer := range r.peers {
		if peer {
			n++
		}
	}
	return n
}

// Peers yields all peers, by ID. The Reach must not be nil.
func (r *Reach) Peers() iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for i, id := range r.members.ids {
			if r.peers[i] && !yield(id) {
				return
			}
		}
	}
}

// Way returns the way to a member to which this host sends some or all packets encapsulated. A member that has no way
// and is not a peer is unreachable: packets for it are dropped in the tunnel.
func (r *Reach) Way(id identity.ID) (Next, bool) {
	if r == nil {
		return Next{}, false
	}
	i, ok := r.members.index(id)
	if !ok || r.next[i] == (Next{}) {
		return Next{}, false
	}
	return r.next[i], true
}

// Ways yields all ways, by ID.
func (r *Reach) Ways() iter.Seq2[identity.ID, Next] {
	return func(yield func(identity.ID, Next) bool) {
		if r == nil {
			return
		}
		for i, id := range r.members.ids {
			if r.next[i] != (Next{}) && !yield(id, r.next[i]) {
				return
			}
		}
	}
}

// Hops reports whether any packet may travel by hops.
func (r *Reach) Hops() bool {
	if r == nil {
		return false
	}
	return len(r.Guards) > 0 || slices.ContainsFunc(r.next, func(n Next) bool { return n != Next{} })
}

// Passes reports whether this host passes packets on between other members.
func (r *Reach) Passes() bool {
	return r != nil && slices.ContainsFunc(r.next, func(n Next) bool { return n.Passed })
}

// SiteOf returns the site of another member; known is false while it is unknown.
func (r *Reach) SiteOf(id identity.ID) (site string, known bool) {
	if r == nil {
		return "", false
	}
	i, ok := r.members.index(id)
	if !ok {
		return "", false
	}
	return r.nodes[i].site, r.nodes[i].known
}

// Equal reports whether two values have the same content for the same members.
func (r *Reach) Equal(o *Reach) bool {
	if r == nil || o == nil {
		return r == o
	}
	sameSite := func(a, b member) bool { return a.known == b.known && a.site == b.site }
	return r == o || r.Site == o.Site && slices.Equal(r.peers, o.peers) && slices.Equal(r.next, o.next) &&
		slices.EqualFunc(r.nodes, o.nodes, sameSite) && slices.Equal(r.members.ids, o.members.ids) &&
		slices.EqualFunc(r.Guards, o.Guards, func(a, b Bring) bool {
			return a.From == b.From && slices.Equal(a.Of, b.Of)
		})
}
