package flows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// Numbers of linux/netfilter/nfnetlink_conntrack.h and nf_conntrack_common.h.
const (
	subsystem = 1 // NFNL_SUBSYS_CTNETLINK
	msgNew    = 0
	msgGet    = 1
	msgDelete = 2

	ctaTupleOrig  = 1
	ctaTupleReply = 2
	ctaStatus     = 3
	ctaProtoInfo  = 4
	ctaNatSrc     = 6
	ctaTimeout    = 7
	ctaMark       = 8
	ctaZone       = 18

	tupleIP    = 1
	tupleProto = 2
	tupleZone  = 3
	ipSrc4     = 1
	ipDst4     = 2
	ipSrc6     = 3
	ipDst6     = 4
	protoNum   = 1
	protoSrc   = 2
	protoDst   = 3
	icmpID     = 4
	icmpType   = 5
	icmpCode   = 6
	icmp6ID    = 7 // as above, +3

	infoTCP  = 1
	infoSCTP = 3
	natMin4  = 1
	natMax4  = 2
	natProto = 3
	natMin6  = 4
	natMax6  = 5
	portMin  = 1
	portMax  = 2

	ipsSeenReply = 1 << 1
	ipsAssured   = 1 << 2
	ipsConfirmed = 1 << 3
	ipsDNAT      = 1 << 5
	ipsDying     = 1 << 9
)

const (
	receiveBuffer = 8 << 20 // bytes
	readBytes     = 1 << 16
	batch         = 128 // messages of one system call
)

// table is the connection table of one network namespace.
type table struct {
	c   *nfnl.Conn
	w   nfnl.Writer
	seq uint32
	buf []byte
}

func open(path string) (*table, error) {
	c, err := nfnl.Dial(path, receiveBuffer)
	if err != nil {
		return nil, fmt.Errorf("connection table: %w", err)
	}
	return &table{c: c, buf: make([]byte, readBytes)}, nil
}

func (t *table) close() { _ = t.c.Close() }

// begin adds a message about a flow to what is sent next.
func (t *table) begin(typ uint8, flags uint16, family uint8) uint32 {
	t.seq++
	t.w.Begin(subsystem, typ, flags, t.seq, family, 0)
	return t.seq
}

func (t *table) flush() error {
	b := t.w.B
	t.w.B = t.w.B[:0]
	return t.c.Send(b)
}

// dump reads the whole table.
func (t *table) dump(each func(*entry) error) error {
	t.begin(msgGet, unix.NLM_F_DUMP, unix.AF_UNSPEC)
	t.w.End()
	if err := t.flush(); err != nil {
		return err
	}
	for {
		b, err := t.c.Receive(t.buf)
		if err != nil {
			return err
		}
		for m := range nfnl.Messages(b) {
			if m.Type == unix.NLMSG_DONE {
				return nil
			}
			if errno, ok := m.Err(); ok {
				return errno
			}
			if m.Type != subsystem<<8|msgNew {
				continue
			}
			e := decode(m.Attributes())
			if err := each(&e); err != nil {
				return err
			}
		}
	}
}

var errForeign = errors.New("not a flow whose source alone is translated")

type tuple struct {
	proto            uint8
	src, dst         netip.Addr
	srcPort, dstPort uint16
	zone             bool // one of its own
}

// decode reads an entry of the kernel's table. One that cannot be moved is invalid.
func decode(attributes []byte) entry {
	var e entry
	var orig, reply tuple
	var status uint32
	for typ, v := range nfnl.Attributes(attributes) {
		switch {
		case typ == ctaTupleOrig:
			orig = decodeTuple(v)
		case typ == ctaTupleReply:
			reply = decodeTuple(v)
		case typ == ctaProtoInfo:
			e.protoInfo(v)
		case typ == ctaStatus && len(v) == 4:
			status = binary.BigEndian.Uint32(v)
		case typ == ctaTimeout && len(v) == 4:
			e.timeout = min(binary.BigEndian.Uint32(v), maxTimeout)
		case typ == ctaMark && len(v) == 4:
			e.mark = binary.BigEndian.Uint32(v)
		case typ == ctaZone && len(v) == 2:
			e.zone = binary.BigEndian.Uint16(v)
		}
	}
	e.proto, e.src, e.dst, e.srcPort, e.dstPort = orig.proto, orig.src, orig.dst, orig.srcPort, orig.dstPort
	e.nat, e.natPort = reply.dst, reply.dstPort
	if e.icmp() {
		e.natPort = reply.srcPort
	}
	if status&ipsSeenReply != 0 {
		e.status |= seenReply
	}
	if status&ipsAssured != 0 {
		e.status |= assured
	}
	if status&(ipsDNAT|ipsDying) != 0 || orig.zone || reply.zone || reply.src != orig.dst || reply.proto != orig.proto ||
		!e.icmp() && reply.srcPort != orig.dstPort {
		e.invalid = errForeign
	}
	return e
}

func decodeTuple(b []byte) tuple {
	var t tuple
	for typ, v := range nfnl.Attributes(b) {
		switch typ {
		case tupleZone:
			t.zone = true
		case tupleIP:
			for typ, v := range nfnl.Attributes(v) {
				a, _ := netip.AddrFromSlice(v)
				switch typ {
				case ipSrc4, ipSrc6:
					t.src = a
				case ipDst4, ipDst6:
					t.dst = a
				}
			}
		case tupleProto:
			for typ, v := range nfnl.Attributes(v) {
				switch {
				case typ == protoNum && len(v) == 1:
					t.proto = v[0]
				case (typ == protoSrc || typ == icmpID || typ == icmp6ID) && len(v) == 2:
					t.srcPort = binary.BigEndian.Uint16(v)
				case typ == protoDst && len(v) == 2:
					t.dstPort = binary.BigEndian.Uint16(v)
				case (typ == icmpType || typ == icmp6ID+1) && len(v) == 1:
					t.dstPort |= uint16(v[0]) << 8
				case (typ == icmpCode || typ == icmp6ID+2) && len(v) == 1:
					t.dstPort |= uint16(v[0])
				}
			}
		}
	}
	return t
}

// protoInfo takes the protocol's state: five attributes of TCP, three of SCTP.
func (e *entry) protoInfo(b []byte) {
	for kind, v := range nfnl.Attributes(b) {
		for typ, v := range nfnl.Attributes(v) {
			switch {
			case len(v) == 0:
			case typ == 1:
				e.state = v[0]
			case kind == infoTCP && (typ == 2 || typ == 3):
				e.scale[typ-2] = v[0]
			case kind == infoTCP && (typ == 4 || typ == 5):
				e.flags[typ-4] = v[0] & tcpFlags
			case kind == infoSCTP && (typ == 2 || typ == 3) && len(v) == 4:
				e.vtag[typ-2] = binary.BigEndian.Uint32(v)
			}
		}
	}
}

// load writes entries, many in one system call; of those the kernel refuses, as there is a flow with one of their two
// directions, what is in the way is deleted first. It tells how many are written.
func (t *table) load(entries []entry) (loaded int, err error) {
	var first error
	for len(entries) > 0 {
		n := min(batch, len(entries))
		failed, err := t.send(entries[:n], (*table).create)
		if err != nil {
			return loaded, fmt.Errorf("writing flows to the connection table: %w", err)
		}
		var again []entry
		for i := range n {
			if failed[i] == unix.EEXIST {
				again = append(again, entries[i])
				failed[i] = 0
			}
		}
		loaded += n - count(failed, entries[:n], &first) - len(again)
		if len(again) > 0 {
			if _, err := t.send(again, (*table).remove); err != nil {
				return loaded, fmt.Errorf("making room in the connection table: %w", err)
			}
			failed, err := t.send(again, (*table).create)
			if err != nil {
				return loaded, fmt.Errorf("writing flows to the connection table: %w", err)
			}
			loaded += len(again) - count(failed, again, &first)
		}
		entries = entries[n:]
	}
	return loaded, first
}

func count(failed map[int]unix.Errno, entries []entry, first *error) int {
	n := 0
	for i := range entries {
		if errno := failed[i]; errno != 0 {
			if n++; *first == nil {
				e := &entries[i]
				*first = fmt.Errorf("writing the flow of protocol %d from %s to %s, translated to %s, to the connection table: %w",
					e.proto,
					netip.AddrPortFrom(e.src, e.srcPort), netip.AddrPortFrom(e.dst, e.dstPort),
					netip.AddrPortFrom(e.nat, e.natPort), errno)
			}
		}
	}
	return n
}

// send writes the messages of some entries, and waits until the kernel has seen them all. It tells which failed.
func (t *table) send(entries []entry, write func(*table, *entry)) (map[int]unix.Errno, error) {
	of := map[uint32]int{}
	for i := range entries {
		before := t.seq
		write(t, &entries[i])
		for s := before + 1; s <= t.seq; s++ {
			of[s] = i
		}
	}
	last := t.begin(msgGet, unix.NLM_F_ACK, unix.AF_UNSPEC) // a question without a tuple, refused: the kernel is here now
	t.w.End()
	if err := t.flush(); err != nil {
		return nil, err
	}
	failed := map[int]unix.Errno{}
	for {
		b, err := t.c.Receive(t.buf)
		if err != nil {
			return nil, err
		}
		for m := range nfnl.Messages(b) {
			errno, ok := m.Err()
			if !ok {
				continue
			}
			if m.Seq == last {
				return failed, nil
			}
			if errno == unix.EPERM {
				return nil, fmt.Errorf("%w: this needs CAP_NET_ADMIN", errno)
			}
			if i, known := of[m.Seq]; known && errno != 0 {
				failed[i] = errno
			}
		}
	}
}

func (e *entry) family() uint8 {
	if e.src.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// create adds the message that makes the flow. The reply tuple is that of a flow without translation: from it and the
// one address and port of the translation the kernel makes the other, as it does for a flow's first packet.
func (t *table) create(e *entry) {
	w := &t.w
	t.begin(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, e.family())
	t.original(e)
	answer, _ := e.answer()
	t.tuple(ctaTupleReply, e, e.dst, e.src, e.dstPort, e.srcPort, e.srcPort, answer)
	w.Nest(ctaNatSrc, func() {
		lo, hi := uint16(natMin4), uint16(natMax4)
		if e.nat.Is6() {
			lo, hi = natMin6, natMax6
		}
		addr := e.nat.AsSlice()
		w.Bytes(lo, addr)
		w.Bytes(hi, addr)
		w.Nest(natProto, func() { w.Uint16(portMin, e.natPort); w.Uint16(portMax, e.natPort) })
	})
	status := uint32(ipsConfirmed)
	if e.status&seenReply != 0 {
		status |= ipsSeenReply
	}
	if e.status&assured != 0 {
		status |= ipsAssured
	}
	w.Uint32(ctaStatus, status)
	w.Uint32(ctaTimeout, e.timeout)
	w.Uint32(ctaMark, e.mark)
	t.zone(e)
	t.info(e)
	w.End()
}

// info adds the protocol's state.
func (t *table) info(e *entry) {
	w := &t.w
	switch e.proto {
	case unix.IPPROTO_TCP:
		w.Nest(ctaProtoInfo, func() {
			w.Nest(infoTCP, func() {
				w.Uint8(1, e.state)
				w.Uint8(2, e.scale[0])
				w.Uint8(3, e.scale[1])
				w.Bytes(4, []byte{e.flags[0] | tcpLiberal, tcpFlags | tcpLiberal}) // value and mask
				w.Bytes(5, []byte{e.flags[1] | tcpLiberal, tcpFlags | tcpLiberal})
			})
		})
	case unix.IPPROTO_SCTP:
		w.Nest(ctaProtoInfo, func() {
			w.Nest(infoSCTP, func() {
				w.Uint8(1, e.state)
				w.Uint32(2, e.vtag[0])
				w.Uint32(3, e.vtag[1])
			})
		})
	}
}

// remove adds messages that delete the flow, and another that answers where it does.
func (t *table) remove(e *entry) {
	t.begin(msgDelete, 0, e.family())
	t.original(e)
	t.zone(e)
	t.w.End()
	t.begin(msgDelete, 0, e.family())
	answer, _ := e.answer()
	t.tuple(ctaTupleReply, e, e.dst, e.nat, e.dstPort, e.natPort, e.natPort, answer)
	t.zone(e)
	t.w.End()
}

func (t *table) zone(e *entry) {
	if e.zone != 0 {
		t.w.Uint16(ctaZone, e.zone)
	}
}

func (t *table) original(e *entry) {
	t.tuple(ctaTupleOrig, e, e.src, e.dst, e.srcPort, e.dstPort, e.srcPort, e.dstPort)
}

// tuple adds one direction: with ports, or for ICMP with an identifier, type and code.
func (t *table) tuple(typ uint16, e *entry, src, dst netip.Addr, srcPort, dstPort, id, icmp uint16) {
	w := &t.w
	w.Nest(typ, func() {
		w.Nest(tupleIP, func() {
			if src.Is4() {
				w.Bytes(ipSrc4, src.AsSlice())
				w.Bytes(ipDst4, dst.AsSlice())
			} else {
				w.Bytes(ipSrc6, src.AsSlice())
				w.Bytes(ipDst6, dst.AsSlice())
			}
		})
		w.Nest(tupleProto, func() {
			w.Uint8(protoNum, e.proto)
			base := uint16(icmpID)
			switch e.proto {
			case unix.IPPROTO_ICMPV6:
				base = icmp6ID
				fallthrough
			case unix.IPPROTO_ICMP:
				w.Uint16(base, id)
				w.Uint8(base+1, uint8(icmp>>8))
				w.Uint8(base+2, uint8(icmp))
			default:
				w.Uint16(protoSrc, srcPort)
				w.Uint16(protoDst, dstPort)
			}
		})
	})
}
