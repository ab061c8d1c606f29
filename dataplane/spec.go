package dataplane

import (
	"net/netip"
	"time"
)

// Numbers and names that are fixed by DESIGN.md section 9.
const (
	LinkName  = "skein0"
	Port      = 51820 // UDP
	MTU       = 1420  // bytes, on plain Ethernet
	MarkWG    = 0x20  // fwmark of packets that WireGuard and the agent send outside the tunnel
	MarkRoute = 0x40  // fwmark of packets that shall enter the tunnel
	MarkMask  = 0x60

	NftTable        = "skein" // family inet
	ChainPrerouting = "skein_prerouting"
	ChainOutgoing   = "skein_outgoing"
	SetTargetsIPv4  = "skein_targets_ipv4"
	SetTargetsIPv6  = "skein_targets_ipv6"

	RulePriority  = 32500
	RouteTable    = 180
	RouteProtocol = 30
)

// Key is a WireGuard key: X25519 public, X25519 private or preshared.
type Key [32]byte

// Spec is all that skein wants of this host's kernel.
type Spec struct {
	WireGuard WireGuard
	Link      Link
	// Targets are the destinations that go through the tunnel: every peer's AllowedIPs, merged and sorted.
	Targets []netip.Prefix
	// Complete is false until every source (state, records, configuration) has spoken once;
	// nothing is removed from the kernel before.
	Complete bool
}

// Link is the tunnel interface.
type Link struct {
	Name string
	MTU  int
	// Addresses carry the overlay's prefix length, so that the kernel picks them as source address
	// for every overlay destination.
	Addresses []netip.Prefix
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
