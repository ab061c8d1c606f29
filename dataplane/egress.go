package dataplane

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"slices"
)

// Numbers and names of egresses that are fixed by DESIGN.md section 11 and the seed.
const (
	FoUPort = 5555 // UDP, at both ends of each tunnel, where the cluster has agreed on no other
	FoUTTL  = 225  // of the outer header
	// FoUOverhead4 and FoUOverhead6 are what a tunnel adds to a packet, in bytes: the outer header and UDP's.
	FoUOverhead4 = 20 + 8
	FoUOverhead6 = 40 + 8
	FoUAny4      = "fou4_any" // takes what comes from another address than the tunnel leads to
	FoUAny6      = "fou6_any"

	// In a client's network namespace, where it is not a host's own; there Numbers move them:
	ClientLinkLocalRule = 1800 // link-local destinations: main
	ClientNarrowRule    = 1900 // everything: ClientNarrowTable
	ClientPrivateRule   = 2000 // to 2002, private destinations: main
	ClientWideRule      = 2100 // everything: ClientWideTable
	ClientNarrowTable   = 117  // an egress's private destinations
	ClientWideTable     = 118  // its other destinations
	// Flows that began by another slot than new ones take go on by it:
	ClientFlowNarrowRule  = 1899  // the slot's flow mark: its narrow table
	ClientFlowWideRule    = 2099  // the slot's flow mark: its wide table
	ClientFlowNarrowTable = 11700 // and the slot's number: ClientNarrowTable as that slot's flows have it
	ClientFlowWideTable   = 11800 // and the slot's number: ClientWideTable as that slot's flows have it
	ClientFlowSlots       = 63    // slots that there are such tables for
	// bits of marks that Calico, Cilium, kube-proxy, portmap, Tailscale and the AWS CNI leave free
	FlowMask = 0x101f

	// In a gateway's network namespace:
	GatewayRule      = 2000 // iif eth0: GatewayTable
	GatewayTable     = 118  // a route for each client, by its slot
	GatewaySlotRule  = 1999 // iif eth0, the mark of a slot: the slot's table
	GatewaySlotTable = 120  // and the slot's number: clients that belong to another slot, and have flows by this one
)

// A flow mark has the low bits of the slot's number and one in the low bits of FlowMask, and the rest in its high ones.
const (
	flowLow     = 0x1f
	flowLowBits = 5
	flowHighAt  = 12
)

// FlowMark is the slot of a flow under FlowMask, as a client's connection table and its packets have it; 0 is none.
func FlowMark(slot int) uint32 {
	n := uint32(slot + 1)
	return n&flowLow | n>>flowLowBits<<flowHighAt
}

// FlowSlot is the slot of a mark, and whether it has one.
func FlowSlot(mark uint32) (slot int, ok bool) {
	n := int(mark&flowLow | mark&FlowMask>>flowHighAt<<flowLowBits)
	return n - 1, n > 0
}

// FoULink is the name of the tunnel device that leads to remote.
func FoULink(remote netip.Addr) string {
	remote = remote.Unmap()
	if remote.Is4() {
		b := remote.As4()
		return "fou4_" + hex.EncodeToString(b[:])
	}
	b := remote.As16()
	sum := sha256.Sum256(b[:])
	return "fou6_" + hex.EncodeToString(sum[:4])
}

// GatewaySpec is all that skein wants of the network namespace of one egress on a gateway node.
type GatewaySpec struct {
	Egress string // namespace/name, for messages
	// Local4 and Local6 are the namespace's own addresses, which only this host knows.
	Local4, Local6 netip.Addr
	MTU            int // of eth0, in bytes
	SourcePortAuto bool
	Ports          FoUPorts      // of the tunnels
	Slots          []GatewaySlot // by number
	Clients        []GatewayClient
	// Destinations are where packets may go, sorted and merged; Inside are those where they may not: the mesh itself.
	Destinations, Inside []netip.Prefix
	// Complete is false until every source of clients has spoken once; nothing is removed before.
	Complete bool
}

// GatewaySlot is one slot as a gateway prepares it, whether it owns it or not.
type GatewaySlot struct {
	Number               int
	Endpoint4, Endpoint6 netip.Addr // of the tunnels; one of the two may be invalid
	Source4, Source6     netip.Addr // what its clients' packets leave with; invalid: Local4, Local6
}

// GatewayClient is a client as a gateway sees it: the tunnel's other end, and the inner source.
type GatewayClient struct {
	IPv4, IPv6 netip.Addr // one of the two may be invalid
	Slot       int        // that its new flows take
	Also       []int      // other slots that it has flows by
}

// ClientSpec is all that skein wants, for egresses, of one network namespace that uses them.
type ClientSpec struct {
	Name         string     // of the client, for messages
	Addr4, Addr6 netip.Addr // its own; the tunnels' near end
	Uplink       string     // the link that the tunnels' packets leave by: eth0 in a pod
	MTU          int        // of Uplink, in bytes
	Tunnels      []ClientTunnel
	Ports        FoUPorts // of the tunnels
	Routes       []ClientRoute
	// Flows are slots that flows go by which began when the client's slot was another.
	Flows []ClientFlows
	// Ends are the endpoints of all slots of its egresses: tunnels' packets may come from these, and from no other
	// address but the tunnels' own far ends. They come by Uplink or by Links.
	Ends  []netip.Addr
	Links []string
	// Inside are the mesh's own networks, which no tunnel may take.
	Inside []netip.Prefix
	// Numbers are the agent's, of a host's own namespace; the zero value: the default ones.
	Numbers Numbers
	// Host is set for a host's own namespace: what WireGuard and the agent send, and answers from the host's own
	// addresses, keep their way.
	Host bool
}

// ClientTunnel is a tunnel to a slot's endpoint.
type ClientTunnel struct {
	Remote         netip.Addr
	SourcePortAuto bool
	Slot           int // of its egress
	// Spread are the slots, in order, of which each new flow that would go by this tunnel takes one by chance; none: it
	// goes by this tunnel.
	Spread []int
}

// Equal compares tunnels.
func (t ClientTunnel) Equal(o ClientTunnel) bool {
	return t.Remote == o.Remote && t.SourcePortAuto == o.SourcePortAuto && t.Slot == o.Slot &&
		slices.Equal(t.Spread, o.Spread)
}

// ClientFlows are the routes of flows that began by a slot: all those of the client, to that slot where the egress has
// flows by it.
type ClientFlows struct {
	Slot   int // below ClientFlowSlots
	Routes []ClientRoute
}

// ClientRoute leads a destination into a tunnel. Of two with the same destination the first counts.
type ClientRoute struct {
	Destination netip.Prefix
	Remote      netip.Addr // of a tunnel of the same family; none: refused
}
