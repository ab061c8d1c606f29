// Package projection turns what is agreed, observed and decided into the Spec of this host's kernel.
//
// Project is pure: the same input gives the same Spec, whatever the order in which it became known.
// A peer that cannot be projected is reported and left out; the rest goes on. Source: DESIGN.md
// sections 3 and 9.
package projection

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Input is everything that a Spec follows from.
type Input struct {
	Self    identity.ID
	State   *events.State
	Records map[identity.ID]*skeinv1.Record
	// Endpoints is where WireGuard sends for each peer.
	Endpoints map[identity.ID]Endpoint
	// WantHandshake tells of peers that may remember a session which this host has lost: what they send is lost
	// too, until a handshake, and a keepalive makes one at once.
	WantHandshake map[identity.ID]bool
	Host          Host
	// Reach is how members are reached that are not peers.
	Reach *Reach
	// PortRewrites lead WireGuard's packets for some peers through ports that birthday probing has opened.
	PortRewrites []dataplane.PortRewrite
	// Pods are the ways to this host's pods.
	Pods []dataplane.PodRoute
	// InGrace are slots that have just moved by plan, by the event that moved them: their endpoints still lead to the
	// former owner, until the new one surely knows.
	InGrace map[uint64]bool
	// Gateway is set while this host is a gateway of an egress, and Exported are the slots' addresses that lead here.
	Gateway  bool
	Exported []netip.Addr
	// Plain is what this host knows of plain peers.
	Plain Plain
	// Keys remembers the peers' preshared keys between projections; nil: they are derived each time.
	Keys *Keys
	// Rekeys are the keys that members change to before the log says so.
	Rekeys map[identity.ID]Rekey
	// Complete is set once state, records and paths have spoken.
	Complete bool

	addresses4 map[identity.ID]netip.Addr // of those that were asked for; see overlay4
}

// Endpoint is where WireGuard sends for a peer: an address of the peer's, or a local relay proxy.
type Endpoint struct {
	Addr netip.AddrPort
	// MTU is the largest packet of the tunnel that the way to there carries; 0: the link's.
	MTU int
	// Proven is set when the peer has answered from this address. Only then does a keepalive make sense:
	// it keeps a NAT's mapping, which a proxy does not need, and it begins a handshake, which is lost and
	// not tried again for five seconds when the peer does not know this node yet.
	Proven bool
	// Relayed is set for a relay's proxy once the search for a direct path is over for now. The relay's session keeps no
	// mapping of WireGuard's, so a keepalive is sent there if it was asked for by name.
	Relayed bool
}

// Rekey is a WireGuard key that a member changes to before the log says so.
type Rekey struct {
	To       dataplane.Key
	Switched bool // its device has it: its addresses are led there
}

// Host is what only this host knows.
type Host struct {
	Numbers            dataplane.Numbers // the zero value: the default ones
	PrivateKey         identity.WireGuardKey
	Link               string
	Port               int
	ControlPort        int           // the control net's
	MTU                int           // bytes; 0: the default
	Keepalive          time.Duration // 0: none
	AskedKeepalive     time.Duration // what was asked for this host by name, for all of its peers; 0: nothing
	RouteNodeAddresses bool
	// Connected are the networks on this host's own links. No peer's block may take their traffic.
	Connected []netip.Prefix
}

// Refusal is something a peer asked for, or the log gives it, and does not get here.
type Refusal struct {
	Peer   identity.ID
	Reason string
	// Block is set when it is one of the peer's address blocks, the endpoint of an egress slot that it owns, or a
	// network of the pods that another CNI runs on it.
	Block netip.Prefix
}

// Project computes the Spec.
func Project(in Input) (dataplane.Spec, []Refusal) {
	numbers := in.Host.Numbers.Filled()
	spec := dataplane.Spec{
		Numbers: numbers,
		Link:    dataplane.Link{Name: in.Host.Link, MTU: in.Host.MTU},
		WireGuard: dataplane.WireGuard{
			PrivateKey: dataplane.Key(in.Host.PrivateKey),
			Port:       in.Host.Port,
			Mark:       numbers.MarkWG,
		},
		PortRewrites: slices.SortedFunc(slices.Values(in.PortRewrites), dataplane.PortRewrite.Compare),
		ControlPort:  in.Host.ControlPort,
		Complete:     in.Complete,
	}
	if spec.Link.MTU == 0 {
		spec.Link.MTU = dataplane.MTU
	}
	in.addresses4 = map[identity.ID]netip.Addr{}
	nodes := in.State.Nodes()
	spec.WireGuard.Peers = make(map[dataplane.Key]dataplane.Peer, in.Reach.Count(len(nodes)))
	overlays := Overlays(in.State.Cluster())
	var refused []Refusal
	endpoints := endpointsByNode(in.State, in.InGrace)
	addresses, own := make(map[identity.ID][]netip.Prefix, len(nodes)), []netip.Prefix(nil)
	carried := in.plainPeers()
	networks, translated, unled := in.networks(in.places(nodes), slices.Concat(overlays, Pools(in.State),
		plainNetworks(in.State)))
	refused = append(refused, unled...)
	spec.Translations = translated
	ranged := in.Reach.Hops() && len(in.State.SiteRanges()) > 0 && in.overlay4(in.Self).IsValid()
	holders, dests := make([]holder, 0, len(nodes)), make([]dest, 0, 4*len(nodes))
	for _, n := range nodes {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			refused = append(refused, Refusal{Peer: id, Reason: err.Error()})
			continue
		}
		if id == in.Self {
			spec.Link.Addresses = ownAddresses(n, overlays)
			spec.Pods.Blocks, spec.Pods.Routes = blocksOf(in.State, n.GetId()), slices.SortedFunc(slices.Values(in.Pods),
				comparePodRoutes)
			own = slices.Concat(overlayOf(n), spec.Pods.Blocks, endpoints[n.GetId()], podCIDRsOf(n), carried[in.Self],
				in.ownNodeAddresses())
			for _, t := range translated {
				own = append(own, t.As)
			}
			continue
		}
		peer, err := in.peer(id, n)
		if err != nil {
			refused = append(refused, Refusal{Peer: id, Reason: err.Error()})
			continue
		}
		mtu := in.mtu(id, spec.Link.MTU)
		behind := networks[id]
		via := in.passedBy(id)
		alone := !ranged || !via.IsValid() // it has routes of its own
		had := len(dests)
		lead := func(p netip.Prefix, pods bool) { // pods: a route of theirs leads there, too
			if pods && alone {
				spec.Pods.Remote = append(spec.Pods.Remote, dataplane.Narrow{Prefix: p, MTU: mtu})
			}
			dests = append(dests, dest{p, int32(len(holders)), pods})
		}
		for _, p := range overlayOf(n) {
			lead(p, false)
		}
		blocks := blocksOf(in.State, n.GetId())
		for i, some := range [...][]netip.Prefix{blocks, endpoints[n.GetId()], behind.routed, behind.elsewhere, carried[id]} {
			for _, p := range some {
				if err := in.Host.mayLead(p); err != nil {
					refused = append(refused, Refusal{Peer: id, Reason: err.Error(), Block: p})
					continue
				}
				lead(p, i < 4 || !slices.ContainsFunc(overlays, p.Overlaps))
			}
		}
		for _, p := range behind.addresses {
			lead(p, false)
		}
		peer.AllowedIPs = make([]netip.Prefix, 0, len(dests)-had)
		for _, d := range dests[had:] {
			peer.AllowedIPs = append(peer.AllowedIPs, d.prefix)
		}
		if behind.own && len(translated) > 0 {
			spec.Inside = slices.Concat(spec.Inside, overlayOf(n), blocks, endpoints[n.GetId()], behind.routed,
				behind.addresses)
		}
		slices.SortFunc(peer.AllowedIPs, netip.Prefix.Compare)
		addresses[id] = peer.AllowedIPs
		if in.Reach.Peer(id) {
			in.enter(spec.WireGuard.Peers, id, n, peer)
		}
		if site, known := in.Reach.SiteOf(id); ranged {
			way, _ := in.Reach.Way(id)
			last := way.Passed && in.overlay4(way.Via).IsValid()
			holders = append(holders, holder{id: id, site: site, known: known, via: via, mtu: mtu, last: last})
		} else {
			dests = dests[:had]
		}
		if !alone {
			continue
		}
		if mtu > 0 {
			for _, p := range peer.AllowedIPs {
				spec.Link.Narrow = append(spec.Link.Narrow, dataplane.Narrow{Prefix: p, MTU: mtu})
			}
		}
		spec.Targets = append(spec.Targets, peer.AllowedIPs...)
	}
	spec.Pods.Pools, spec.Pods.Elsewhere = poolsOf(in.State, in.Host.Connected)
	var passed *aggregates
	if ranged {
		passed = in.newAggregates(holders, dests, own, in.Host.Connected, endpoints[""], spec.Pods.Elsewhere)
		for _, r := range passed.routes {
			spec.Targets = append(spec.Targets, r.prefix)
			spec.Link.Narrow = append(spec.Link.Narrow, dataplane.Narrow{Prefix: r.prefix, MTU: r.mtu})
			if r.pod {
				spec.Pods.Remote = append(spec.Pods.Remote, dataplane.Narrow{Prefix: r.prefix, MTU: r.mtu})
			}
		}
		for _, d := range passed.straight() {
			if passed.holders[d.of].mtu == 0 { // or it would have that of the route around it
				spec.Link.Narrow = append(spec.Link.Narrow, dataplane.Narrow{Prefix: d.prefix, MTU: spec.Link.MTU})
			}
		}
		spec.Pods.Remote = fewer(spec.Pods.Remote)
	}
	hops, unpassed := in.hops(own, addresses, passed)
	spec.Hops, refused = hops, append(refused, unpassed...)
	spec.Pods.Refused, spec.Pods.Forward = endpoints[""], in.Gateway || in.Reach.Passes() || in.Plain.Carrying
	spec.Plain = in.Plain.Carrying
	for _, e := range in.State.Egresses() {
		spec.Pods.Gateways = append(spec.Pods.Gateways, egressns.HostLink(numbers.Owner(), e.GetNamespace()+"/"+e.GetName()))
	}
	slices.Sort(spec.Pods.Gateways)
	spec.Pods.Exported = slices.SortedFunc(slices.Values(in.Exported), netip.Addr.Compare)
	slices.SortFunc(spec.Pods.Remote, func(a, b dataplane.Narrow) int { return a.Prefix.Compare(b.Prefix) })
	spec.Targets, spec.Inside = merge(spec.Targets), merge(spec.Inside)
	slices.SortFunc(spec.Link.Narrow, func(a, b dataplane.Narrow) int { return a.Prefix.Compare(b.Prefix) })
	return spec, refused
}

// narrower is a way's MTU where it is known and smaller than the link's, else 0.
func narrower(mtu, link int) int {
	if mtu < link {
		return max(mtu, 0)
	}
	return 0
}

// handshakeKeepalive is the keepalive until a session is there again, where none is asked for.
const handshakeKeepalive = 25 * time.Second

// key is the WireGuard key of a member's device.
func (in *Input) key(id identity.ID, n *skeinv1.Node) dataplane.Key {
	if r, ok := in.Rekeys[id]; ok && r.Switched {
		return r.To
	}
	return dataplane.Key(n.GetWireguardKey())
}

// enter puts a member among WireGuard's peers: under its device's key with its addresses, and while it changes that
// under the other one, too, so that packets of the session of before still arrive, and the next one can begin.
func (in *Input) enter(peers map[dataplane.Key]dataplane.Peer, id identity.ID, n *skeinv1.Node, peer dataplane.Peer) {
	key := in.key(id, n)
	peers[key] = peer
	r, ok := in.Rekeys[id]
	if !ok {
		return
	}
	other := r.To
	if r.Switched {
		other = dataplane.Key(n.GetWireguardKey())
	}
	peer.AllowedIPs, peer.Keepalive = nil, 0
	peers[other] = peer
}

// peer is what WireGuard has of a member, if it is a peer, beside its addresses.
func (in *Input) peer(id identity.ID, n *skeinv1.Node) (dataplane.Peer, error) {
	if len(n.GetWireguardKey()) != len(dataplane.Key{}) {
		return dataplane.Peer{}, fmt.Errorf("WireGuard key of %d bytes; want 32", len(n.GetWireguardKey()))
	}
	peer := dataplane.Peer{Endpoint: in.Endpoints[id].Addr}
	switch e := in.Endpoints[id]; {
	case !e.Addr.IsValid():
		peer.Keepalive = dataplane.KeepaliveAsItIs
	case in.WantHandshake[id]:
		peer.Keepalive = max(in.Host.Keepalive, handshakeKeepalive)
	case e.Proven:
		peer.Keepalive = in.Host.Keepalive
	case e.Relayed:
		peer.Keepalive = in.Host.AskedKeepalive
	}
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		if _, err := netip.ParseAddr(text); text != "" && err != nil {
			return dataplane.Peer{}, fmt.Errorf("overlay address %q: %w", text, err)
		}
	}
	if !in.Reach.Peer(id) {
		return peer, nil
	}
	psk, err := in.Keys.of(in.State.Cluster().GetPskSeed(), in.Self, id)
	if err != nil {
		return dataplane.Peer{}, err
	}
	peer.PresharedKey = psk
	return peer, nil
}

// Overlays are the cluster's address ranges.
func Overlays(c *skeinv1.Cluster) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range []string{c.GetOverlayIpv4(), c.GetOverlayIpv6()} {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

// overlayOf are a node's overlay addresses, as prefixes.
func overlayOf(n *skeinv1.Node) (out []netip.Prefix) {
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return out
}

func ownAddresses(n *skeinv1.Node, overlays []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		for _, o := range overlays {
			if o.Contains(a) {
				out = append(out, netip.PrefixFrom(a, o.Bits()))
			}
		}
	}
	return out
}

// merge sorts prefixes and drops those that another covers.
func merge(all []netip.Prefix) []netip.Prefix {
	slices.SortFunc(all, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	out := all[:0]
	for _, p := range all {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
	}
	return out
}

// Text prints a Spec for people, peers in the order of their keys. Secret keys are not shown.
func Text(s dataplane.Spec, name func(dataplane.Key) string) string {
	numbers := s.Numbers.Filled()
	var b bytes.Buffer
	fmt.Fprintf(&b, "link %s mtu %d", s.Link.Name, s.Link.MTU)
	for _, a := range s.Link.Addresses {
		fmt.Fprintf(&b, " %s", a)
	}
	fmt.Fprintf(&b, "\nwireguard port %d fwmark %#x\n", s.WireGuard.Port, s.WireGuard.Mark)
	keys := make([]dataplane.Key, 0, len(s.WireGuard.Peers))
	for k := range s.WireGuard.Peers {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(x, y dataplane.Key) int { return bytes.Compare(x[:], y[:]) })
	for _, k := range keys {
		p := s.WireGuard.Peers[k]
		endpoint := "as it is"
		if p.Endpoint.IsValid() {
			endpoint = p.Endpoint.String()
		}
		keepalive := "as it is"
		if p.Keepalive != dataplane.KeepaliveAsItIs {
			keepalive = p.Keepalive.String()
		}
		fmt.Fprintf(&b, "peer %s endpoint %s keepalive %s allowed", name(k), endpoint, keepalive)
		for _, a := range p.AllowedIPs {
			fmt.Fprintf(&b, " %s", a)
		}
		b.WriteByte('\n')
	}
	for _, r := range s.PortRewrites {
		fmt.Fprintf(&b, "port %s\n", r)
	}
	for _, t := range s.Targets {
		fmt.Fprintf(&b, "target %s\n", t)
	}
	for _, p := range s.Hops.Own {
		fmt.Fprintf(&b, "own source %s\n", p)
	}
	for _, r := range s.Hops.Routes {
		fmt.Fprintf(&b, "hop %s from %s via %s", r.Prefix, s.Hops.Self, r.Via)
		if r.Last {
			b.WriteString(" of others' packets")
		}
		b.WriteByte('\n')
	}
	for _, g := range s.Hops.Guards {
		fmt.Fprintf(&b, "hop to %s from %s allowed", s.Hops.Self, g.From)
		for _, p := range g.Sources {
			fmt.Fprintf(&b, " %s", p)
		}
		b.WriteByte('\n')
	}
	for _, t := range s.Translations {
		fmt.Fprintf(&b, "translation %s\n", t)
	}
	for _, p := range s.Inside {
		fmt.Fprintf(&b, "untranslated to %s\n", p)
	}
	if s.Plain {
		fmt.Fprintf(&b, "plain peers by %s\n", numbers.PlainLink)
	}
	for _, p := range s.Pods.Blocks {
		fmt.Fprintf(&b, "block %s tables %d (unreachable), %d\n", p, numbers.PodTable(), numbers.ExportTable())
	}
	for _, p := range s.Pods.Remote {
		fmt.Fprintf(&b, "block %s dev %s table %d", p.Prefix, s.Link.Name, numbers.PodTable())
		if p.MTU > 0 {
			fmt.Fprintf(&b, " mtu %d", p.MTU)
		}
		b.WriteByte('\n')
	}
	for _, p := range s.Pods.Refused {
		fmt.Fprintf(&b, "slot %s table %d (unreachable)\n", p, numbers.PodTable())
	}
	for _, p := range s.Pods.Pools {
		fmt.Fprintf(&b, "pool %s table %d (unreachable)\n", p, numbers.PodTable())
	}
	for _, p := range s.Pods.Elsewhere {
		fmt.Fprintf(&b, "pool's %s table %d (throw)\n", p, numbers.PodTable())
	}
	for _, a := range s.Pods.Exported {
		fmt.Fprintf(&b, "slot %s table %d\n", a, numbers.ExportTable())
	}
	for _, p := range s.Pods.Routes {
		fmt.Fprintf(&b, "pod %s dev %s table %d\n", p.Addr, p.Link, numbers.PodTable())
	}
	for _, n := range s.Link.Narrow {
		fmt.Fprintf(&b, "route %s dev %s mtu %d table %d\n", n.Prefix, s.Link.Name, n.MTU, numbers.RouteTable)
	}
	fmt.Fprintf(&b, "rule %d fwmark %#x/%#x table %d\nroute default dev %s table %d\n",
		numbers.RulePriority, numbers.MarkRoute, numbers.MarkMask, numbers.RouteTable, s.Link.Name, numbers.RouteTable)
	return b.String()
}
