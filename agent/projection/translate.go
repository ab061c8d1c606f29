package projection

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// translation is an agreed one that was read.
type translation struct {
	site       string
	prefix, as netip.Prefix
}

// translations are what is agreed of sites' networks.
type translations []translation

func translationsOf(s *events.State) (out translations) {
	for _, t := range s.Translations() {
		if prefix, as, ok := events.ReadTranslation(t); ok {
			out = append(out, translation{t.GetSite(), prefix, as})
		}
	}
	return out
}

// elsewhere is what other sites know a network of a site as: p itself where nothing is agreed about it.
func (ts translations) elsewhere(site string, p netip.Prefix) (netip.Prefix, error) {
	for _, t := range ts {
		if t.site != site || !t.prefix.Overlaps(p) {
			continue
		}
		as, ok := events.Translate(p, t.prefix, t.as)
		if !ok {
			return p, fmt.Errorf("%s is wider than %s, which is translated in %s: name its parts, or translate all of it",
				p, t.prefix, events.SiteText(site))
		}
		return as, nil
	}
	return p, nil
}

// Elsewhere are the addresses that other sites know sites' networks under, each translation's whole.
func Elsewhere(s *events.State) (out []netip.Prefix) {
	for _, t := range translationsOf(s) {
		out = append(out, t.as)
	}
	return out
}

// KnownOutside are the networks of other CNIs' pods and, with their node addresses, behind members, as those know
// them who are in no site.
func KnownOutside(s *events.State, nodeAddresses bool, record func(identity.ID) *skeinv1.Record) (out []netip.Prefix) {
	agreed := translationsOf(s)
	for _, n := range s.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		site, _ := sites.Of(n, record(id))
		networks := podCIDRsOf(n)
		if nodeAddresses {
			for _, text := range record(id).GetNodeAddresses() {
				if p, err := netip.ParsePrefix(text); err == nil && p == p.Masked() && addr.Private(p) {
					networks = append(networks, p)
				}
			}
		}
		for _, p := range networks {
			if as, err := agreed.elsewhere(site, p); err == nil {
				out = append(out, as)
			}
		}
	}
	return sorted(out)
}

// Behind are the members that have a translated network, or a part of it, behind them, by ID.
func Behind(s *events.State, t *skeinv1.SiteTranslation,
	record func(identity.ID) *skeinv1.Record) (out []*skeinv1.Node) {
	prefix, _, ok := events.ReadTranslation(t)
	for _, n := range s.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil || !ok {
			continue
		}
		if site, known := sites.Of(n, record(id)); !known || site != t.GetSite() {
			continue
		}
		networks := podCIDRsOf(n)
		for _, text := range record(id).GetNodeAddresses() {
			if p, err := netip.ParsePrefix(text); err == nil {
				networks = append(networks, p)
			}
		}
		if slices.ContainsFunc(networks, prefix.Overlaps) {
			out = append(out, n)
		}
	}
	return out
}

// place is where a member is, as the projection needs it.
type place struct {
	id     identity.ID
	node   *skeinv1.Node
	site   string
	placed bool // its site is known
	own    bool // it is this host's site
	agreed bool // the log says so
}

// places are all members, in the order in which their requests for networks count: those of this host's site first,
// whose networks it knows as they are, then those whose site is in the log, then by ID.
func (in *Input) places(nodes []*skeinv1.Node) []place {
	mine, known := sites.Of(in.State.Node(in.Self), in.Records[in.Self])
	out := make([]place, 0, len(nodes))
	for _, n := range nodes {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		p := place{id: id, node: n, agreed: n.GetSettings().GetSiteSet()}
		if p.site, p.placed = sites.Of(n, in.Records[id]); !p.placed { // its record is for its own site
			p.site, p.placed = in.Reach.SiteOf(id)
		}
		p.own = id == in.Self || known && p.placed && p.site == mine
		out = append(out, p)
	}
	rank := func(p place) (r int) {
		if !p.own {
			r += 2
		}
		if !p.agreed {
			r++
		}
		return r
	}
	slices.SortStableFunc(out, func(a, b place) int { return rank(a) - rank(b) })
	return out
}

// given is a network that a member has here.
type given struct {
	prefix netip.Prefix
	of     place
	link   bool // it is on a link of this host's own
}

// behind is what of the networks behind a member this host leads to it.
type behind struct {
	own       bool           // the member is in this host's site
	routed    []netip.Prefix // as they are, with a route of their own: this host's own packets need an overlay source
	addresses []netip.Prefix // that it asked for, as they are
	elsewhere []netip.Prefix // other addresses of translated ones, which packets from other sites are for
}

// networks gives members the networks behind them, each to one of them: pods of other CNIs, which the log has, and node
// addresses, which members ask for. The networks that this host itself has behind it are first, and stay with it.
func (in *Input) networks(places []place, taken []netip.Prefix) (map[identity.ID]behind, []dataplane.Translation,
	[]Refusal) {
	agreed := translationsOf(in.State)
	out := make(map[identity.ID]behind, len(places))
	var refused []Refusal
	var own []dataplane.Translation
	var all []given
	reserved := slices.Concat(taken, Elsewhere(in.State))
	self := place{}
	for _, p := range places {
		if p.id == in.Self {
			self = p
		}
	}
	mine := in.ownNodeAddresses()
	for _, p := range slices.Concat(podCIDRsOf(self.node), mine) {
		all = append(all, given{prefix: p, of: self})
		if as, err := agreed.elsewhere(self.site, p); err == nil && as != p {
			own = append(own, dataplane.Translation{Prefix: p, As: as})
		}
	}
	if self.placed {
		for _, c := range in.Host.Connected {
			all = append(all, given{prefix: c, of: self, link: true})
		}
	}
	for _, at := range places {
		if at.id == in.Self {
			continue
		}
		b := behind{own: at.own}
		for _, p := range podCIDRsOf(at.node) {
			as, err := agreed.elsewhere(at.site, p)
			if err != nil {
				refused = append(refused, Refusal{Peer: at.id, Reason: "pod CIDR " + err.Error(), Block: p})
				continue
			}
			b.add(&b.routed, p, as, at, &all)
		}
		out[at.id] = b
	}
	for _, at := range places {
		b := out[at.id]
		if in.Host.RouteNodeAddresses && at.id != in.Self {
			for _, text := range in.Records[at.id].GetNodeAddresses() {
				if err := b.request(text, at, agreed, reserved, mine, &all); err != nil {
					refused = append(refused, Refusal{Peer: at.id, Reason: err.Error()})
				}
			}
		}
		out[at.id] = b
	}
	slices.SortFunc(own, func(a, b dataplane.Translation) int { return a.Prefix.Compare(b.Prefix) })
	return out, slices.Compact(own), refused
}

// add has a network led to its member: as it is in the own site, and under the addresses that other sites know.
func (b *behind) add(same *[]netip.Prefix, p, as netip.Prefix, at place, all *[]given) {
	if at.own || as == p {
		*same = append(*same, p)
		*all = append(*all, given{prefix: p, of: at})
	}
	if as != p {
		b.elsewhere = append(b.elsewhere, as)
		*all = append(*all, given{prefix: as, of: at})
	}
}

// request gives a member a network that it asks for, or says why not. Where this host's own link leads there, nobody
// gets it, but for an address alone of a member that this host, too, offers its own address on that link (own) to: the
// one takes from the other what it sends from there.
func (b *behind) request(text string, at place, agreed translations, reserved, own []netip.Prefix, all *[]given) error {
	p, err := netip.ParsePrefix(text)
	if err != nil || p.Masked() != p {
		return fmt.Errorf("node address %q is not a prefix without host bits", text)
	}
	if !addr.Private(p) { // a public prefix would let one member draw the others' internet traffic
		return fmt.Errorf("node address %s is not private; only private prefixes are routed to a node", p)
	}
	as, err := agreed.elsewhere(at.site, p)
	if err != nil {
		return fmt.Errorf("node address %w", err)
	}
	for _, t := range reserved {
		if t.Overlaps(p) {
			return fmt.Errorf("node address %s overlaps %s, which is the overlay's or another node's", p, t)
		}
	}
	var linked netip.Prefix
	for _, g := range *all {
		switch {
		case as != p && !g.link && g.prefix.Overlaps(as): // links are the projection's to look at
			return overlapError(p, at, g)
		case !at.own && as != p, !g.prefix.Overlaps(p):
		case g.link && at.own: // it is where this host is, too
			linked = g.prefix
		default:
			return overlapError(p, at, g)
		}
	}
	switch {
	case !linked.IsValid():
	case as != p: // packets for it leave by the host's own link
		at.own = false
	case !p.IsSingleIP() || !slices.ContainsFunc(own, linked.Overlaps):
		return nil // the link leads there, and what this host sends from its address there comes by the link alone
	}
	same := &b.addresses
	if as != p {
		same = &b.routed
	}
	b.add(same, p, as, at, all)
	return nil
}

// overlapError tells who has a network already, and what to do where it is another site's.
func overlapError(p netip.Prefix, at place, g given) error {
	whose := "which is node " + g.of.node.GetName() + "'s"
	if g.link {
		whose = "the network on a link of this host"
	}
	if g.of.site == at.site || !g.of.placed || !at.placed {
		return fmt.Errorf("node address %s overlaps %s, %s", p, g.prefix, whose)
	}
	const next = "let other sites know it under other addresses: skein site translate %q --prefix %s --as PREFIX, " +
		"a private prefix of that length that nobody has"
	return fmt.Errorf("node address %s of %s overlaps %s, %s, in %s: "+next,
		p, events.SiteText(at.site), g.prefix, whose, events.SiteText(g.of.site), at.site, p)
}
