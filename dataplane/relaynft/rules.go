package relaynft

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// Names in the table.
const (
	mapFlows4, mapFlows6     = "flows_ipv4", "flows_ipv6"     // source . destination at the relay -> the other end
	mapSources4, mapSources6 = "sources_ipv4", "sources_ipv6" // source . the other end -> the relay's address for that end

	chainIn   = "skein_relay_in"
	chainMark = "skein_relay_mark"
	chainOut  = "skein_relay_out"
)

// Registers of four bytes each. A key takes up to ten, from the first on; what a map gives starts there, too.
const firstReg = 8 // NFT_REG32_00

// Priorities: before everybody else's translations at the same hook, since ours take exact flows only; and before the
// chain of the tunnel (0), with addresses already translated.
const (
	prioIn   = -101
	prioMark = -50
	prioOut  = 99
)

// layout is the table.
func layout(n dataplane.Numbers) nftable.Table {
	chain := func(name string, typ nftables.ChainType, hook *nftables.ChainHook, prio int32,
		rules ...[]expr.Any) nftable.Chain {
		c := nftable.Chain{Name: name, Type: typ, Hook: hook, Priority: prio}
		for _, exprs := range rules {
			c.Rules = append(c.Rules, nftable.Rule{Exprs: exprs})
		}
		return c
	}
	return nftable.Table{Name: n.RelayNftTable, Sets: maps(), Chains: []nftable.Chain{
		chain(chainIn, nftables.ChainTypeNAT, nftables.ChainHookPrerouting, prioIn,
			translate(nftable.IPv4, expr.NATTypeDestNAT, mapFlows4), translate(nftable.IPv6, expr.NATTypeDestNAT, mapFlows6)),
		chain(chainMark, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, prioMark,
			mark(n, nftable.IPv4, mapSources4), mark(n, nftable.IPv6, mapSources6)),
		chain(chainOut, nftables.ChainTypeNAT, nftables.ChainHookPostrouting, prioOut,
			append(translated(), translate(nftable.IPv4, expr.NATTypeSourceNAT, mapSources4)...),
			append(translated(), translate(nftable.IPv6, expr.NATTypeSourceNAT, mapSources6)...)),
	}}
}

// maps are our maps. Their elements come and go with sessions.
func maps() (out []nftable.Set) {
	for _, name := range []string{mapFlows4, mapFlows6, mapSources4, mapSources6} {
		ip := nftable.IPv4.Addr
		if name == mapFlows6 || name == mapSources6 {
			ip = nftable.IPv6.Addr
		}
		out = append(out, nftable.Set{Name: name, Timeout: true, External: true,
			Key: nftables.MustConcatSetType(ip, nftables.TypeInetService, ip, nftables.TypeInetService),
			Val: nftables.MustConcatSetType(ip, nftables.TypeInetService)})
	}
	return out
}

func (t *Table) named(name string) *nftables.Set {
	return nftable.Table{Name: t.numbers.RelayNftTable, Sets: maps()}.Kernel(name)
}

// key loads source and destination of a UDP packet of one family.
func key(f nftable.IP) []expr.Any {
	const header, transport = expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
	words := f.Len / 4
	return slices.Concat(f.Only(), nftable.L4(unix.IPPROTO_UDP), []expr.Any{
		nftable.Load(header, f.Src, f.Len, firstReg), nftable.Load(transport, 0, 2, firstReg+words),
		nftable.Load(header, f.Dst, f.Len, firstReg+words+1), nftable.Load(transport, 2, 2, firstReg+2*words+1)})
}

func lookup(m string) expr.Any {
	return &expr.Lookup{SourceRegister: firstReg, DestRegister: firstReg, IsDestRegSet: true, SetName: m}
}

// translate is: dnat (or snat) to source . destination map @m.
func translate(f nftable.IP, kind expr.NATType, m string) []expr.Any {
	return append(key(f), lookup(m), &expr.NAT{Type: kind, Family: uint32(f.Proto), RegAddrMin: firstReg,
		RegProtoMin: firstReg + f.Len/4, Specified: true})
}

// translated is: ct status dnat.
func translated() []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeySTATUS, Register: nftable.Reg},
		nftable.Masked(nftable.Native(conntrack.DstNAT), nil), nftable.Differ(make([]byte, 4)...)}
}

// mark gives relayed packets the mark by which the tunnel's own chain lets them pass: else a client at an address that
// goes through the tunnel would have its tunnel led into ours.
func mark(n dataplane.Numbers, f nftable.IP, m string) []expr.Any {
	return slices.Concat(translated(), key(f), []expr.Any{
		// The result is not needed; but kernels before 6.14 or so look up in a map only for one.
		lookup(m), nftable.Meta(expr.MetaKeyMARK), nftable.Masked(nftable.Native(^n.MarkMask), nftable.Native(n.MarkWG)),
		nftable.SetMark()})
}

type elementsOf struct {
	set      string
	elements []nftables.SetElement
}

// elements are a mapping's: both directions in both maps of its family.
func elements(m Mapping) []elementsOf {
	in, out := mapFlows4, mapSources4
	if m.ARemote.Addr().Is6() {
		in, out = mapFlows6, mapSources6
	}
	one := func(f flow, to netip.AddrPort) nftables.SetElement {
		return nftables.SetElement{Key: f.key(), Val: end(nil, to), Timeout: lifetime}
	}
	return []elementsOf{
		{in, []nftables.SetElement{one(flow{m.ARemote, m.ALocal}, m.BRemote), one(flow{m.BRemote, m.BLocal}, m.ARemote)}},
		{out, []nftables.SetElement{one(flow{m.ARemote, m.BRemote}, m.BLocal), one(flow{m.BRemote, m.ARemote}, m.ALocal)}},
	}
}

// key is a flow as the maps have it: every field padded to four bytes.
func (f flow) key() []byte { return end(end(nil, f.from), f.to) }

func end(b []byte, a netip.AddrPort) []byte {
	b = append(b, a.Addr().AsSlice()...)
	return append(binary.BigEndian.AppendUint16(b, a.Port()), 0, 0)
}

func decodeEnd(b []byte) (netip.AddrPort, bool) {
	if len(b) != 8 && len(b) != 20 {
		return netip.AddrPort{}, false
	}
	n := len(b) - 4
	a, _ := netip.AddrFromSlice(b[:n])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[n:])), true
}

func decodeFlow(b []byte) (flow, bool) {
	from, ok := decodeEnd(b[:len(b)/2])
	to, ok2 := decodeEnd(b[len(b)/2:])
	return flow{from, to}, ok && ok2
}
