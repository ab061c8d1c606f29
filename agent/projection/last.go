package projection

import (
	"maps"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
)

// Last remembers the last projection: most of what wakes an agent changes no Spec, and among ten thousand members a
// projection takes tens of milliseconds. The zero value remembers none. It is not safe for concurrent use.
type Last struct {
	in      Input
	spec    dataplane.Spec
	refused []Refusal
	known   bool
}

// Project is what Project gives, made anew only if something has changed that it follows from. The caller leaves the
// maps and slices of the input as they are, and those of the Spec.
func (l *Last) Project(in Input) (dataplane.Spec, []Refusal) {
	if !l.known || !l.in.same(&in) {
		l.spec, l.refused = Project(in)
		l.known = true
	}
	l.in = in
	return l.spec, l.refused
}

// same reports whether two inputs surely give the same Spec. States are compared by their pointers: one that is the
// same is not changed.
func (in *Input) same(o *Input) bool {
	return in.Self == o.Self && in.State == o.State && in.Reach == o.Reach && in.Host.equal(&o.Host) &&
		in.Gateway == o.Gateway && in.Complete == o.Complete && in.Plain.same(&o.Plain, in.State.PlainPeers()) &&
		maps.Equal(in.Endpoints, o.Endpoints) && maps.Equal(in.Knock, o.Knock) &&
		maps.Equal(in.Lingering, o.Lingering) && slices.Equal(in.PortRewrites, o.PortRewrites) &&
		slices.Equal(in.Pods, o.Pods) && slices.Equal(in.Exported, o.Exported) &&
		maps.EqualFunc(in.Records, o.Records, sayTheSame)
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
	return h.PrivateKey == o.PrivateKey && h.Link == o.Link && h.Port == o.Port && h.ControlPort == o.ControlPort &&
		h.MTU == o.MTU && h.Keepalive == o.Keepalive && h.RouteNodeAddresses == o.RouteNodeAddresses &&
		slices.Equal(h.Connected, o.Connected)
}

func (p *Plain) same(o *Plain, peers []*skeinv1.PlainPeer) bool {
	expire := func(n *skeinv1.PlainPeer) bool { return PlainExpired(n, p.Now) != PlainExpired(n, o.Now) }
	return p.Carrying == o.Carrying && maps.Equal(p.Terms, o.Terms) && !slices.ContainsFunc(peers, expire)
}
