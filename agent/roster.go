package agent

import (
	"crypto/ed25519"
	"maps"
	"net/netip"
	"sync/atomic"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// roster is who is a member, as the newest applied state has it. Readers see one whole version.
type roster struct{ current atomic.Pointer[members] }

type members struct {
	nodes map[identity.ID]member
	owner map[netip.Addr]identity.ID
	ids   []identity.ID // sorted
	keys  map[identity.ID]ed25519.PublicKey
	// homes are the sites that the log alone implies for members: the same map as long as it implies the same. nil: no
	// site speaks through leaders.
	homes  *homes
	schema uint32 // the highest event schema that all members know
}

// homes are the sites that the log alone implies. They are not changed.
type homes struct{ of map[identity.ID]string }

// site is a member's. ok is false where the log implies none.
func (h *homes) site(id identity.ID) (site string, ok bool) {
	site, ok = h.of[id]
	return site, ok
}

type member struct {
	key    ed25519.PublicKey
	wg     identity.WireGuardKey
	name   string
	v4, v6 netip.Addr
	codes  bool // it puts codes on packets by the tunnel, and understands them
}

// codedSince is the event schema of the first version that puts codes on control packets by the tunnel.
const codedSince = 4

func newRoster(s *events.State) *roster {
	r := &roster{}
	r.update(s)
	return r
}

func (r *roster) update(s *events.State) {
	m := &members{nodes: map[identity.ID]member{}, owner: map[netip.Addr]identity.ID{},
		keys: map[identity.ID]ed25519.PublicKey{}, schema: events.SchemaMax}
	var of map[identity.ID]string
	if sites.InUse(s.Settings()) {
		of = map[identity.ID]string{}
	}
	for _, n := range s.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || len(n.GetWireguardKey()) != 32 {
			continue // Decide lets no such node in; a foreign log shall not stop the agent
		}
		one := member{key: ed25519.PublicKey(n.GetIdentityKey()), wg: identity.WireGuardKey(n.GetWireguardKey()), name: n.GetName(), codes: n.GetMaxSchema() >= codedSince}
		one.v4, _ = netip.ParseAddr(n.GetIpv4())
		one.v6, _ = netip.ParseAddr(n.GetIpv6())
		m.nodes[id] = one
		m.ids = append(m.ids, id)
		m.keys[id], m.schema = one.key, min(m.schema, n.GetMaxSchema())
		if of != nil {
			if site, ok := homeOf(s, n, one.v4); ok {
				of[id] = site
			}
		}
		for _, a := range []netip.Addr{one.v4, one.v6} {
			if a.IsValid() {
				m.owner[a] = id
			}
		}
	}
	old := r.current.Load()
	if old != nil && maps.EqualFunc(old.keys, m.keys, func(a, b ed25519.PublicKey) bool { return a.Equal(b) }) {
		m.keys = old.keys
	}
	switch {
	case of == nil:
	case old != nil && old.homes != nil && maps.Equal(old.homes.of, of):
		m.homes = old.homes
	default:
		m.homes = &homes{of}
	}
	r.current.Store(m)
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
func (r *roster) Keys() map[identity.ID]ed25519.PublicKey { return r.current.Load().keys }

// homes are the sites that the log alone implies; nil: no site speaks through leaders.
func (r *roster) homes() *homes { return r.current.Load().homes }

// placed are the same where all members know how to gossip by site; else nil.
func (r *roster) placed() *homes {
	m := r.current.Load()
	if m.schema < placedSince {
		return nil
	}
	return m.homes
}

// Key is a member's identity key.
func (r *roster) Key(id identity.ID) (ed25519.PublicKey, bool) {
	m, ok := r.current.Load().nodes[id]
	return m.key, ok
}

// Members are all members' IDs, sorted. The slice is shared: do not change it.
func (r *roster) Members() []identity.ID { return r.current.Load().ids }

// Overlay are a member's addresses in the tunnel.
func (r *roster) Overlay(id identity.ID) (v4, v6 netip.Addr, ok bool) {
	m, ok := r.current.Load().nodes[id]
	return m.v4, m.v6, ok
}

// Owner is the member that has an overlay address.
func (r *roster) Owner(a netip.Addr) (identity.ID, bool) {
	id, ok := r.current.Load().owner[a]
	return id, ok
}

// Coded tells whether two members both put codes on packets by the tunnel.
func (r *roster) Coded(a, b identity.ID) bool {
	m := r.current.Load()
	return m.nodes[a].codes && m.nodes[b].codes
}

// Name is a member's name; of a stranger, its ID.
func (r *roster) Name(id identity.ID) string {
	if m, ok := r.current.Load().nodes[id]; ok {
		return m.name
	}
	return id.String()
}

func (r *roster) get(id identity.ID) (member, bool) {
	m, ok := r.current.Load().nodes[id]
	return m, ok
}
