package projection

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Reach is how this host reaches the other members where not each of them is its peer. Nil: each one is.
type Reach = sites.Reach

// Way is how packets travel to a member.
type Way = sites.Next

// Guard lets a peer bring packets whose source is one of some members.
type Guard = sites.Bring

// mtu is the largest packet for a member where the link's is too large; else 0.
func (in *Input) mtu(id identity.ID, link int) int {
	way, hops := in.Reach.Way(id)
	if !hops {
		return narrower(in.Endpoints[id].MTU, link)
	}
	mtu := narrower(in.Endpoints[way.Via].MTU, link)
	if own := narrower(in.Endpoints[id].MTU, link); way.Passed && own > 0 && (mtu == 0 || own < mtu) {
		mtu = own // this host's own packets go straight to the member
	}
	switch {
	case mtu > 0:
		return mtu - dataplane.HopOverhead
	case way.Passed: // what is passed on has been made small enough where it began
		return 0
	}
	return link - dataplane.HopOverhead
}

// hops are what the ways and guards come to, with the addresses that each member has.
func (in *Input) hops(own []netip.Prefix, of map[identity.ID][]netip.Prefix,
	ranged *aggregates) (h dataplane.Hops, refused []Refusal) {
	if !in.Reach.Hops() {
		return h, nil
	}
	h.Self = in.overlay4(in.Self)
	if !h.Self.IsValid() {
		return h, []Refusal{{Peer: in.Self, Reason: "this node has no overlay IPv4 address, which packets between sites " +
			"travel under"}}
	}
	h.Own = merge(slices.Clone(own))
	for id, way := range in.Reach.Ways() {
		via := in.overlay4(way.Via)
		if !via.IsValid() {
			refused = append(refused, Refusal{Peer: id, Reason: fmt.Sprintf("node %s, which passes packets on to it, has no "+
				"overlay IPv4 address", way.Via)})
			continue
		}
		if ranged != nil && !way.Passed {
			continue
		}
		for _, p := range of[id] {
			h.Routes = append(h.Routes, dataplane.HopRoute{Prefix: p, Via: via, Last: way.Passed})
		}
	}
	if ranged != nil {
		for _, r := range ranged.routes {
			h.Routes = append(h.Routes, dataplane.HopRoute{Prefix: r.prefix, Via: r.via})
		}
	}
	slices.SortFunc(h.Routes, dataplane.HopRoute.Compare)
	h.Routes = slices.CompactFunc(h.Routes, func(a, b dataplane.HopRoute) bool { return a.Prefix == b.Prefix })
	type sourced struct {
		of      []identity.ID
		sources []netip.Prefix
	}
	var found []sourced // the leaders of a site may bring the same
	for _, g := range in.Reach.Guards {
		from := in.overlay4(g.From)
		if !from.IsValid() {
			continue // it sends no packets of others either
		}
		guard := dataplane.HopGuard{From: from}
		if ranged != nil && len(g.Of) > 1 {
			n := slices.IndexFunc(found, func(f sourced) bool { return slices.Equal(f.of, g.Of) })
			if n < 0 {
				n, found = len(found), append(found, sourced{g.Of, ranged.sources(g.Of)})
			}
			guard.Sources = slices.Clone(found[n].sources)
		} else {
			for _, id := range g.Of {
				guard.Sources = append(guard.Sources, of[id]...)
			}
			guard.Sources = merge(guard.Sources)
		}
		h.Guards = append(h.Guards, guard)
	}
	slices.SortFunc(h.Guards, dataplane.HopGuard.Compare)
	slices.SortFunc(refused, func(a, b Refusal) int { return slices.Compare(a.Peer[:], b.Peer[:]) })
	return h, refused
}

// ownNodeAddresses are the networks of this host that others may route to it.
func (in *Input) ownNodeAddresses() (out []netip.Prefix) {
	if !in.Host.RouteNodeAddresses {
		return nil
	}
	for _, text := range in.Records[in.Self].GetNodeAddresses() {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// passedBy is the overlay IPv4 address of the node that passes packets on to a member; invalid: none does.
func (in *Input) passedBy(id identity.ID) netip.Addr {
	if w, ok := in.Reach.Way(id); ok && !w.Passed {
		return in.overlay4(w.Via)
	}
	return netip.Addr{}
}

// overlay4 is a member's overlay IPv4 address; invalid: it has none.
func (in *Input) overlay4(id identity.ID) netip.Addr {
	if a, ok := in.addresses4[id]; ok {
		return a
	}
	a, err := netip.ParseAddr(in.State.Node(id).GetIpv4())
	if err != nil {
		a = netip.Addr{}
	}
	if in.addresses4 != nil {
		in.addresses4[id] = a
	}
	return a
}
