package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

const reg = 1 // the register our rules work in

// markRules mark packets for the tunnel.
func markRules(n dataplane.Numbers) []nftable.Rule {
	mark := func(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }
	toTunnel := func(l3 string, proto byte, offset, length uint32, set string) nftable.Rule {
		text := fmt.Sprintf("%s daddr @%s meta mark set meta mark & %#08x | %#08x accept", l3, set,
			^n.MarkMask|n.MarkRoute, n.MarkRoute)
		return nftable.Rule{Text: text, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
			&expr.Lookup{SourceRegister: reg, SetName: set},
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mark(^n.MarkMask), Xor: mark(n.MarkRoute)},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg},
			accept,
		}}
	}
	return []nftable.Rule{
		{Text: fmt.Sprintf("meta mark & %#08x == %#08x accept", n.MarkMask, n.MarkWG),
			Exprs: append(marked(n, n.MarkWG), accept)},
		toTunnel("ip", unix.NFPROTO_IPV4, 16, 4, dataplane.SetTargetsIPv4),
		toTunnel("ip6", unix.NFPROTO_IPV6, 24, 16, dataplane.SetTargetsIPv6),
	}
}

// marked matches packets with a mark.
func marked(n dataplane.Numbers, is uint32) []expr.Any {
	mark := func(v uint32) []byte { return binaryutil.NativeEndian.PutUint32(v) }
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mark(n.MarkMask), Xor: mark(0)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: mark(is)},
	}
}

// clampRule makes both ends of a TCP connection through the tunnel send segments that fit the route's MTU: what
// forwards, or has asked another route first, does not know it. The kernel never raises the option (nft_exthdr).
func clampRule(n dataplane.Numbers) nftable.Rule {
	const flags, synRst, syn, maxseg, size = 13, 0x06, 0x02, 2, 2
	text := fmt.Sprintf("meta mark & %#08x == %#08x tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu",
		n.MarkMask, n.MarkRoute)
	return nftable.Rule{Text: text, Exprs: append(marked(n, n.MarkRoute),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
		load(transport, flags, 1, reg),
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{synRst}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{syn}},
		&expr.Rt{Register: reg, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: reg, DestRegister: reg, Op: expr.ByteorderHton, Len: size, Size: size},
		&expr.Exthdr{SourceRegister: reg, Type: maxseg, Offset: 2, Len: size, Op: expr.ExthdrOpTcpopt})}
}

// Registers for a key of several parts: the first three 32-bit ones, as the kernel names them.
const (
	part1 = reg
	part2 = unix.NFT_REG32_01
	part3 = unix.NFT_REG32_02
	reg2  = unix.NFT_REG_2
)

// Offsets in the IPv4 and UDP headers.
const (
	ipSource, ipDestination           = 12, 16
	udpSource, udpDestination, udpSum = 0, 2, 6
	header, transport                 = expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
)

func load(base expr.PayloadBase, offset, length, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

// setPort writes a port of the UDP header, and the checksum with it.
func setPort(offset, from uint32) expr.Any {
	return &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: from, Base: transport, Offset: offset, Len: 2,
		CsumType: expr.CsumTypeInet, CsumOffset: udpSum}
}

func isUDP4() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.NFPROTO_IPV4}},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_UDP}},
	}
}

// rewriteIn hands what comes from a peer to its port over to WireGuard's.
func rewriteIn(port int) nftable.Rule {
	text := fmt.Sprintf("ip saddr . udp sport . udp dport @%s udp dport set %d", dataplane.SetRewriteIn, port)
	return nftable.Rule{Text: text, Exprs: append(isUDP4(),
		load(header, ipSource, 4, part1), load(transport, udpSource, 2, part2), load(transport, udpDestination, 2, part3),
		&expr.Lookup{SourceRegister: reg, SetName: dataplane.SetRewriteIn},
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
		setPort(udpDestination, reg))}
}

// rewriteOut lets what WireGuard's port sends to a peer leave by the peer's port.
func rewriteOut(port int) nftable.Rule {
	text := fmt.Sprintf("udp sport %d udp sport set ip daddr . udp dport map @%s", port, dataplane.MapRewriteOut)
	return nftable.Rule{Text: text, Exprs: append(isUDP4(),
		load(transport, udpSource, 2, reg),
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
		load(header, ipDestination, 4, part1), load(transport, udpDestination, 2, part2),
		&expr.Lookup{SourceRegister: reg, DestRegister: reg2, IsDestRegSet: true, SetName: dataplane.MapRewriteOut},
		setPort(udpSource, reg2))}
}

// rewriteSets are the two sets that hold the port rewrites.
func rewriteSets(rs []dataplane.PortRewrite) []nftable.Set {
	port := func(b []byte, p uint16) []byte { return append(binary.BigEndian.AppendUint16(b, p), 0, 0) } // a word each
	in := nftable.Set{Name: dataplane.SetRewriteIn, Concat: true, Exact: true, Text: rewriteText,
		Key:      nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService, nftables.TypeInetService),
		Elements: map[string]string{}}
	out := nftable.Set{Name: dataplane.MapRewriteOut, Concat: true, Exact: true, Text: rewriteText,
		Key: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService), Val: nftables.TypeInetService,
		Elements: map[string]string{}}
	for _, r := range rs {
		peer := port(r.Remote.Addr().AsSlice(), r.Remote.Port())
		out.Elements[string(peer)] = string(binary.BigEndian.AppendUint16(nil, r.Local))
		in.Elements[string(port(peer, r.Local))] = ""
	}
	return []nftable.Set{in, out}
}

// rewriteOf reads an element of one of the two.
func rewriteOf(key, val string) (r dataplane.PortRewrite, ok bool) {
	if len(key) == 12 {
		val = key[8:]
	}
	if len(key) < 8 || len(val) < 2 {
		return r, false
	}
	k := []byte(key)
	return dataplane.PortRewrite{Local: binary.BigEndian.Uint16([]byte(val)),
		Remote: netip.AddrPortFrom(netip.AddrFrom4([4]byte(k[:4])), binary.BigEndian.Uint16(k[4:]))}, true
}

func rewriteText(key, val string) string {
	r, _ := rewriteOf(key, val)
	return r.String()
}

// rewritesIn are those that the kernel has, sorted.
func rewritesIn(s nftable.State) (out []dataplane.PortRewrite) {
	for k, v := range s.Sets[dataplane.MapRewriteOut].Elements {
		if r, ok := rewriteOf(k, v); ok {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, dataplane.PortRewrite.Compare)
	return out
}
