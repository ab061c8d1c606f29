package nftable

import (
	"encoding/binary"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Reg is the register that the expressions below work in.
const Reg = unix.NFT_REG_1

// IP is what differs between the two families in rules.
type IP struct {
	Word          string // nft's
	Proto, ICMP   byte
	Src, Dst, Len uint32 // of the addresses in the header, in bytes
	Addr          nftables.SetDatatype
}

// The families.
var (
	IPv4 = IP{"ip", unix.NFPROTO_IPV4, unix.IPPROTO_ICMP, 12, 16, 4, nftables.TypeIPAddr}
	IPv6 = IP{"ip6", unix.NFPROTO_IPV6, unix.IPPROTO_ICMPV6, 8, 24, 16, nftables.TypeIP6Addr}
)

// Only matches packets of the family.
func (f IP) Only() []expr.Any { return []expr.Any{Meta(expr.MetaKeyNFPROTO), Equal(f.Proto)} }

// Source loads the source of a packet of the family.
func (f IP) Source() []expr.Any { return append(f.Only(), LoadIP(f.Src, f.Len)) }

// Destination loads the destination.
func (f IP) Destination() []expr.Any { return append(f.Only(), LoadIP(f.Dst, f.Len)) }

// L4 matches packets of a transport protocol.
func L4(proto byte) []expr.Any { return []expr.Any{Meta(expr.MetaKeyL4PROTO), Equal(proto)} }

// DestPort loads the destination port of UDP or TCP.
func DestPort() expr.Any { return LoadL4(2, 2) }

// Link matches packets by the link that they came in by (expr.MetaKeyIIFNAME) or leave by (expr.MetaKeyOIFNAME).
func Link(key expr.MetaKey, name string) []expr.Any {
	return []expr.Any{Meta(key), Equal(LinkName(name)...)}
}

// LinkName is a link's name as the kernel compares it.
func LinkName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

// Meta loads what the kernel knows of a packet.
func Meta(key expr.MetaKey) expr.Any { return &expr.Meta{Key: key, Register: Reg} }

// SetMark gives the packet its mark.
func SetMark() expr.Any {
	return &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: Reg}
}

// LoadIP loads a part of the IP header.
func LoadIP(offset, length uint32) expr.Any {
	return Load(expr.PayloadBaseNetworkHeader, offset, length, Reg)
}

// LoadL4 loads a part of the transport's header.
func LoadL4(offset, length uint32) expr.Any {
	return Load(expr.PayloadBaseTransportHeader, offset, length, Reg)
}

// Load loads a part of a header into any register.
func Load(base expr.PayloadBase, offset, length, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

// Masked keeps the bits of a mask, and flips those of xor; nil flips none.
func Masked(mask, xor []byte) expr.Any {
	if xor == nil {
		xor = make([]byte, len(mask))
	}
	return &expr.Bitwise{SourceRegister: Reg, DestRegister: Reg, Len: uint32(len(mask)), Mask: mask, Xor: xor}
}

// Native is a number as the kernel has marks.
func Native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// Equal matches what is loaded.
func Equal(data ...byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpEq, Register: Reg, Data: data} }

// Differ matches anything else.
func Differ(data ...byte) expr.Any { return &expr.Cmp{Op: expr.CmpOpNeq, Register: Reg, Data: data} }

// In matches what is loaded where a set has it.
func In(set string) expr.Any { return &expr.Lookup{SourceRegister: Reg, SetName: set} }

// NotIn matches it where a set has it not.
func NotIn(set string) expr.Any { return &expr.Lookup{SourceRegister: Reg, SetName: set, Invert: true} }

// Mapped loads what a map has for it, and matches where the map has something.
func Mapped(m string) expr.Any {
	return &expr.Lookup{SourceRegister: Reg, DestRegister: Reg, IsDestRegSet: true, SetName: m}
}

// Accept ends a packet's way through a hook's chain, Drop ends the packet.
var (
	Accept expr.Any = &expr.Verdict{Kind: expr.VerdictAccept}
	Drop   expr.Any = &expr.Verdict{Kind: expr.VerdictDrop}
)

// CountedDrop counts packets and drops them.
func CountedDrop() []expr.Any { return []expr.Any{&expr.Counter{}, Drop} }

// ClampText is Clamp in nft's words.
const ClampText = "tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu"

// Clamp makes both ends of a TCP connection send segments that fit the route's MTU. The kernel never raises the option
// (nft_exthdr).
func Clamp() []expr.Any {
	const flags, synRst, syn, maxseg, size = 13, 0x06, 0x02, 2, 2
	return append(L4(unix.IPPROTO_TCP), LoadL4(flags, 1), Masked([]byte{synRst}, nil), Equal(syn),
		&expr.Rt{Register: Reg, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: Reg, DestRegister: Reg, Op: expr.ByteorderHton, Len: size, Size: size},
		&expr.Exthdr{SourceRegister: Reg, Type: maxseg, Offset: 2, Len: size, Op: expr.ExthdrOpTcpopt})
}
