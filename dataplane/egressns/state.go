package egressns

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

var (
	typeTunnel4 = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	typeTunnel6 = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIP6Addr)
	mark        = nftables.TypeMark
)

// layout is the table without elements, for a kernel with this form of holding. From an Exact set, unplanned elements
// are removed even before the plan is complete; plan.keep has included those of an earlier run.
func layout(h hold.Form) nftable.Table {
	t := nftable.Table{Name: tableName, Counters: dropCounters, Sets: sets()}
	for _, c := range chains(h) {
		t.Chains = append(t.Chains, c.declared())
	}
	return t
}

// sets are all sets and maps.
func sets() []nftable.Set {
	return []nftable.Set{
		{Name: SetTickets, Key: mark, Timeout: true, External: true},
		{Name: MapGranted, Key: mark, Val: mark, External: true},
		{Name: SetHeld, Key: mark, External: true},
		{Name: MapSlot4, Key: nftables.TypeIPAddr, Val: mark},
		{Name: MapSlot6, Key: nftables.TypeIP6Addr, Val: mark},
		{Name: MapSource4, Key: mark, Val: nftables.TypeIPAddr},
		{Name: MapSource6, Key: mark, Val: nftables.TypeIP6Addr},
		{Name: MapEndpoint4, Key: nftables.TypeIPAddr, Val: mark},
		{Name: MapEndpoint6, Key: nftables.TypeIP6Addr, Val: mark},
		{Name: MapAddress4, Key: nftables.TypeIPAddr, Val: mark, Exact: true},
		{Name: MapAddress6, Key: nftables.TypeIP6Addr, Val: mark, Exact: true},
		{Name: MapWay4, Key: typeTunnel4, Val: mark, Concat: true},
		{Name: MapWay6, Key: typeTunnel6, Val: mark, Concat: true},
		{Name: SetTo4, Key: nftables.TypeIPAddr, Interval: true},
		{Name: SetTo6, Key: nftables.TypeIP6Addr, Interval: true},
		{Name: SetInside4, Key: nftables.TypeIPAddr, Interval: true},
		{Name: SetInside6, Key: nftables.TypeIP6Addr, Interval: true},
		{Name: SetPorts, Key: nftables.TypeInetService},
		{Name: SetSent, Key: mark, Counter: true},
		{Name: SetReceived, Key: mark, Counter: true},
	}
}

// setOf is a set in the form of the nftables library.
func setOf(name string) *nftables.Set {
	return nftable.Table{Name: tableName, Sets: sets()}.Kernel(name)
}

// number encodes a mark as a key or value.
func number(n uint32) string { return string(binary.NativeEndian.AppendUint32(nil, n)) }

func toNumber(b string) (uint32, bool) {
	if len(b) != 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32([]byte(b)), true
}

// slotKey encodes a slot as a key or value.
func slotKey(slot int) string { return number(markSlots | uint32(slot)) }

func toSlot(b string) (int, bool) {
	n, ok := toNumber(b)
	return int(n &^ markSlots), ok && n >= markSlots && n <= markSlots|maxSlot
}

func bytesOf(a netip.Addr) string { return string(a.AsSlice()) }

// tunnelKey encodes a device and the source that may come out of it.
func tunnelKey(link string, a netip.Addr) string { return string(nftable.LinkName(link)) + bytesOf(a) }

// want is the table for a checked plan. Argument link names the device of a tunnel.
func want(p plan, link func(local, remote netip.Addr) string, h hold.Form) nftable.Table {
	t := layout(h)
	put := t.Put
	for _, sl := range p.slots {
		n := slotKey(sl.Number)
		put(SetSent, n, "")
		put(SetReceived, n, "")
		for _, e := range []netip.Addr{sl.Endpoint4, sl.Endpoint6} {
			if e.IsValid() {
				put(dataplane.Pick(e, MapEndpoint4, MapEndpoint6), bytesOf(e), n)
			}
		}
		for _, a := range []netip.Addr{sl.Source4, sl.Source6} {
			if a.IsValid() {
				put(dataplane.Pick(a, MapSource4, MapSource6), n, bytesOf(a))
				if a != p.local4 && a != p.local6 {
					put(dataplane.Pick(a, MapAddress4, MapAddress6), bytesOf(a), n)
				}
			}
		}
		for _, six := range []bool{false, true} {
			if a := ProbeSource(sl.Number, six); a.IsValid() {
				put(dataplane.Pick(a, MapSlot4, MapSlot6), bytesOf(a), n)
				put(dataplane.Pick(a, MapWay4, MapWay6), tunnelKey(Probe, a), n)
			}
		}
	}
	for _, port := range p.ports.Taken() {
		put(SetPorts, string(binary.BigEndian.AppendUint16(nil, port)), "")
	}
	for _, l := range []netip.Addr{p.local4, p.local6} {
		if !l.IsValid() {
			continue
		}
		put(dataplane.Pick(l, MapSource4, MapSource6), slotKey(nobody), bytesOf(l))
		put(dataplane.Pick(l, MapSlot4, MapSlot6), bytesOf(ProbeSource(-1, l.Is6())), slotKey(nobody))
	}
	for _, c := range p.clients {
		if !c.also {
			put(dataplane.Pick(c.addr, MapSlot4, MapSlot6), bytesOf(c.addr), slotKey(c.slot))
		}
		put(dataplane.Pick(c.addr, MapWay4, MapWay6), tunnelKey(link(c.end, c.addr), c.addr), slotKey(c.slot))
	}
	for _, d := range []struct {
		prefixes  []netip.Prefix
		four, six string
	}{{p.to, SetTo4, SetTo6}, {p.inside, SetInside4, SetInside6}} {
		t.Set(d.four).Ranges, t.Set(d.six).Ranges = nftable.Ranges(d.prefixes)
	}
	return t
}

// with replaces the table's destinations, or with all every element, by the kernel's.
func with(t nftable.Table, have nftable.State, all bool) nftable.Table {
	for i := range t.Sets {
		s := &t.Sets[i]
		if old, there := have.Sets[s.Name]; there && !s.External && (all || s.Interval) && s.Kind() == old.Kind {
			s.Elements, s.Ranges = old.Elements, old.Ranges
		}
	}
	return t
}

// plan is a checked Spec. If it is not complete, keep has added what the kernel has besides.
type plan struct {
	local4, local6 netip.Addr
	mtu            int
	auto           bool
	ports          dataplane.FoUPorts
	slots          []dataplane.GatewaySlot // sources filled in
	clients        []client                // by address; all but the first of an address have also set
	to, inside     []netip.Prefix
	complete       bool
}

// client is one address of a client.
type client struct {
	addr netip.Addr
	slot int
	end  netip.Addr // local end of its tunnel
	also bool       // it has flows by this slot, but new flows take another
}

// table is the table of the route to the client.
func (c client) table() int {
	if c.also {
		return dataplane.GatewaySlotTable + c.slot
	}
	return dataplane.GatewayTable
}
