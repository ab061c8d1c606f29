package flows

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
)

// ErrEntry is wrapped by errors about an entry that is malformed or not of the slot.
var ErrEntry = errors.New("flow entry refused")

// MaxEntryBytes is the size of the largest entry.
const MaxEntryBytes = headBytes + 3*16 + 3*2 + sctpBytes

const (
	version   = 1
	headBytes = 1 + 1 + 1 + 1 + 4 + 4 + 2 // version, family, protocol, status, timeout, mark, zone
	tcpBytes  = 5
	sctpBytes = 9

	seenReply = 1 << 0 // in the entry's status byte
	assured   = 1 << 1

	maxTimeout = 432000 // seconds: the kernel's five days for established TCP
	maxScale   = 14     // RFC 7323 section 2.3
)

// From linux/netfilter/nf_conntrack_tcp.h and others: the valid states of an entry, and the flags that are moved.
const (
	tcpStateMin   = 1 // SYN_SENT
	tcpStateMax   = 9 // SYN_SENT2
	tcpFlags      = conntrack.TCPScale | conntrack.TCPSACK | conntrack.TCPCloseInit
	sctpStateMin  = 1 // CLOSED
	sctpStateMax  = 9 // HEARTBEAT_SENT and, before Linux 6.3, HEARTBEAT_ACKED
	icmpEcho      = 8
	icmpTimestamp = 13
	icmpInfo      = 15
	icmpMask      = 17
	icmp6Echo     = 128
	icmp6NodeInfo = 139
)

// entry is one flow whose source is translated.
type entry struct {
	proto   uint8
	status  uint8
	timeout uint32 // seconds from now
	mark    uint32
	zone    uint16
	// The original direction. For ICMP, srcPort is the identifier and dstPort has type and code.
	src, dst         netip.Addr
	srcPort, dstPort uint16
	// The translated source, to which answers go; for ICMP natPort is the translated identifier.
	nat     netip.Addr
	natPort uint16

	state   uint8    // TCP and SCTP
	scale   [2]uint8 // TCP: window scale, original and reply
	flags   [2]uint8 // TCP
	vtag    [2]uint32
	invalid error // for an entry from the kernel's table: why it cannot be moved
}

// append appends the entry in its form for other nodes.
func (e *entry) append(b []byte) []byte {
	family := uint8(4)
	if e.src.Is6() {
		family = 6
	}
	b = append(b, version, family, e.proto, e.status)
	b = binary.BigEndian.AppendUint32(b, e.timeout)
	b = binary.BigEndian.AppendUint32(b, e.mark)
	b = binary.BigEndian.AppendUint16(b, e.zone)
	for _, a := range []netip.Addr{e.src, e.dst, e.nat} {
		b = append(b, a.AsSlice()...)
	}
	for _, p := range []uint16{e.srcPort, e.dstPort, e.natPort} {
		b = binary.BigEndian.AppendUint16(b, p)
	}
	switch e.proto {
	case unix.IPPROTO_TCP:
		b = append(b, e.state, e.scale[0], e.scale[1], e.flags[0], e.flags[1])
	case unix.IPPROTO_SCTP:
		b = append(b, e.state)
		b = binary.BigEndian.AppendUint32(b, e.vtag[0])
		b = binary.BigEndian.AppendUint32(b, e.vtag[1])
	}
	return b
}

// parse parses and checks an entry. Match must still check whose it is.
func parse(b []byte) (entry, error) {
	var e entry
	if len(b) < headBytes {
		return e, fmt.Errorf("%w: it has %d bytes, fewer than any entry", ErrEntry, len(b))
	}
	if b[0] != version {
		return e, fmt.Errorf("%w: its version is %d, this node supports %d", ErrEntry, b[0], version)
	}
	if b[1] != 4 && b[1] != 6 {
		return e, fmt.Errorf("%w: its address family is %d, want 4 or 6", ErrEntry, b[1])
	}
	size := 4
	if b[1] == 6 {
		size = 16
	}
	e.proto, e.status = b[2], b[3]
	e.timeout, e.mark, e.zone = binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:]),
		binary.BigEndian.Uint16(b[12:])
	want := headBytes + 3*size + 3*2
	switch e.proto {
	case unix.IPPROTO_TCP:
		want += tcpBytes
	case unix.IPPROTO_SCTP:
		want += sctpBytes
	}
	if len(b) != want {
		return e, fmt.Errorf("%w: it has %d bytes, an entry of protocol %d has %d", ErrEntry, len(b), e.proto, want)
	}
	rest := b[headBytes:]
	for _, a := range []*netip.Addr{&e.src, &e.dst, &e.nat} {
		*a, _ = netip.AddrFromSlice(rest[:size])
		rest = rest[size:]
	}
	for _, p := range []*uint16{&e.srcPort, &e.dstPort, &e.natPort} {
		*p = binary.BigEndian.Uint16(rest)
		rest = rest[2:]
	}
	switch e.proto {
	case unix.IPPROTO_TCP:
		e.state, e.scale, e.flags = rest[0], [2]uint8(rest[1:3]), [2]uint8(rest[3:5])
	case unix.IPPROTO_SCTP:
		e.state, e.vtag = rest[0], [2]uint32{binary.BigEndian.Uint32(rest[1:]), binary.BigEndian.Uint32(rest[5:])}
	}
	return e, e.check()
}

// check returns an error if the entry by itself is invalid.
func (e *entry) check() error {
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrEntry}, a...)...)
	}
	for _, a := range []netip.Addr{e.src, e.dst, e.nat} {
		if !a.IsValid() || a.Is4In6() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.Is4() != e.src.Is4() {
			return bad("%s is not an address of a flow's end", a)
		}
	}
	switch {
	case e.status&^(seenReply|assured) != 0:
		return bad("its status has unknown bits: %#x", e.status)
	case e.timeout == 0 || e.timeout > maxTimeout:
		return bad("its timeout is %d s", e.timeout)
	}
	switch e.proto {
	case unix.IPPROTO_TCP:
		if e.state < tcpStateMin || e.state > tcpStateMax {
			return bad("its TCP state is %d", e.state)
		}
		for i := range 2 {
			if e.scale[i] > maxScale || e.flags[i]&^tcpFlags != 0 {
				return bad("its TCP window scale is %d and its flags are %#x", e.scale[i], e.flags[i])
			}
		}
	case unix.IPPROTO_SCTP:
		if e.state < sctpStateMin || e.state > sctpStateMax {
			return bad("its SCTP state is %d", e.state)
		}
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE:
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if _, ok := e.answer(); !ok {
			return bad("its ICMP type and code are %#x", e.dstPort)
		}
		return nil
	default:
		return bad("its protocol is %d", e.proto)
	}
	if e.srcPort == 0 || e.dstPort == 0 || e.natPort == 0 {
		return bad("one of its ports is 0")
	}
	return nil
}

// answer is the ICMP type and code of the answer to the entry's, as the connection table pairs them.
func (e *entry) answer() (uint16, bool) {
	if (e.proto == unix.IPPROTO_ICMP) != e.src.Is4() || e.dstPort&0xff != 0 {
		return 0, false
	}
	switch t := e.dstPort >> 8; {
	case e.proto == unix.IPPROTO_ICMP && t == icmpEcho:
		return 0, true
	case e.proto == unix.IPPROTO_ICMP && (t == icmpTimestamp || t == icmpInfo || t == icmpMask),
		e.proto == unix.IPPROTO_ICMPV6 && (t == icmp6Echo || t == icmp6NodeInfo):
		return (t + 1) << 8, true
	}
	return 0, false
}

// icmp reports whether the entry has an identifier in place of ports.
func (e *entry) icmp() bool { return e.proto == unix.IPPROTO_ICMP || e.proto == unix.IPPROTO_ICMPV6 }
