package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// markRules mark packets for the tunnel.
func markRules(n dataplane.Numbers) []nftable.Rule {
	toTunnel := func(f nftable.IP, set string) nftable.Rule {
		text := fmt.Sprintf("%s daddr @%s meta mark set meta mark & %#08x | %#08x accept", f.Word, set,
			^n.MarkMask|n.MarkRoute, n.MarkRoute)
		return rule(text, append(f.Destination(), nftable.In(set), nftable.Meta(expr.MetaKeyMARK),
			nftable.Masked(nftable.Native(^n.MarkMask), nftable.Native(n.MarkRoute)), nftable.SetMark(), nftable.Accept))
	}
	return []nftable.Rule{
		rule(fmt.Sprintf("meta mark & %#08x == %#08x accept", n.MarkMask, n.MarkWG),
			append(marked(n, n.MarkWG), nftable.Accept)),
		toTunnel(nftable.IPv4, dataplane.SetTargetsIPv4), toTunnel(nftable.IPv6, dataplane.SetTargetsIPv6),
	}
}

// marked matches packets with a mark.
func marked(n dataplane.Numbers, is uint32) []expr.Any {
	return []expr.Any{nftable.Meta(expr.MetaKeyMARK), nftable.Masked(nftable.Native(n.MarkMask), nil),
		nftable.Equal(nftable.Native(is)...)}
}

// clampRule is for TCP connections through the tunnel: what forwards, or has asked another route first, does not know
// the MTU.
func clampRule(n dataplane.Numbers) nftable.Rule {
	return rule(fmt.Sprintf("meta mark & %#08x == %#08x %s", n.MarkMask, n.MarkRoute, nftable.ClampText),
		append(marked(n, n.MarkRoute), nftable.Clamp()...))
}

// Registers for a key of several parts: the first three 32-bit ones, as the kernel names them.
const (
	part1 = nftable.Reg
	part2 = unix.NFT_REG32_01
	part3 = unix.NFT_REG32_02
	reg2  = unix.NFT_REG_2
)

// Offsets in the UDP header.
const (
	udpSource, udpDestination, udpSum = 0, 2, 6
	header, transport                 = expr.PayloadBaseNetworkHeader, expr.PayloadBaseTransportHeader
)

// setPort writes a port of the UDP header, and the checksum with it.
func setPort(offset, from uint32) expr.Any {
	return &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: from, Base: transport, Offset: offset, Len: 2,
		CsumType: expr.CsumTypeInet, CsumOffset: udpSum}
}

func isUDP4() []expr.Any { return append(nftable.IPv4.Only(), nftable.L4(unix.IPPROTO_UDP)...) }

func bigEndian(port int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(port)) }

// rewriteIn hands what comes from a peer to its port over to WireGuard's.
func rewriteIn(port int) nftable.Rule {
	text := fmt.Sprintf("ip saddr . udp sport . udp dport @%s udp dport set %d", dataplane.SetRewriteIn, port)
	return rule(text, append(isUDP4(), nftable.Load(header, nftable.IPv4.Src, 4, part1),
		nftable.Load(transport, udpSource, 2, part2), nftable.Load(transport, udpDestination, 2, part3),
		nftable.In(dataplane.SetRewriteIn), &expr.Immediate{Register: nftable.Reg, Data: bigEndian(port)},
		setPort(udpDestination, nftable.Reg)))
}

// rewriteOut lets what WireGuard's port sends to a peer leave by the peer's port.
func rewriteOut(port int) nftable.Rule {
	text := fmt.Sprintf("udp sport %d udp sport set ip daddr . udp dport map @%s", port, dataplane.MapRewriteOut)
	return rule(text, append(isUDP4(), nftable.LoadL4(udpSource, 2), nftable.Equal(bigEndian(port)...),
		nftable.Load(header, nftable.IPv4.Dst, 4, part1), nftable.Load(transport, udpDestination, 2, part2),
		&expr.Lookup{SourceRegister: part1, DestRegister: reg2, IsDestRegSet: true, SetName: dataplane.MapRewriteOut},
		setPort(udpSource, reg2)))
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
