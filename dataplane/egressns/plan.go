package egressns

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// newPlan checks a Spec, and notes its impossible parts.
func newPlan(s dataplane.GatewaySpec) (p plan, notes []string) {
	say := func(format string, args ...any) {
		notes = append(notes, "egress "+s.Egress+": "+fmt.Sprintf(format, args...))
	}
	p = plan{local4: s.Local4, local6: s.Local6, mtu: s.MTU, auto: s.SourcePortAuto, ports: s.Ports, to: s.Destinations,
		inside: s.Inside, complete: s.Complete}
	ends := map[netip.Addr]bool{}
	sources := map[netip.Addr]bool{}
	bySlot := map[int]dataplane.GatewaySlot{}
slots:
	for _, sl := range s.Slots {
		if sl.Number < 0 || sl.Number > maxSlot {
			say("slot %d is left out: want 0 to %d", sl.Number, maxSlot)
			continue
		}
		if _, twice := bySlot[sl.Number]; twice {
			say("slot %d is named twice: the first counts", sl.Number)
			continue
		}
		for _, e := range []*netip.Addr{&sl.Endpoint4, &sl.Endpoint6} {
			if e.IsValid() && ends[*e] {
				say("endpoint %s of slot %d is another slot's too: left out", e, sl.Number)
				*e = netip.Addr{}
			}
			ends[*e] = true
		}
		if !sl.Source4.IsValid() {
			sl.Source4 = s.Local4
		}
		if !sl.Source6.IsValid() {
			sl.Source6 = s.Local6
		}
		for _, a := range []netip.Addr{sl.Source4, sl.Source6} {
			if a.IsValid() && a != s.Local4 && a != s.Local6 {
				if sources[a] {
					say("slot %d is left out: its address %s is another slot's too", sl.Number, a)
					continue slots
				}
				sources[a] = true
			}
		}
		bySlot[sl.Number] = sl
		p.slots = append(p.slots, sl)
	}
	seen := map[netip.Addr]int{}
	for _, c := range s.Clients {
		sl, ok := bySlot[c.Slot]
		if !ok {
			say("client %s is left out: there is no slot %d", or(c.IPv4, c.IPv6), c.Slot)
			continue
		}
		for _, w := range []struct{ addr, end, source netip.Addr }{{c.IPv4, sl.Endpoint4, sl.Source4},
			{c.IPv6, sl.Endpoint6, sl.Source6}} {
			if !w.addr.IsValid() {
				continue
			}
			slot, twice := seen[w.addr]
			switch {
			case twice && slot != c.Slot:
				say("client %s is named for slots %d and %d: the first counts", w.addr, slot, c.Slot)
			case twice:
			case ends[w.addr]:
				say("client %s is left out: it is an endpoint of this egress", w.addr)
			case !w.end.IsValid() || !w.source.IsValid():
				say("client %s is left out: slot %d has no endpoint, or no source address, of its family", w.addr, c.Slot)
			default:
				seen[w.addr] = c.Slot
				p.clients = append(p.clients, client{addr: w.addr, slot: c.Slot, end: w.end})
				p.clients = append(p.clients, others(w.addr, c, bySlot)...)
			}
		}
	}
	p.sort()
	return p, notes
}

// others lists a client's address at its other slots with flows.
func others(a netip.Addr, c dataplane.GatewayClient, bySlot map[int]dataplane.GatewaySlot) (out []client) {
	for _, n := range slices.Compact(slices.Sorted(slices.Values(c.Also))) {
		s, ok := bySlot[n]
		end := dataplane.Pick(a, s.Endpoint4, s.Endpoint6)
		if ok && n != c.Slot && n <= maxAlso && end.IsValid() && dataplane.Pick(a, s.Source4, s.Source6).IsValid() {
			out = append(out, client{addr: a, slot: n, end: end, also: true})
		}
	}
	return out
}

func (p *plan) sort() {
	slices.SortFunc(p.slots, func(a, b dataplane.GatewaySlot) int { return cmp.Compare(a.Number, b.Number) })
	slices.SortFunc(p.clients, func(a, b client) int {
		return cmp.Or(a.addr.Compare(b.addr), dataplane.Bit(a.also)-dataplane.Bit(b.also), cmp.Compare(a.slot, b.slot))
	})
}

func or(a, b netip.Addr) netip.Addr {
	if a.IsValid() {
		return a
	}
	return b
}

// keep adds to an incomplete plan the slots and clients that an earlier run left in the kernel and the Spec does not
// name yet.
func (p plan) keep(have nftable.State) plan {
	if p.complete || !have.There {
		return p
	}
	p.slots, p.clients = slices.Clone(p.slots), slices.Clone(p.clients)
	kept := map[int]*dataplane.GatewaySlot{}
	named, known := map[int]bool{}, map[netip.Addr]bool{}
	for _, s := range p.slots {
		named[s.Number] = true
		kept[s.Number] = &s
	}
	for _, c := range p.clients {
		known[c.addr] = true
	}
	at := func(n int) *dataplane.GatewaySlot {
		if kept[n] == nil {
			kept[n] = &dataplane.GatewaySlot{Number: n}
		}
		return kept[n]
	}
	for _, m := range []string{MapEndpoint4, MapEndpoint6} {
		for k, v := range have.Sets[m].Elements {
			a, ok := netip.AddrFromSlice([]byte(k))
			n, ok2 := toSlot(v)
			if ok && ok2 && !named[n] {
				*dataplane.Pick(a, &at(n).Endpoint4, &at(n).Endpoint6) = a
			}
		}
	}
	for _, m := range []string{MapSource4, MapSource6} {
		for k, v := range have.Sets[m].Elements {
			n, ok := toSlot(k)
			a, ok2 := netip.AddrFromSlice([]byte(v))
			if ok && ok2 && !named[n] {
				*dataplane.Pick(a, &at(n).Source4, &at(n).Source6) = a
			}
		}
	}
	for n, s := range kept {
		if !named[n] {
			p.slots = append(p.slots, *s)
		}
	}
	for _, m := range []string{MapSlot4, MapSlot6} {
		for k, v := range have.Sets[m].Elements {
			a, ok := netip.AddrFromSlice([]byte(k))
			n, ok2 := toSlot(v)
			if !ok || !ok2 || known[a] || kept[n] == nil || isProbe(a) {
				continue
			}
			s := kept[n]
			if end := dataplane.Pick(a, s.Endpoint4, s.Endpoint6); end.IsValid() {
				p.clients = append(p.clients, client{addr: a, slot: n, end: end})
			}
		}
	}
	p.sort()
	return p
}

// isProbe reports whether an address is one of the health probe's.
func isProbe(a netip.Addr) bool {
	return netip.PrefixFrom(probe4, 24).Contains(a) || netip.PrefixFrom(probe6, 64).Contains(a)
}

// addresses are eth0's addresses, in order. They include the slots' sources, so that the host finds these by ARP and
// NDP; packets to them that are not answers are dropped.
func (p plan) addresses() []netip.Addr {
	var out []netip.Addr
	add := func(as ...netip.Addr) {
		for _, a := range as {
			if a.IsValid() && !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	add(p.local4, p.local6)
	for _, s := range p.slots {
		add(s.Endpoint4, s.Endpoint6, s.Source4, s.Source6)
	}
	return out
}

// tunnels are the tunnels of the plan.
func (p plan) tunnels() fou.Spec {
	out := fou.Spec{Gateway: true, Ports: p.ports}
	for _, s := range p.slots {
		out.IPv4 = out.IPv4 || s.Endpoint4.IsValid()
		out.IPv6 = out.IPv6 || s.Endpoint6.IsValid()
	}
	for _, c := range p.clients {
		overhead := dataplane.Pick(c.addr, dataplane.FoUOverhead4, dataplane.FoUOverhead6)
		out.Tunnels = append(out.Tunnels, fou.Tunnel{Local: c.end, Remote: c.addr, SourcePortAuto: p.auto,
			MTU: p.mtu - overhead})
	}
	return out
}
