package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// Numbers of linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaNatSrc     = 6
	ctaTimeout    = 7
	ctaMark       = 8
	ctaID         = 12
	ctaZone       = 18

	tupleIP    = 1
	tupleProto = 2
	tupleZone  = 3
	ipSrc4     = 1 // IPv6's are these and 2
	ipDst4     = 2
	protoNum   = 1
	protoSrc   = 2
	protoDst   = 3
	icmpID     = 4 // ICMPv6's are these and 3
	icmpType   = 5
	icmpCode   = 6

	infoTCP    = 1
	infoSCTP   = 3
	infoState  = 1
	tcpScale   = 2 // and the next, of the reply
	tcpFlagsAt = 4 // and the next
	sctpVTag   = 2 // and the next

	natMin4  = 1
	natMax4  = 2
	natProto = 3
	natMin6  = 4
	natMax6  = 5
	portMin  = 1
	portMax  = 2
)

// Bits of Flow.Status, of linux/netfilter/nf_conntrack_common.h.
const (
	SeenReply = 1 << 1
	Assured   = 1 << 2
	Confirmed = 1 << 3
	SrcNAT    = 1 << 4
	DstNAT    = 1 << 5
	Dying     = 1 << 9
)

// Bits of Flow.Flags, of linux/netfilter/nf_conntrack_tcp.h.
const (
	TCPScale     = 1 << 0
	TCPSACK      = 1 << 1
	TCPCloseInit = 1 << 2
	TCPLiberal   = 1 << 3 // about windows
	tcpFlags     = TCPScale | TCPSACK | TCPCloseInit | TCPLiberal
)

// Tuple is one direction of a flow. Of ICMP and ICMPv6, SrcPort is the identifier, and DstPort has type and code.
type Tuple struct {
	Proto            uint8
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16
	OwnZone          bool // it has a zone that the other direction has not; read only
}

func (t Tuple) family() uint8 {
	if t.Src.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (t Tuple) icmp() bool { return t.Proto == unix.IPPROTO_ICMP || t.Proto == unix.IPPROTO_ICMPV6 }

// Flow is an entry of the table.
type Flow struct {
	Original, Reply Tuple // Reply is what answers look like that come from outside, before they are translated
	Status          uint32
	Timeout         uint32 // seconds from now
	Mark            uint32
	Zone            uint16
	ID              uint32 // of the kernel; Create gives none

	State uint8     // of TCP, SCTP and DCCP
	Scale [2]uint8  // of TCP's windows: original, reply
	Flags [2]uint8  // of TCP
	VTag  [2]uint32 // of SCTP
}

// Decode reads an entry in the kernel's form. Of what is malformed it reads nothing.
func Decode(attributes []byte) (f Flow) {
	for typ, v := range nfnl.Attributes(attributes) {
		switch {
		case typ == ctaTupleOrig:
			f.Original = decodeTuple(v)
		case typ == ctaTupleReply:
			f.Reply = decodeTuple(v)
		case typ == ctaProtoInfo:
			f.decodeInfo(v)
		case typ == ctaStatus && len(v) == 4:
			f.Status = binary.BigEndian.Uint32(v)
		case typ == ctaTimeout && len(v) == 4:
			f.Timeout = binary.BigEndian.Uint32(v)
		case typ == ctaMark && len(v) == 4:
			f.Mark = binary.BigEndian.Uint32(v)
		case typ == ctaID && len(v) == 4:
			f.ID = binary.BigEndian.Uint32(v)
		case typ == ctaZone && len(v) == 2:
			f.Zone = binary.BigEndian.Uint16(v)
		}
	}
	return f
}

func decodeTuple(b []byte) (t Tuple) {
	for typ, v := range nfnl.Attributes(b) {
		switch typ {
		case tupleZone:
			t.OwnZone = true
		case tupleIP:
			for typ, v := range nfnl.Attributes(v) {
				a, _ := netip.AddrFromSlice(v)
				switch typ {
				case ipSrc4, ipSrc4 + 2:
					t.Src = a
				case ipDst4, ipDst4 + 2:
					t.Dst = a
				}
			}
		case tupleProto:
			for typ, v := range nfnl.Attributes(v) {
				switch {
				case typ == protoNum && len(v) == 1:
					t.Proto = v[0]
				case (typ == protoSrc || typ == icmpID || typ == icmpID+3) && len(v) == 2:
					t.SrcPort = binary.BigEndian.Uint16(v)
				case typ == protoDst && len(v) == 2:
					t.DstPort = binary.BigEndian.Uint16(v)
				case (typ == icmpType || typ == icmpType+3) && len(v) == 1:
					t.DstPort |= uint16(v[0]) << 8
				case (typ == icmpCode || typ == icmpCode+3) && len(v) == 1:
					t.DstPort |= uint16(v[0])
				}
			}
		}
	}
	return t
}

// decodeInfo takes the protocol's state.
func (f *Flow) decodeInfo(b []byte) {
	for kind, v := range nfnl.Attributes(b) {
		for typ, v := range nfnl.Attributes(v) {
			switch {
			case len(v) == 0:
			case typ == infoState:
				f.State = v[0]
			case kind == infoTCP && (typ == tcpScale || typ == tcpScale+1):
				f.Scale[typ-tcpScale] = v[0]
			case kind == infoTCP && (typ == tcpFlagsAt || typ == tcpFlagsAt+1):
				f.Flags[typ-tcpFlagsAt] = v[0]
			case kind == infoSCTP && (typ == sctpVTag || typ == sctpVTag+1) && len(v) == 4:
				f.VTag[typ-sctpVTag] = binary.BigEndian.Uint32(v)
			}
		}
	}
}

// Encode adds the attributes of an entry whose source is translated to where Reply leads. The kernel is given the reply
// of a flow without translation: from it and the one address and port of the translation it makes the other, as it does
// for a flow's first packet.
func (f *Flow) Encode(w *nfnl.Writer) {
	o, nat, port := f.Original, f.Reply.Dst, f.Reply.DstPort
	plain := Tuple{Proto: o.Proto, Src: o.Dst, Dst: o.Src, SrcPort: o.DstPort, DstPort: o.SrcPort}
	if o.icmp() {
		plain.SrcPort, plain.DstPort, port = o.SrcPort, f.Reply.DstPort, f.Reply.SrcPort
	}
	o.encode(w, ctaTupleOrig)
	plain.encode(w, ctaTupleReply)
	w.Nest(ctaNatSrc, func() {
		lo, hi := uint16(natMin4), uint16(natMax4)
		if nat.Is6() {
			lo, hi = natMin6, natMax6
		}
		addr := nat.AsSlice()
		w.Bytes(lo, addr)
		w.Bytes(hi, addr)
		w.Nest(natProto, func() { w.Uint16(portMin, port); w.Uint16(portMax, port) })
	})
	w.Uint32(ctaStatus, f.Status)
	w.Uint32(ctaTimeout, f.Timeout)
	w.Uint32(ctaMark, f.Mark)
	encodeZone(w, f.Zone)
	f.encodeInfo(w)
}

func (f *Flow) encodeInfo(w *nfnl.Writer) {
	switch f.Original.Proto {
	case unix.IPPROTO_TCP:
		w.Nest(ctaProtoInfo, func() {
			w.Nest(infoTCP, func() {
				w.Uint8(infoState, f.State)
				for i := range uint16(2) {
					w.Uint8(tcpScale+i, f.Scale[i])
					w.Bytes(tcpFlagsAt+i, []byte{f.Flags[i], tcpFlags}) // value and mask
				}
			})
		})
	case unix.IPPROTO_SCTP:
		w.Nest(ctaProtoInfo, func() {
			w.Nest(infoSCTP, func() {
				w.Uint8(infoState, f.State)
				w.Uint32(sctpVTag, f.VTag[0])
				w.Uint32(sctpVTag+1, f.VTag[1])
			})
		})
	}
}

func encodeZone(w *nfnl.Writer, zone uint16) {
	if zone != 0 {
		w.Uint16(ctaZone, zone)
	}
}

func (t Tuple) encode(w *nfnl.Writer, typ uint16) {
	w.Nest(typ, func() {
		w.Nest(tupleIP, func() {
			six := uint16(0)
			if t.Src.Is6() {
				six = 2
			}
			w.Bytes(ipSrc4+six, t.Src.AsSlice())
			w.Bytes(ipDst4+six, t.Dst.AsSlice())
		})
		w.Nest(tupleProto, func() {
			w.Uint8(protoNum, t.Proto)
			if !t.icmp() {
				w.Uint16(protoSrc, t.SrcPort)
				w.Uint16(protoDst, t.DstPort)
				return
			}
			six := uint16(0)
			if t.Proto == unix.IPPROTO_ICMPV6 {
				six = 3
			}
			w.Uint16(icmpID+six, t.SrcPort)
			w.Uint8(icmpType+six, uint8(t.DstPort>>8))
			w.Uint8(icmpCode+six, uint8(t.DstPort))
		})
	})
}
