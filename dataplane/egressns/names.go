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
	Uplink = "eth0"   // link to the host
	Probe  = "probe0" // device of the health probe, if there is one

	tableName = "skein" // no other program uses this namespace

	// SetTickets has the running tickets, each with its own timeout.
	SetTickets = "skein_tickets"
	// MapGranted maps a slot to its ticket.
	MapGranted = "skein_granted"
	// MapSlot4 and MapSlot6 map a client's address to the slot of its new flows.
	MapSlot4, MapSlot6 = "skein_slot4", "skein_slot6"
	// MapSource4 and MapSource6 map a slot to the source address of its clients' packets.
	MapSource4, MapSource6 = "skein_source4", "skein_source6"
	// MapAddress4 and MapAddress6 map an address that only one slot uses to that slot.
	MapAddress4, MapAddress6 = "skein_address4", "skein_address6"
	// MapEndpoint4 and MapEndpoint6 map a local tunnel endpoint to its slot.
	MapEndpoint4, MapEndpoint6 = "skein_endpoint4", "skein_endpoint6"
	// MapWay4 and MapWay6 map a tunnel's device and a client's address to the slot. Only these addresses may come out
	// of the device.
	MapWay4, MapWay6 = "skein_way4", "skein_way6"
	// SetTo4 and SetTo6 are the allowed destinations, SetInside4 and SetInside6 the forbidden ones.
	SetTo4, SetTo6         = "skein_to4", "skein_to6"
	SetInside4, SetInside6 = "skein_inside4", "skein_inside6"
	// SetPorts are the ports of tunnels.
	SetPorts = "skein_ports"
	// SetHeld are slots on hold.
	SetHeld = "skein_held"
	// SetSent and SetReceived count packets by slot.
	SetSent, SetReceived = "skein_sent", "skein_received"
)

// Counters of dropped packets.
const (
	countStrangers   = "skein_strangers"
	countInvalid     = "skein_invalid"
	countLease       = "skein_lease"
	countDestination = "skein_destination"
	countNested      = "skein_nested"
)

var dropCounters = []string{countStrangers, countInvalid, countLease, countDestination, countNested}

// The health probe's sources: one for each slot, and one for a gateway without. A slot's is number slot+1 of the
// network.
var (
	probe4 = netip.MustParseAddr("169.254.102.0")
	probe6 = netip.MustParseAddr("fd73:6b65:696e:6568::")
)

const (
	probeNobody   = 250             // last byte of the source of a gateway without a slot
	maxProbed     = probeNobody - 2 // the last slot with its own probe source
	maxSlot       = 65534
	nobody        = maxSlot + 1 // the slot of probes by a gateway without a slot; never granted
	maxAlso       = 63          // the last slot for additional flows of a client: each has a table of its own number
	markSlots     = 0x10000     // added to a slot's number for its mark, since unmarked packets have 0
	maxLeaseHours = 24
)

// HostLink is the name of the host's end of an egress's link; owner is dataplane.Numbers.Owner.
func HostLink(owner, egress string) string {
	return podnet.HostLink(podnet.Key{ContainerID: "egress" + owner + "/" + egress, Interface: Uplink})
}

// ProbeSource is the source address of health probes through a slot, which are treated like a client's packets; slot
// -1 is for a gateway without a slot. Invalid if the slot's number is too high.
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
