package projection

import (
	"maps"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Last remembers the last projection: most of what wakes an agent changes no Spec, most of what changes one changes
// where WireGuard sends, and among ten thousand members a projection takes tens of milliseconds. The zero value
// remembers none. It is not safe for concurrent use.
type Last struct {
	in      Input
	spec    dataplane.Spec
	refused []Refusal
	known   bool
}

// Project is what Project gives, of which only that is made anew that may have changed. Anew is set when that is more
// than where WireGuard sends. The caller leaves the maps and slices of the input as they are, and those of the Spec.
func (l *Last) Project(in Input) (spec dataplane.Spec, refused []Refusal, anew bool) {
	if anew = !l.known || !l.in.same(&in) || !l.redirect(&in); anew {
		l.spec, l.refused = Project(in)
		l.known = true
	}
	l.in = in
	return l.spec, l.refused, anew
}

// redirect has WireGuard's peers sent to where an input says that is the same but for that. It fails where a peer
// cannot be projected.
func (l *Last) redirect(in *Input) bool {
	told := map[identity.ID]bool{}
	for _, side := range []*Input{&l.in, in} {
		for id := range side.Endpoints {
			told[id] = true
		}
		for id := range side.WantHandshake {
			told[id] = true
		}
	}
	var peers map[dataplane.Key]dataplane.Peer
	for id := range told {
		if l.in.Endpoints[id] == in.Endpoints[id] && l.in.WantHandshake[id] == in.WantHandshake[id] {
			continue
		}
		n := in.State.Node(id)
		if n == nil || !in.Reach.Peer(id) || id == in.Self {
			continue
		}
		peer, err := in.peer(id, n)
		old, had := l.spec.WireGuard.Peers[in.key(id, n)]
		if err != nil || !had {
			return false
		}
		if peers == nil { // others may still read those of before
			peers = maps.Clone(l.spec.WireGuard.Peers)
		}
		peer.AllowedIPs = old.AllowedIPs
		in.enter(peers, id, n, peer)
	}
	if peers != nil {
		l.spec.WireGuard.Peers = peers
	}
	return true
}

// same reports whether two inputs surely give the same Spec, but for where WireGuard sends. States are compared by
// their pointers: one that is the same is not changed.
func (in *Input) same(o *Input) bool {
	return in.Self == o.Self && in.State == o.State && in.Reach == o.Reach && in.Host.equal(&o.Host) &&
		in.Gateway == o.Gateway && in.Complete == o.Complete && in.Plain.same(&o.Plain, in.State.PlainPeers()) &&
		in.fits(o) && o.fits(in) &&
		maps.Equal(in.InGrace, o.InGrace) && maps.Equal(in.Rekeys, o.Rekeys) &&
		slices.Equal(in.PortRewrites, o.PortRewrites) &&
		slices.Equal(in.Pods, o.Pods) && slices.Equal(in.Exported, o.Exported) &&
		maps.EqualFunc(in.Records, o.Records, sayTheSame)
}

// fits reports whether packets of the same sizes fit through the endpoints of another input.
func (in *Input) fits(o *Input) bool {
	for id, e := range in.Endpoints {
		if e.MTU != o.Endpoints[id].MTU {
			return false
		}
	}
	return true
}

// sayTheSame reports whether two records of a member say the same, as far as a projection reads them.
func sayTheSame(a, b *skeinv1.Record) bool {
	return a == b || a.GetSite() == b.GetSite() && (a == nil) == (b == nil) &&
		slices.Equal(a.GetNodeAddresses(), b.GetNodeAddresses()) &&
		slices.EqualFunc(a.GetPlainSessions(), b.GetPlainSessions(), func(a, b *skeinv1.PlainSession) bool {
			return a.GetPeer() == b.GetPeer() && a.GetTerm() == b.GetTerm()
		})
}

func (h *Host) equal(o *Host) bool {
	return h.Numbers == o.Numbers && h.PrivateKey == o.PrivateKey && h.Link == o.Link && h.Port == o.Port &&
		h.ControlPort == o.ControlPort &&
		h.MTU == o.MTU && h.Keepalive == o.Keepalive && h.AskedKeepalive == o.AskedKeepalive &&
		h.RouteNodeAddresses == o.RouteNodeAddresses &&
		slices.Equal(h.Connected, o.Connected)
}

func (p *Plain) same(o *Plain, peers []*skeinv1.PlainPeer) bool {
	expire := func(n *skeinv1.PlainPeer) bool { return PlainExpired(n, p.Now) != PlainExpired(n, o.Now) }
	return p.Carrying == o.Carrying && maps.Equal(p.Terms, o.Terms) && !slices.ContainsFunc(peers, expire)
}
