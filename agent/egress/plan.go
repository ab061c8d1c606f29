package egress

import (
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
)

// maxEgresses is how many egresses one node can be a gateway of: each uses one address of
// dataplane.Numbers.EgressLocal4 and one of EgressLocal6.
const maxEgresses = 250

// Locals are the host-internal addresses of the namespace with this number, from 1.
func Locals(n dataplane.Numbers, number int) (four, six netip.Addr) {
	n = n.Filled()
	b4, b6 := n.EgressLocal4.Addr().As4(), n.EgressLocal6.Addr().As16()
	b4[3], b6[15] = byte(number), byte(number)
	return netip.AddrFrom4(b4), netip.AddrFrom16(b6)
}

// never are destinations that no egress may have.
var never = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"),
	netip.MustParsePrefix("::/128"), netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

// GatewayInput is all input for a gateway's namespace.
type GatewayInput struct {
	Numbers dataplane.Numbers // the host's; the zero value: the defaults
	Egress  *skeinv1.Egress
	Number  int // of the namespace on this host, from 1
	MTU     int // of the mesh's link, in bytes
	Ports   dataplane.FoUPorts
	Clients []Client
	// Mesh are the overlay and all pools, which no egress leads to.
	Mesh     []netip.Prefix
	Complete bool
}

// PlanGateway derives the Spec of a gateway's namespace. All nodes derive the same, except for the local addresses.
func PlanGateway(in GatewayInput) dataplane.GatewaySpec {
	e := in.Egress
	s := dataplane.GatewaySpec{
		Egress: RefOf(e).String(), MTU: in.MTU, SourcePortAuto: e.GetFouSourcePortAuto(),
		Ports: in.Ports, Complete: in.Complete,
	}
	s.Local4, s.Local6 = Locals(in.Numbers, in.Number)
	for i, p := range e.GetEndpoints() {
		slot := dataplane.GatewaySlot{Number: i, Endpoint4: address(p.GetIpv4()), Endpoint6: address(p.GetIpv6())}
		if i < len(e.GetAddresses()) {
			slot.Source4, slot.Source6 = address(e.GetAddresses()[i].GetIpv4()), address(e.GetAddresses()[i].GetIpv6())
		}
		s.Slots = append(s.Slots, slot)
	}
	for _, c := range in.Clients {
		if c.Slot >= len(s.Slots) {
			continue // the client's host has not yet learned that there are fewer slots
		}
		slot := s.Slots[c.Slot]
		client := dataplane.GatewayClient{IPv4: c.IPv4, IPv6: c.IPv6, Slot: c.Slot}
		for _, n := range c.Also {
			if n < len(s.Slots) {
				client.Also = append(client.Also, n)
			}
		}
		if !slot.Endpoint4.IsValid() {
			client.IPv4 = netip.Addr{}
		}
		if !slot.Endpoint6.IsValid() {
			client.IPv6 = netip.Addr{}
		}
		if client.IPv4.IsValid() || client.IPv6.IsValid() {
			s.Clients = append(s.Clients, client)
		}
	}
	slices.SortFunc(s.Clients, func(a, b dataplane.GatewayClient) int {
		if c := a.IPv4.Compare(b.IPv4); c != 0 {
			return c
		}
		return a.IPv6.Compare(b.IPv6)
	})
	s.Destinations = merged(prefixes(e.GetDestinations()))
	s.Inside = merged(slices.Concat(in.Mesh, never))
	return s
}

// address parses an address; invalid text gives the zero Addr.
func address(text string) netip.Addr {
	a, _ := netip.ParseAddr(text)
	return a
}

func prefixes(texts []string) (out []netip.Prefix) {
	for _, t := range texts {
		if p, err := netip.ParsePrefix(t); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// merged sorts prefixes and drops those covered by another.
func merged(all []netip.Prefix) []netip.Prefix {
	all = slices.Clone(all)
	slices.SortFunc(all, netip.Prefix.Compare)
	out := all[:0]
	for _, p := range all {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue
		}
		out = append(out, p)
	}
	return out
}
