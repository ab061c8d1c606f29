package dataplane

import (
	"maps"
	"slices"
)

// Equal tells whether two Specs want the same. A round of the agent's loop that changes nothing need not touch the
// kernel.
func (s Spec) Equal(o Spec) bool {
	return s.Numbers == o.Numbers && s.Complete == o.Complete && s.ControlPort == o.ControlPort && s.Plain == o.Plain &&
		s.Link.equal(o.Link) && s.WireGuard.equal(o.WireGuard) &&
		slices.Equal(s.Targets, o.Targets) && slices.Equal(s.PortRewrites, o.PortRewrites) && s.Pods.equal(o.Pods) &&
		s.Hops.Equal(o.Hops) && slices.Equal(s.Translations, o.Translations) && slices.Equal(s.Inside, o.Inside)
}

// Equal tells whether two want the same hops.
func (h Hops) Equal(o Hops) bool {
	return h.Self == o.Self && slices.Equal(h.Own, o.Own) && slices.Equal(h.Routes, o.Routes) && slices.EqualFunc(h.Guards,
		o.Guards, HopGuard.equal)
}

func (g HopGuard) equal(o HopGuard) bool {
	return g.From == o.From && slices.Equal(g.Sources, o.Sources)
}

func (l Link) equal(o Link) bool {
	return l.Name == o.Name && l.MTU == o.MTU && slices.Equal(l.Addresses, o.Addresses) && slices.Equal(l.Narrow, o.Narrow)
}

func (w WireGuard) equal(o WireGuard) bool {
	return w.PrivateKey == o.PrivateKey && w.Port == o.Port && w.Mark == o.Mark &&
		maps.EqualFunc(w.Peers, o.Peers, Peer.equal)
}

func (p Peer) equal(o Peer) bool {
	return p.PresharedKey == o.PresharedKey && p.Endpoint == o.Endpoint && p.Keepalive == o.Keepalive &&
		slices.Equal(p.AllowedIPs, o.AllowedIPs)
}

func (p Pods) equal(o Pods) bool {
	return p.Forward == o.Forward && slices.Equal(p.Blocks, o.Blocks) && slices.Equal(p.Remote, o.Remote) &&
		slices.Equal(p.Routes, o.Routes) && slices.Equal(p.Refused, o.Refused) && slices.Equal(p.Pools, o.Pools) &&
		slices.Equal(p.Elsewhere, o.Elsewhere) && slices.Equal(p.Exported, o.Exported) && slices.Equal(p.Gateways, o.Gateways)
}
