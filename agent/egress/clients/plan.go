package clients

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// The states of a client's egress in reports.
const (
	Ready   = "ready"   // packets pass
	Waiting = "waiting" // for an owner, or for the owner to know the client
	Unknown = "unknown" // no such egress; used once it is defined
	Refused = "refused" // impossible until the configuration changes
)

// Agreed is the part of the agreed state that clients need.
type Agreed struct {
	Egresses map[Ref]AgreedEgress
	Names    map[identity.ID]string // of the slots' owners
	// Inside are the overlay and the pools, sorted.
	Inside []netip.Prefix
	Ports  dataplane.FoUPorts // of tunnels
}

// AgreedEgress is one egress.
type AgreedEgress struct {
	Destinations   []netip.Prefix
	SourcePortAuto bool
	Slots          []egress.SlotState // by number
	Draining       uint32             // number of the highest slots, which take no new flows
	SpreadFlows    bool               // new flows may take any slot
	Gateways       []identity.ID
}

// replicas is the number of slots that take new flows.
func (e AgreedEgress) replicas() uint32 {
	return uint32(len(e.Slots)) - min(e.Draining, uint32(len(e.Slots)))
}

// AgreedOf extracts Agreed from the state.
func AgreedOf(s *events.State, ports dataplane.FoUPorts) *Agreed {
	a := &Agreed{Egresses: map[Ref]AgreedEgress{}, Names: map[identity.ID]string{}, Ports: ports,
		Inside: slices.Concat(projection.Overlays(s.Cluster()), projection.Pools(s), projection.PodCIDRs(s),
			projection.PlainNetworks(s))}
	slices.SortFunc(a.Inside, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
	})
	a.Inside = slices.Compact(a.Inside)
	all := s.Egresses()
	if len(all) == 0 {
		return a
	}
	nodes := s.Nodes()
	for _, e := range all {
		one := AgreedEgress{SourcePortAuto: e.GetFouSourcePortAuto(), Draining: e.GetDraining(),
			SpreadFlows: e.GetSpread() == events.SpreadFlow}
		for _, text := range e.GetDestinations() {
			if p, err := netip.ParsePrefix(text); err == nil {
				one.Destinations = append(one.Destinations, p.Masked())
			}
		}
		for _, agreed := range s.Slots(e.GetNamespace(), e.GetName()) {
			slot := egress.StateOf(e, agreed)
			if !slot.Node.IsZero() {
				a.Names[slot.Node] = s.Node(slot.Node).GetName()
			}
			one.Slots = append(one.Slots, slot)
		}
		for _, n := range nodes {
			id, err := identity.ParseID(n.GetId())
			if err == nil && (events.Eligible(e, n) || slices.ContainsFunc(one.Slots, func(s egress.SlotState) bool {
				return s.Node == id
			})) {
				one.Gateways = append(one.Gateways, id) // a draining gateway continues until its slots have moved
			}
		}
		a.Egresses[egress.RefOf(e)] = one
	}
	return a
}

// Client is a network namespace that uses egresses.
type Client struct {
	Key        string     // namespace/pod, or its address; determines its slots
	NetNS      string     // path; empty: the host's own
	IPv4, IPv6 netip.Addr // one of the two may be invalid
	Uplink     string
	MTU        int   // of the uplink, in bytes; 0: the kernel's
	Wanted     []Ref // in order of precedence
	Host       bool
	Owner      string           // dataplane.Numbers.Owner, of a host
	Flows      map[Ref][]uint32 // slots of possible flows besides its own slot
}

// Choice is the result for one egress of a client.
type Choice struct {
	Ref
	Slot      uint32      // of new flows
	Also      []uint32    // other slots of possible flows, in order
	Led       bool        // routes lead there
	Owner     identity.ID // of Slot; zero: none
	OwnerName string
	State     string // Ready means here only that there is an owner, which may not know the client yet
	Reason    string
}

// Plan derives the spec of a client's namespace, and the result for each egress that it wants. Argument agreed is nil
// while the agreed state is unknown.
func Plan(c Client, agreed *Agreed) (dataplane.ClientSpec, []Choice) {
	spec := dataplane.ClientSpec{Name: c.Key, Addr4: c.IPv4, Addr6: c.IPv6, Uplink: c.Uplink, MTU: c.MTU, Host: c.Host}
	if agreed != nil {
		spec.Inside, spec.Ports = agreed.Inside, agreed.Ports
	}
	var out []Choice
	var refused []dataplane.ClientRoute
	for _, ref := range c.Wanted {
		out = append(out, choose(c, ref, agreed, &spec, &refused))
	}
	spec.Routes = append(spec.Routes, refused...) // after the routes that work, which so take precedence
	spec.Flows = flowsOf(c, out, agreed)
	return spec, out
}

// choose adds one egress to the spec, and to refused the destinations that it has no tunnel for.
func choose(c Client, ref Ref, agreed *Agreed, spec *dataplane.ClientSpec, refused *[]dataplane.ClientRoute) Choice {
	out := Choice{Ref: ref, State: Waiting, Reason: "the agreed state is not known yet"}
	if agreed == nil {
		return out
	}
	e, ok := agreed.Egresses[ref]
	if !ok {
		out.State, out.Reason = Unknown, fmt.Sprintf("there is no egress %s: it is taken up when it is defined", ref)
		return out
	}
	out.Slot = events.SlotFor(c.Key, e.replicas())
	if int(out.Slot) >= len(e.Slots) {
		out.Reason = fmt.Sprintf("egress %s has no slots", ref)
		return out
	}
	for _, any := range e.Slots { // a client that changes its slot still receives from the former one
		for _, a := range []netip.Addr{any.IPv4, any.IPv6} {
			if a.IsValid() && !slices.Contains(spec.Ends, a) {
				spec.Ends = append(spec.Ends, a)
			}
		}
	}
	if c.Host { // this host may be the gateway itself
		spec.Links = append(spec.Links, egressns.HostLink(c.Owner, ref.String()))
	}
	slot := e.Slots[out.Slot]
	out.Owner, out.OwnerName = slot.Node, agreed.Names[slot.Node]
	routes, none, without := routesTo(c, e, out.Slot)
	spec.Routes = append(spec.Routes, routes...)
	*refused = append(*refused, none...)
	out.Led = len(routes) > 0
	if out.Led {
		slots := c.Flows[ref]
		for n := uint32(0); e.SpreadFlows && n < e.replicas(); n++ {
			slots = append(slices.Clip(slots), n)
		}
		out.Also = usable(slots, out.Slot, e)
	}
	for _, n := range append([]uint32{out.Slot}, out.Also...) {
		to, _, _ := routesTo(c, e, n)
		for _, r := range to {
			t := dataplane.ClientTunnel{Remote: r.Remote, SourcePortAuto: e.SourcePortAuto, Slot: int(n)}
			if n == out.Slot && e.SpreadFlows {
				t.Spread = choices(out, e)
			}
			if !slices.ContainsFunc(spec.Tunnels, t.Equal) {
				spec.Tunnels = append(spec.Tunnels, t)
			}
		}
	}
	switch {
	case !out.Led:
		out.State, out.Reason = Refused, fmt.Sprintf("egress %s has no destination of a family that this client (%s) and "+
			"the egress's tunnels both have", ref, addresses(c))
	case out.Owner.IsZero():
		out.State, out.Reason = Waiting, fmt.Sprintf("slot %d of egress %s has no owner now: see `skein egress show %s`",
			out.Slot, ref, ref)
	default:
		out.State, out.Reason = Ready, ""
	}
	if out.Led && without != "" {
		out.Reason = join(out.Reason, fmt.Sprintf("egress %s has no tunnels for %s: its %s destinations are refused", ref,
			without, without))
	}
	return out
}

// choices are the slots of new flows when they are spread: all that have an owner and do not drain.
func choices(ch Choice, e AgreedEgress) (out []int) {
	for n := range e.replicas() {
		if n == ch.Slot && !ch.Owner.IsZero() || slices.Contains(ch.Also, n) {
			out = append(out, int(n))
		}
	}
	return out
}

// routesTo returns the routes to a slot of an egress, and the destinations to refuse because the slot has no tunnel
// of that family: without a refusal they would bypass the egress.
func routesTo(c Client, e AgreedEgress, n uint32) (routes, refused []dataplane.ClientRoute, without string) {
	slot := e.Slots[n]
	for _, dst := range e.Destinations {
		own, remote, family := c.IPv4, slot.IPv4, "IPv4"
		if dst.Addr().Is6() {
			own, remote, family = c.IPv6, slot.IPv6, "IPv6"
		}
		switch {
		case !own.IsValid(): // the client sends nothing of this family
		case !remote.IsValid():
			without = family
			refused = append(refused, dataplane.ClientRoute{Destination: dst})
		default:
			routes = append(routes, dataplane.ClientRoute{Destination: dst, Remote: remote})
		}
	}
	return routes, refused, without
}

// usable selects the slots by which flows may continue: those with an owner. Flows of other slots use the client's
// own.
func usable(slots []uint32, own uint32, e AgreedEgress) (out []uint32) {
	for _, n := range slots {
		if n != own && int(n) < min(len(e.Slots), dataplane.ClientFlowSlots) && !e.Slots[n].Node.IsZero() {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// flowsOf returns the routes of flows that began by another slot than the client's present one.
func flowsOf(c Client, choices []Choice, agreed *Agreed) (out []dataplane.ClientFlows) {
	var slots []uint32
	for _, ch := range choices {
		slots = append(slots, ch.Also...)
	}
	slices.Sort(slots)
	for _, n := range slices.Compact(slots) {
		one := dataplane.ClientFlows{Slot: int(n)}
		var refused []dataplane.ClientRoute
		for _, ch := range choices {
			e := agreed.Egresses[ch.Ref]
			by := ch.Slot
			if slices.Contains(ch.Also, n) {
				by = n
			}
			if int(by) < len(e.Slots) {
				routes, none, _ := routesTo(c, e, by)
				one.Routes, refused = append(one.Routes, routes...), append(refused, none...)
			}
		}
		one.Routes = append(one.Routes, refused...)
		out = append(out, one)
	}
	return out
}

// KeepFlows returns the slots by which a client may have flows, by egress, without its present slot: the earlier
// ones, and the one that was its own until now.
func KeepFlows(have map[Ref][]uint32, former []Choice, c Client, agreed *Agreed) map[Ref][]uint32 {
	out := map[Ref][]uint32{}
	for _, ref := range c.Wanted {
		e, ok := agreed.Egresses[ref]
		if !ok || len(e.Slots) == 0 {
			continue
		}
		slots := slices.Clone(have[ref])
		for _, ch := range former {
			if ch.Ref == ref && ch.Led {
				slots = append(slots, ch.Slot)
			}
		}
		own := events.SlotFor(c.Key, e.replicas())
		slots = slices.DeleteFunc(slots, func(n uint32) bool { return n == own || int(n) >= len(e.Slots) })
		slices.Sort(slots)
		if slots = slices.Compact(slots); len(slots) > 0 {
			out[ref] = slots
		}
	}
	return out
}

func join(a, b string) string {
	if a == "" || b == "" {
		return a + b
	}
	return a + "; " + b
}

func addresses(c Client) string {
	text := ""
	for _, a := range []netip.Addr{c.IPv4, c.IPv6} {
		if a.IsValid() {
			text = join(text, a.String())
		}
	}
	if text == "" {
		return "no address"
	}
	return text
}

// entry is a client as sent to gateways.
func entry(c Client, ch Choice) *skeinv1.EgressClient {
	e := &skeinv1.EgressClient{Key: c.Key, Slot: ch.Slot, Also: ch.Also}
	if c.IPv4.IsValid() {
		e.Ipv4 = c.IPv4.String()
	}
	if c.IPv6.IsValid() {
		e.Ipv6 = c.IPv6.String()
	}
	return e
}

// Lists are the lists sent to gateways: the clients of each egress, by key; of two with the same key the later
// counts. Undefined egresses are left out.
func Lists(clients []Client, agreed *Agreed) map[Ref][]*skeinv1.EgressClient {
	out := map[Ref][]*skeinv1.EgressClient{}
	for _, c := range clients {
		_, choices := Plan(c, agreed)
		for _, ch := range choices {
			if ch.State == Unknown || ch.State == Refused || agreed == nil {
				continue
			}
			out[ch.Ref] = slices.DeleteFunc(out[ch.Ref], func(e *skeinv1.EgressClient) bool { return e.GetKey() == c.Key })
			out[ch.Ref] = append(out[ch.Ref], entry(c, ch))
		}
	}
	for _, list := range out {
		slices.SortFunc(list, func(a, b *skeinv1.EgressClient) int { return cmp.Compare(a.GetKey(), b.GetKey()) })
	}
	return out
}
