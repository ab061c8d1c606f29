package dataplane

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Numbers and names that are fixed by DESIGN.md section 9, as they are on every host. Those that a host can set are in
// Numbers.
const (
	PlainPort = 51821 // UDP, at which they are answered
	Port      = 51820 // UDP
	MTU       = 1420  // bytes, on plain Ethernet

	ChainPrerouting = "skein_prerouting"
	ChainOutgoing   = "skein_outgoing"
	SetTargetsIPv4  = "skein_targets_ipv4"
	SetTargetsIPv6  = "skein_targets_ipv6"

	ChainClamp = "skein_clamp"

	ChainRewriteIn  = "skein_rewrite_in" // these four are there only while there is a PortRewrite
	ChainRewriteOut = "skein_rewrite_out"
	SetRewriteIn    = "skein_rewrite_ports"
	MapRewriteOut   = "skein_rewrite_peers"

	ChainTranslateIn  = "skein_translate_in" // these five are there only while there is a Translation
	ChainTranslateOut = "skein_translate_out"
	SetTunnels        = "skein_tunnels"
	SetInsideIPv4     = "skein_inside_ipv4"
	SetInsideIPv6     = "skein_inside_ipv6"

	ChainSources   = "skein_sources" // drops what comes in under another's name
	SetOverlayIPv4 = "skein_overlay_ipv4"
	SetOverlayIPv6 = "skein_overlay_ipv6"
	SetPoolsIPv4   = "skein_pools_ipv4"
	SetPoolsIPv6   = "skein_pools_ipv6"
	SetGateways    = "skein_gateways" // links that lead to gateways' namespaces
	PodLinkPrefix  = "sk"             // of the host's ends of pods' links; 12 digits follow

	PodGateway = "169.254.1.1" // IPv4 next hop of every pod: its own link's end on the host

	HopOverhead = 20 // bytes of the outer header that a packet of Hops has in the tunnel

	RouteProtocol = 30
)

// Key is a WireGuard key: X25519 public, X25519 private or preshared.
type Key [32]byte

// Spec is all that skein wants of this host's kernel.
type Spec struct {
	// Numbers are the names and numbers that this agent holds in the kernel; the zero value: the default ones.
	Numbers   Numbers
	WireGuard WireGuard
	Link      Link
	// Targets are the destinations that go through the tunnel: every peer's AllowedIPs and the prefixes of Hops.Routes,
	// merged and sorted.
	Targets []netip.Prefix
	// Hops leads to those whose packets other nodes pass on.
	Hops Hops
	// PortRewrites lead the packets of some peers through another UDP port than WireGuard's.
	PortRewrites []PortRewrite
	Pods         Pods
	// Translations are networks behind this host that other sites know under other addresses, sorted by Prefix and
	// disjoint. Packets that come by the tunnel for As go to Prefix, and packets from Prefix leave by it from As, but for
	// those from and to Inside.
	Translations []Translation
	// Inside are the addresses of the own site's other nodes, which know Prefix as it is. Sorted and disjoint.
	Inside []netip.Prefix
	// Plain is set while this host carries plain peers: what comes by PlainLink was checked by WireGuard there.
	Plain bool
	// ControlPort is the control net's, TCP and UDP: only nodes send to it. 0: there is none.
	ControlPort int
	// Complete is false until every source (state, records, configuration) has spoken once;
	// nothing is removed from the kernel before.
	Complete bool
}

// Translation gives each address of a network one elsewhere, with the same host part.
type Translation struct{ Prefix, As netip.Prefix } // of one family and length

// String is the translation as a user reads it.
func (t Translation) String() string { return t.Prefix.String() + " as " + t.As.String() }

// Hops leads packets to nodes that are not peers of this host, by way of peers that pass them on. Such a packet travels
// inside another one, from node to node (IP in IP, RFC 2003 and RFC 4213), in the tunnel: so a peer's AllowedIPs do not
// change when another one passes on (docs/decisions/0054). The zero value: no hops.
type Hops struct {
	// Self is the overlay IPv4 address of this host: the outer source of what it sends, the outer destination of what it
	// accepts. Invalid: there are no hops, and Routes and Guards mean nothing.
	Self netip.Addr
	// Own are the sources that peers take from this host as they are, since their AllowedIPs for it have them: its overlay
	// addresses, blocks and node addresses. Sorted and disjoint.
	Own []netip.Prefix
	// Routes say which peer passes on what is for a destination, and to which it goes inside another packet at the end;
	// the longest prefix wins. Sorted by Prefix, without two that are the same. The link leads there as well (Targets).
	// Where others pass on, it does with an MTU that leaves HopOverhead (Link.Narrow and Pods.Remote).
	Routes []HopRoute
	// Guards say who may bring packets for others or for this host, sorted by From, one for each. What none of them
	// allows is dropped and counted. A host that passes packets on for others has Pods.Forward set.
	Guards []HopGuard
}

// HopRoute leads to a destination by way of a peer.
type HopRoute struct {
	Prefix netip.Prefix
	Via    netip.Addr // overlay IPv4 address of the next node, a WireGuard peer of this host
	// Last says that Prefix is Via's own. What this host passes on to it goes inside another packet, since Via's
	// WireGuard takes no others' sources from this host. What comes from Own goes as it is, also where a wider route by
	// another node lies around it. A host that passes on has such a route to each peer for which it does.
	Last bool
}

// HopGuard lets a node bring packets of others.
type HopGuard struct {
	From    netip.Addr     // overlay IPv4 address of the node, a WireGuard peer of this host
	Sources []netip.Prefix // that those packets may come from; sorted and disjoint
}

// Compare orders routes by Prefix, then by Via.
func (r HopRoute) Compare(o HopRoute) int {
	return cmp.Or(r.Prefix.Compare(o.Prefix), r.Via.Compare(o.Via))
}

// Compare orders guards by From.
func (g HopGuard) Compare(o HopGuard) int { return g.From.Compare(o.From) }

// Pods is what leads to the pods of this host.
type Pods struct {
	// Blocks are the pieces of address pools that are this host's, sorted. They are routes of ExportTable, and
	// unreachable in PodTable as far as no pod has them, so that nothing for them circles between hosts.
	Blocks []netip.Prefix
	// Remote are other hosts' blocks, which the tunnel leads to, sorted. They are routes of PodTable, so that what this
	// host itself sends there finds a way before it is marked, and leaves with an address of the tunnel: the mark comes
	// too late to change the source, and without a default route of the family nothing is sent that could be marked.
	Remote []Narrow
	// Routes lead to the single pods, sorted by address. One whose link is not there is left out.
	Routes []PodRoute
	// Refused are addresses of the mesh that lead nowhere for now: unreachable in PodTable, so that nothing for them
	// leaves the host by another way.
	Refused []netip.Prefix
	// Pools are the subnets of all address pools: unreachable in PodTable behind everything else there, so that nothing
	// for an address that no node has, or that this one has not heard of, leaves the host in plaintext. Sorted.
	Pools []netip.Prefix
	// Elsewhere are the parts of Pools that are not the mesh's to lead: what is reserved for other software, networks
	// on this host's own links, addresses that egresses' packets leave with. PodTable passes them on (throw), sorted.
	Elsewhere []netip.Prefix
	// Exported are single addresses that lead here beside the blocks: routes of ExportTable.
	Exported []netip.Addr
	// Gateways are the host's ends of links to gateways' namespaces, sorted: what comes by them is checked there.
	Gateways []string
	// Forward is set when the tunnel's packets are forwarded for other reasons than pods: a gateway of an egress, a
	// node that passes on what Hops bring.
	Forward bool
}

// Has6 tells whether there are pods with IPv6.
func (p Pods) Has6() bool {
	return slices.ContainsFunc(p.Blocks, func(b netip.Prefix) bool { return b.Addr().Is6() }) ||
		slices.ContainsFunc(p.Routes, func(r PodRoute) bool { return r.Addr.Is6() })
}

// PodRoute is the way to one address of a pod.
type PodRoute struct {
	Addr netip.Addr
	Link string // the pod's link, on the host
}

// PortRewrite makes what WireGuard's port sends to Remote leave from the port Local, and hands what comes from
// Remote to Local to WireGuard's port. Birthday probing finds NAT mappings that belong to other ports; this is how
// WireGuard gets to use one. There is one for a Remote, and only IPv4 has them.
type PortRewrite struct {
	Local  uint16
	Remote netip.AddrPort
}

// Compare orders rewrites by Remote, then by Local.
func (r PortRewrite) Compare(o PortRewrite) int {
	return cmp.Or(r.Remote.Compare(o.Remote), cmp.Compare(r.Local, o.Local))
}

// String is the rewrite as a user reads it.
func (r PortRewrite) String() string { return fmt.Sprintf("%s via port %d", r.Remote, r.Local) }

// Link is the tunnel interface.
type Link struct {
	Name string
	MTU  int
	// Addresses carry the overlay's prefix length, so that the kernel picks them as source address
	// for every overlay destination.
	Addresses []netip.Prefix
	// Narrow are destinations whose way carries smaller packets only, sorted.
	Narrow []Narrow
}

// Narrow is a destination of the tunnel for which the link's MTU is too large; in Pods, where there are others as well,
// MTU is 0 for those.
type Narrow struct {
	Prefix netip.Prefix
	MTU    int // bytes
}

// WireGuard is the device's configuration.
type WireGuard struct {
	PrivateKey Key
	Port       int
	Mark       uint32
	Peers      map[Key]Peer // by public key
}

// KeepaliveAsItIs leaves a peer's keepalive as the device has it.
const KeepaliveAsItIs = -time.Second

// Peer is one WireGuard peer.
type Peer struct {
	PresharedKey Key
	Endpoint     netip.AddrPort // invalid: leave what the kernel has
	Keepalive    time.Duration  // 0: none; KeepaliveAsItIs leaves it
	AllowedIPs   []netip.Prefix // sorted
}

// PeerStatus is what the device knows of a peer.
type PeerStatus struct {
	PublicKey     Key
	Endpoint      netip.AddrPort
	LastHandshake time.Time // zero: never
	RxBytes       uint64
	TxBytes       uint64
}

// Report tells what one Apply did.
type Report struct {
	Writes map[string]int   // subsystem -> messages sent to the kernel
	Errors map[string]error // subsystem -> first error; the other subsystems went on
	Notes  []string         // what this host cannot do or what the Spec got wrong, without being an error
}
