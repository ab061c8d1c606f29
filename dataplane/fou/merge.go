package fou

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/inet"
)

// maxMerged bounds how many segments are merged: writev(2) takes 1024 pieces.
const maxMerged = 128

// merger puts TCP segments that follow each other in one flow together, so that a TUN device takes them with one write
// and the kernel handles them as one. It never changes the order.
type merger struct {
	header  [vnetBytes]byte
	pieces  [][]byte // the header, the first packet, payloads of more
	at      int      // of TCP's header; 0: nothing can be added
	head    int      // bytes of IP's and TCP's
	segment int      // bytes of payload
	total   int      // bytes of the packet
	next    uint32   // sequence number
	last    []byte   // the packet added last
	alone   vnetHeader
}

// add takes a packet that trim has returned, which stays as it is until take. False: what is there must be taken first.
// mtu is the tunnel's, in bytes.
func (m *merger) add(p []byte, mtu int) bool {
	at, head, ok := mergeable(p)
	if len(m.pieces) == 0 {
		m.pieces = append(m.pieces, m.header[:], p)
		m.total, m.at, m.last, m.alone = len(p), 0, p, vnetHeader{}
		if !ok {
			m.alone = unfinished(p, mtu)
		} else {
			m.at, m.head, m.segment = at, head, len(p)-head
			m.next = binary.BigEndian.Uint32(p[at+4:]) + uint32(m.segment)
			m.ended(p)
		}
		return true
	}
	payload := len(p) - head
	if m.at == 0 || !ok || at != m.at || head != m.head || payload > m.segment || m.total+payload > 0xffff ||
		len(m.pieces) > maxMerged || !m.follows(p) {
		return false
	}
	m.pieces = append(m.pieces, p[head:])
	m.total += payload
	m.next += uint32(payload)
	m.last = p
	if payload < m.segment {
		m.at = -m.at // only the last may be shorter
	}
	m.ended(p)
	return true
}

// ended closes the merged packet after one that asks to be handed on.
func (m *merger) ended(p []byte) {
	if m.at > 0 && p[m.at+13]&tcpPush != 0 {
		m.at = -m.at
	}
}

const (
	tcpPush = 8
	tcpAck  = 16
)

// mergeable tells whether a packet is a TCP segment with nothing but data, right in its checksums, and where its
// headers are.
func mergeable(p []byte) (at, head int, ok bool) {
	proto, at := transport(p)
	if proto != unix.IPPROTO_TCP || len(p) < at+tcpBytes || p[0] == 0 {
		return 0, 0, false
	}
	head = at + int(p[at+12]>>4)*4
	flags := p[at+13]
	if head < at+tcpBytes || len(p) <= head || flags&tcpAck == 0 || flags&^(tcpAck|tcpPush) != 0 || p[at+12]&15 != 0 {
		return 0, 0, false
	}
	if p[0]>>4 == 4 && (at != ipv4Bytes || binary.BigEndian.Uint16(p[6:]) != dontSplit) {
		return 0, 0, false // its number would be lost when the kernel splits it again
	}
	t := p[at:]
	return at, head, inet.Fold(inet.Sum(t, inet.Pseudo(ends(p), unix.IPPROTO_TCP, len(t)))) == 0xffff
}

// follows tells whether p is the next segment of the flow, equal in all that a split would make equal.
func (m *merger) follows(p []byte) bool {
	f := m.pieces[1]
	at := m.at
	if f[0] != p[0] || f[1] != p[1] || binary.BigEndian.Uint32(p[at+4:]) != m.next {
		return false
	}
	if at == ipv4Bytes {
		if !bytes.Equal(f[6:10], p[6:10]) || !bytes.Equal(f[12:20], p[12:20]) {
			return false
		}
	} else if !bytes.Equal(f[2:4], p[2:4]) || !bytes.Equal(f[6:40], p[6:40]) {
		return false
	}
	return bytes.Equal(f[at:at+4], p[at:at+4]) && bytes.Equal(f[at+8:at+13], p[at+8:at+13]) && // ports, acknowledgement
		// window, urgent pointer, options
		bytes.Equal(f[at+14:at+16], p[at+14:at+16]) && bytes.Equal(f[at+18:m.head], p[at+18:m.head])
}

// flush returns the pieces to write, nil when there are none. They are good until the next add.
func (m *merger) flush() (pieces [][]byte) {
	if len(m.pieces) == 0 {
		return nil
	}
	pieces = m.pieces
	h := m.alone
	if len(pieces) > 2 {
		f, at := pieces[1], m.at
		if at < 0 {
			at = -at
		}
		f[at+13] |= m.last[at+13] & tcpPush
		h = vnetHeader{flags: unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, gso: gsoOf(f), headerLen: uint16(m.head),
			segment:  uint16(m.segment),
			sumStart: uint16(at), sumAtFromThat: 16}
		if f[0]>>4 == 4 {
			binary.BigEndian.PutUint16(f[2:], uint16(m.total))
			f[10], f[11] = 0, 0
			binary.BigEndian.PutUint16(f[10:], inet.Checksum(f[:ipv4Bytes]))
		} else {
			binary.BigEndian.PutUint16(f[4:], uint16(m.total-ipv6Bytes))
		}
		binary.BigEndian.PutUint16(f[at+16:], inet.Fold(inet.Pseudo(ends(f), unix.IPPROTO_TCP, m.total-at)))
	}
	h.encode(m.header[:])
	m.pieces = m.pieces[:0]
	return pieces
}

func gsoOf(p []byte) uint8 {
	if p[0]>>4 == 4 {
		return unix.VIRTIO_NET_HDR_GSO_TCPV4
	}
	return unix.VIRTIO_NET_HDR_GSO_TCPV6
}

// unfinished is the header for a packet whose sender left its checksum to a network card that never saw it, and maybe
// the cutting as well. Such packets come from the kernel's tunnels on this host. It is empty for any other packet.
func unfinished(p []byte, mtu int) vnetHeader {
	proto, at := transport(p)
	offset, least := 16, tcpBytes
	if proto == unix.IPPROTO_UDP {
		offset, least = 6, udpBytes
	}
	if proto != unix.IPPROTO_TCP && proto != unix.IPPROTO_UDP || len(p) < at+least {
		return vnetHeader{}
	}
	t := p[at:]
	s := inet.Pseudo(ends(p), proto, len(t))
	if binary.BigEndian.Uint16(t[offset:]) != inet.Fold(s) || inet.Fold(inet.Sum(t, s)) == 0xffff {
		return vnetHeader{}
	}
	h := vnetHeader{flags: unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, sumStart: uint16(at), sumAtFromThat: uint16(offset)}
	if proto != unix.IPPROTO_TCP || len(p) <= mtu {
		return h
	}
	if head := at + int(t[12]>>4)*4; head >= at+tcpBytes && head < mtu && head < len(p) {
		h.gso, h.headerLen, h.segment = gsoOf(p), uint16(head), uint16(mtu-head)
	}
	return h
}
