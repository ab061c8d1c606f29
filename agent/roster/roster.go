// Package roster is who is a member of the mesh, by the agreed state: keys, names and addresses, for readers on any
// goroutine.
package roster

import (
	"bytes"
	"crypto/ed25519"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Roster is who is a member, as the newest applied state has it. Readers see one whole version.
type Roster struct{ current atomic.Pointer[members] }

// members has few maps: each agent of a large mesh has all members in memory, and slices of their exact size take a
// third.
type members struct {
	of     *events.State
	ids    []identity.ID // sorted
	nodes  []Member      // whose they are
	owners []owner       // sorted by address
	keys   map[identity.ID]ed25519.PublicKey
	// homes are the sites that the log alone implies for members: the same ones as long as it implies the same. nil: no
	// site speaks through leaders.
	homes  *Homes
	plans  *sites.Members // what plans need of them
	schema uint32         // the highest event schema that all members know
}

// owner says which of the members has an address.
type owner struct {
	address [16]byte
	member  int32
}

// Homes are the sites that the log alone implies, and whom it has lead. They are not changed.
type Homes struct {
	IDs    []identity.ID // sorted
	Sites  []string      // theirs
	chosen []choice      // sorted
}

// choice is a member that the log has lead its site.
type choice struct {
	id    identity.ID
	site  string
	named bool // the site is; else the member's record tells it
}

// Leads tells whether the log has a member lead a site, if it is in that.
func (h *Homes) Leads(id identity.ID, site string) bool {
	i, ok := slices.BinarySearchFunc(h.chosen, id, func(c choice, id identity.ID) int {
		return c.id.Compare(id)
	})
	return ok && (!h.chosen[i].named || h.chosen[i].site == site)
}

// Site is a member's. ok is false where the log implies none.
func (h *Homes) Site(id identity.ID) (site string, ok bool) {
	i, ok := Find(h.IDs, id)
	if !ok {
		return "", false
	}
	return h.Sites[i], true
}

func (h *Homes) equal(o *Homes) bool {
	return slices.Equal(h.IDs, o.IDs) && slices.Equal(h.Sites, o.Sites) && slices.Equal(h.chosen, o.chosen)
}

// Find is where an ID is among sorted ones.
func Find(ids []identity.ID, id identity.ID) (int, bool) {
	return slices.BinarySearchFunc(ids, id, identity.ID.Compare)
}

// Member is what the log says of one.
type Member struct {
	key       ed25519.PublicKey
	WireGuard identity.WireGuardKey
	Name      string
	v4, v6    netip.Addr
	codes     bool // it puts codes on packets by the tunnel, and understands them
}

// codedSince is the event schema of the first version that puts codes on control packets by the tunnel.
const codedSince = 4

// placedSince is the event schema of the versions that gossip by site. Where a member is older, all gossip with
// all.
const placedSince = 8

// New is the roster of a state.
func New(s *events.State) *Roster {
	r := &Roster{}
	r.Update(s)
	return r
}

// Update takes over a state's members, and reports whether they may be others than before. Most events change none.
func (r *Roster) Update(s *events.State) bool {
	old := r.current.Load()
	if old != nil && s.SameMembers(old.of) {
		same := *old
		same.of = s // the state before need not be kept
		r.current.Store(&same)
		return false
	}
	nodes := s.Nodes() // sorted by ID
	m := &members{of: s, ids: make([]identity.ID, 0, len(nodes)), nodes: make([]Member, 0, len(nodes)),
		owners: make([]owner, 0, 2*len(nodes)), schema: events.SchemaMax}
	var at *Homes
	if sites.InUse(s.Settings()) {
		at = &Homes{IDs: make([]identity.ID, 0, len(nodes)), Sites: make([]string, 0, len(nodes))}
	}
	for _, n := range nodes {
		id, err := identity.ParseID(n.GetId())
		if err != nil || len(n.GetWireguardKey()) != 32 {
			continue // Decide lets no such node in; a foreign log shall not stop the agent
		}
		one := Member{key: ed25519.PublicKey(n.GetIdentityKey()), WireGuard: identity.WireGuardKey(n.GetWireguardKey()),
			Name: n.GetName(), codes: n.GetMaxSchema() >= codedSince}
		one.v4, _ = netip.ParseAddr(n.GetIpv4())
		one.v6, _ = netip.ParseAddr(n.GetIpv6())
		m.schema = min(m.schema, n.GetMaxSchema())
		if at != nil {
			if site, ok := homeOf(s, n, one.v4); ok {
				at.IDs, at.Sites = append(at.IDs, id), append(at.Sites, site)
			}
			if s := n.GetSettings(); s.GetLeader() == "yes" && !n.GetDraining() {
				at.chosen = append(at.chosen, choice{id, s.GetSite(), s.GetSiteSet()})
			}
		}
		for _, a := range []netip.Addr{one.v4, one.v6} {
			if a.IsValid() {
				m.owners = append(m.owners, owner{a.As16(), int32(len(m.nodes))})
			}
		}
		m.ids, m.nodes = append(m.ids, id), append(m.nodes, one)
	}
	slices.SortFunc(m.owners, func(a, b owner) int { return bytes.Compare(a.address[:], b.address[:]) })
	if m.keys = m.sameKeys(old); m.keys == nil {
		m.keys = make(map[identity.ID]ed25519.PublicKey, len(m.ids))
		for i, id := range m.ids {
			m.keys[id] = m.nodes[i].key
		}
	}
	m.homes = at
	if at != nil && old != nil && old.homes != nil && old.homes.equal(at) {
		m.homes = old.homes
	}
	m.plans = m.forPlans(nodes)
	r.current.Store(m)
	return true
}

// forPlans is what plans need of the members.
func (m *members) forPlans(nodes []*skeinv1.Node) *sites.Members {
	if m.homes == nil {
		return sites.NewMembers(nodes, nil, nil)
	}
	return sites.NewMembers(nodes, m.homes.Site, m.of.Slices())
}

// sameKeys are those of former members, if they are those of the present ones.
func (m *members) sameKeys(old *members) map[identity.ID]ed25519.PublicKey {
	if old == nil || !slices.Equal(old.ids, m.ids) {
		return nil
	}
	for i := range m.nodes {
		if !m.nodes[i].key.Equal(old.nodes[i].key) {
			return nil
		}
	}
	return old.keys
}

func (m *members) get(id identity.ID) (Member, bool) {
	i, ok := Find(m.ids, id)
	if !ok {
		return Member{}, false
	}
	return m.nodes[i], true
}

// homeOf is the site that the log alone implies for a member: the one that it names, else the one in whose range the
// member's address lies.
func homeOf(s *events.State, n *skeinv1.Node, at netip.Addr) (site string, ok bool) {
	if n.GetSettings().GetSiteSet() {
		return n.GetSettings().GetSite(), true
	}
	if !at.IsValid() {
		return "", false
	}
	r, ok := s.RangeAt(at)
	return r.Site, ok
}

// Keys are all members' identity keys. The map is shared: do not change it. It is another one whenever it changes.
func (r *Roster) Keys() map[identity.ID]ed25519.PublicKey { return r.current.Load().keys }

// ForPlans is what plans need of the members, the same as long as these are.
func (r *Roster) ForPlans() *sites.Members { return r.current.Load().plans }

// Homes are the sites that the log alone implies; nil: no site speaks through leaders.
func (r *Roster) Homes() *Homes { return r.current.Load().homes }

// Placed are the same where all members know how to gossip by site; else nil.
func (r *Roster) Placed() *Homes {
	m := r.current.Load()
	if m.schema < placedSince {
		return nil
	}
	return m.homes
}

// Key is a member's identity key.
func (r *Roster) Key(id identity.ID) (ed25519.PublicKey, bool) {
	m, ok := r.Get(id)
	return m.key, ok
}

// Members are all members' IDs, sorted. The slice is shared: do not change it.
func (r *Roster) Members() []identity.ID { return r.current.Load().ids }

// Overlay are a member's addresses in the tunnel.
func (r *Roster) Overlay(id identity.ID) (v4, v6 netip.Addr, ok bool) {
	m, ok := r.Get(id)
	return m.v4, m.v6, ok
}

// Owner is the member that has an overlay address.
func (r *Roster) Owner(a netip.Addr) (identity.ID, bool) {
	if !a.IsValid() {
		return identity.ID{}, false
	}
	m, want := r.current.Load(), a.As16()
	i, ok := slices.BinarySearchFunc(m.owners, want, func(o owner, b [16]byte) int {
		return bytes.Compare(o.address[:], b[:])
	})
	if !ok {
		return identity.ID{}, false
	}
	at := m.owners[i].member
	if n := &m.nodes[at]; a != n.v4 && a != n.v6 { // an IPv4 address, written as one of IPv6
		return identity.ID{}, false
	}
	return m.ids[at], true
}

// Coded tells whether two members both put codes on packets by the tunnel.
func (r *Roster) Coded(a, b identity.ID) bool {
	m := r.current.Load()
	one, _ := m.get(a)
	other, _ := m.get(b)
	return one.codes && other.codes
}

// Name is a member's name; of a stranger, its ID.
func (r *Roster) Name(id identity.ID) string {
	if m, ok := r.Get(id); ok {
		return m.Name
	}
	return id.String()
}

// Get is a member.
func (r *Roster) Get(id identity.ID) (Member, bool) { return r.current.Load().get(id) }
