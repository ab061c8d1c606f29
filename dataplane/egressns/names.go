package egressns

import (
	"encoding/binary"
	"net/netip"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// HoldQueue is the NFQUEUE in the namespace that takes the packets of slots on hold.
const HoldQueue uint16 = 5116

// Names in the namespace.
const (
	Uplink = "eth0"   // leads to the host
	Probe  = "probe0" // the health probe's device, where there is one

	tableName = "skein" // in a namespace of its own: nobody else has one

	// SetTickets are the tickets that live, each with its own time to run out.
	SetTickets = "skein_tickets"
	// MapGranted is slot to ticket.
	MapGranted = "skein_granted"
	// MapSlot4 and MapSlot6 are a client's address to the slot that its new flows take.
	MapSlot4, MapSlot6 = "skein_slot4", "skein_slot6"
	// MapSource4 and MapSource6 are a slot to the address that its clients' packets leave with.
	MapSource4, MapSource6 = "skein_source4", "skein_source6"
	// MapAddress4 and MapAddress6 are an address that is a slot's alone to the slot.
	MapAddress4, MapAddress6 = "skein_address4", "skein_address6"
	// MapEndpoint4 and MapEndpoint6 are a tunnel endpoint of ours to its slot.
	MapEndpoint4, MapEndpoint6 = "skein_endpoint4", "skein_endpoint6"
	// MapWay4 and MapWay6 are a tunnel's device and a client's address, the only ones that may come out of it, to the
	// slot.
	MapWay4, MapWay6 = "skein_way4", "skein_way6"
	// SetTo4 and SetTo6 are where packets may go, SetInside4 and SetInside6 where they may not.
	SetTo4, SetTo6         = "skein_to4", "skein_to6"
	SetInside4, SetInside6 = "skein_inside4", "skein_inside6"
	// SetPorts are the ports of tunnels.
	SetPorts = "skein_ports"
	// SetHeld are slots on hold.
	SetHeld = "skein_held"
	// SetSent and SetReceived count by slot.
	SetSent, SetReceived = "skein_sent", "skein_received"
)

// Counters of what is dropped.
const (
	countStrangers   = "skein_strangers"
	countInvalid     = "skein_invalid"
	countLease       = "skein_lease"
	countDestination = "skein_destination"
	countNested      = "skein_nested"
)

var dropCounters = []string{countStrangers, countInvalid, countLease, countDestination, countNested}

// The health probe's sources: one for each slot, and one for a gateway without. A slot's are the network's with slot+1.
var (
	probe4 = netip.MustParseAddr("169.254.102.0")
	probe6 = netip.MustParseAddr("fd73:6b65:696e:6568::")
)

const (
	probeNobody   = 250             // last byte of the source of a gateway without a slot
	maxProbed     = probeNobody - 2 // the last slot with a probe of its own
	maxSlot       = 65534
	nobody        = maxSlot + 1 // the slot that probes without one have: it is never granted
	maxAlso       = 63          // the last slot that a client may have flows by besides its own: tables have numbers
	markSlots     = 0x10000     // a slot's mark is its number and this, since packets without a mark have 0
	maxLeaseHours = 24
)

// HostLink is the name of the host's end of the link to an egress's namespace; owner is dataplane.Numbers.Owner.
func HostLink(owner, egress string) string {
	return podnet.HostLink(podnet.Key{ContainerID: "egress" + owner + "/" + egress, Interface: Uplink})
}

// ProbeSource is the address that a health probe through a slot is sent from, as its client would; slot -1 is for a
// gateway that owns none. It is invalid where a slot's number is too high for a probe.
func ProbeSource(slot int, ipv6 bool) netip.Addr {
	last := byte(probeNobody)
	switch {
	case slot > maxProbed || slot < -1:
		return netip.Addr{}
	case slot >= 0:
		last = byte(slot + 1)
	}
	if ipv6 {
		b := probe6.As16()
		b[15] = last
		return netip.AddrFrom16(b)
	}
	b := probe4.As4()
	b[3] = last
	return netip.AddrFrom4(b)
}

// Mark is the mark that a slot's packets carry in HoldQueue.
func Mark(slot int) uint32 { return binary.NativeEndian.Uint32([]byte(slotKey(slot))) }
