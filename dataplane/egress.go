package dataplane

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"time"
)

// Numbers and names of egresses that are fixed by DESIGN.md section 11 and the seed.
const (
	FoUPort = 5555 // UDP, at both ends of each tunnel
	FoUTTL  = 225  // of the outer header
	// FoUOverhead4 and FoUOverhead6 are what a tunnel adds to a packet, in bytes: the outer header and UDP's.
	FoUOverhead4 = 20 + 8
	FoUOverhead6 = 40 + 8
	FoUAny4      = "fou4_any" // takes what comes from another address than the tunnel leads to
	FoUAny6      = "fou6_any"

	// In a client's network namespace:
	ClientLinkLocalRule = 1800 // link-local destinations: main
	ClientNarrowRule    = 1900 // everything: ClientNarrowTable
	ClientPrivateRule   = 2000 // to 2002, private destinations: main
	ClientWideRule      = 2100 // everything: ClientWideTable
	ClientNarrowTable   = 117  // an egress's private destinations
	ClientWideTable     = 118  // its other destinations

	// On a gateway's host:
	EgressRule  = 1999 // everything: EgressTable, before pods' addresses are looked for
	EgressTable = 115  // ways to the gateways' namespaces

	// In a gateway's network namespace:
	GatewayRule  = 2000 // iif eth0: GatewayTable
	GatewayTable = 118  // a route for each client
)

// The addresses of gateways' namespaces that only their host knows, one of each for an egress. The host gives what comes from
// there and leaves the mesh an address of its own.
var (
	EgressLocal4 = netip.MustParsePrefix("169.254.101.0/24")
	EgressLocal6 = netip.MustParsePrefix("fd73:6b65:696e:6567::/120")
)

// EgressLease is how long a gateway goes on without the leader when the egress says nothing else.
const EgressLease = 1200 * time.Millisecond

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
	Slot       int
}

// ClientSpec is all that skein wants, for egresses, of one network namespace that uses them.
type ClientSpec struct {
	Name         string     // of the client, for messages
	Addr4, Addr6 netip.Addr // its own; the tunnels' near end
	Uplink       string     // the link that the tunnels' packets leave by: eth0 in a pod
	MTU          int        // of Uplink, in bytes
	Tunnels      []ClientTunnel
	Routes       []ClientRoute
	// Ends are the endpoints of all slots of its egresses: tunnels' packets may come from these, and from no other
	// address but the tunnels' own far ends. They come by Uplink or by Links.
	Ends  []netip.Addr
	Links []string
	// Inside are the mesh's own networks, which no tunnel may take.
	Inside []netip.Prefix
	// Host is set for a host's own namespace: what WireGuard and the agent send, and answers from the host's own
	// addresses, keep their way.
	Host bool
}

// ClientTunnel is a tunnel to a slot's endpoint.
type ClientTunnel struct {
	Remote         netip.Addr
	SourcePortAuto bool
}

// ClientRoute leads a destination into a tunnel. Of two with the same destination the first counts.
type ClientRoute struct {
	Destination netip.Prefix
	Remote      netip.Addr // of a tunnel of the same family; none: refused
}
