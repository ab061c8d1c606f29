package relaynft

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
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

type chain struct {
	*nftables.Chain
	rules [][]expr.Any
}

func chains(t *nftables.Table, n dataplane.Numbers) []chain {
	accept := nftables.ChainPolicyAccept
	base := func(name string, typ nftables.ChainType, hook *nftables.ChainHook,
		prio nftables.ChainPriority) *nftables.Chain {
		return &nftables.Chain{Table: t, Name: name, Type: typ, Hooknum: hook, Priority: &prio, Policy: &accept}
	}
	return []chain{
		{base(chainIn, nftables.ChainTypeNAT, nftables.ChainHookPrerouting, prioIn), [][]expr.Any{
			translate(false, expr.NATTypeDestNAT, mapFlows4), translate(true, expr.NATTypeDestNAT, mapFlows6),
		}},
		{base(chainMark, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, prioMark), [][]expr.Any{
			mark(n, false, mapSources4), mark(n, true, mapSources6),
		}},
		{base(chainOut, nftables.ChainTypeNAT, nftables.ChainHookPostrouting, prioOut), [][]expr.Any{
			append(translated(), translate(false, expr.NATTypeSourceNAT, mapSources4)...),
			append(translated(), translate(true, expr.NATTypeSourceNAT, mapSources6)...),
		}},
	}
}

// key loads source and destination of a UDP packet of one family.
func key(ipv6 bool) []expr.Any {
	proto, source, dest, n := byte(unix.NFPROTO_IPV4), uint32(12), uint32(16), uint32(4)
	if ipv6 {
		proto, source, dest, n = unix.NFPROTO_IPV6, 8, 24, 16
	}
	words := n / 4
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: firstReg, Base: expr.PayloadBaseNetworkHeader, Offset: source, Len: n},
		&expr.Payload{DestRegister: firstReg + words, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2},
		&expr.Payload{DestRegister: firstReg + words + 1, Base: expr.PayloadBaseNetworkHeader, Offset: dest, Len: n},
		&expr.Payload{DestRegister: firstReg + 2*words + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}
}

// translate is: dnat (or snat) to source . destination map @m.
func translate(ipv6 bool, kind expr.NATType, m string) []expr.Any {
	family, port := uint32(unix.NFPROTO_IPV4), uint32(firstReg+1)
	if ipv6 {
		family, port = unix.NFPROTO_IPV6, firstReg+4
	}
	return append(key(ipv6),
		&expr.Lookup{SourceRegister: firstReg, DestRegister: firstReg, IsDestRegSet: true, SetName: m},
		&expr.NAT{Type: kind, Family: family, RegAddrMin: firstReg, RegProtoMin: port, Specified: true},
	)
}

// translated is: ct status dnat.
func translated() []expr.Any {
	const dnat = 1 << 5 // IPS_DST_NAT
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(dnat),
			Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// mark gives relayed packets the mark by which the tunnel's own chain lets them pass: else a client at an address that
// goes through the tunnel would have its tunnel led into ours.
func mark(n dataplane.Numbers, ipv6 bool, m string) []expr.Any {
	native := binaryutil.NativeEndian.PutUint32
	rule := append(translated(), key(ipv6)...)
	return append(rule,
		// The result is not needed; but kernels before 6.14 or so look up in a map only for one.
		&expr.Lookup{SourceRegister: firstReg, DestRegister: firstReg, IsDestRegSet: true, SetName: m},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(^n.MarkMask), Xor: native(n.MarkWG)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	)
}

// maps are our maps, with IDs that are ours within a transaction.
func (t *Table) maps() []*nftables.Set {
	return []*nftables.Set{t.named(mapFlows4), t.named(mapFlows6), t.named(mapSources4), t.named(mapSources6)}
}

func (t *Table) named(name string) *nftables.Set {
	ip, id := nftables.TypeIPAddr, uint32(1)
	switch name {
	case mapFlows6:
		ip, id = nftables.TypeIP6Addr, 2
	case mapSources4:
		id = 3
	case mapSources6:
		ip, id = nftables.TypeIP6Addr, 4
	}
	// Four types and two are always few enough for the library.
	k, _ := nftables.ConcatSetType(ip, nftables.TypeInetService, ip, nftables.TypeInetService)
	v, _ := nftables.ConcatSetType(ip, nftables.TypeInetService)
	return &nftables.Set{Table: t.table, Name: name, ID: id, KeyType: k, DataType: v, IsMap: true, HasTimeout: true}
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
