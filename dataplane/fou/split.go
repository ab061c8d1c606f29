package fou

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/inet"
)

// vnetBytes is the length of the header that stands before each packet that a TUN device reads and writes.
const vnetBytes = 10

// vnetHeader is struct virtio_net_hdr.
type vnetHeader struct {
	flags, gso                                  uint8
	headerLen, segment, sumStart, sumAtFromThat uint16 // bytes
}

func decodeVnet(b []byte) vnetHeader {
	n := binary.NativeEndian
	return vnetHeader{b[0], b[1], n.Uint16(b[2:]), n.Uint16(b[4:]), n.Uint16(b[6:]), n.Uint16(b[8:])}
}

func (h vnetHeader) encode(b []byte) {
	n := binary.NativeEndian
	b[0], b[1] = h.flags, h.gso
	n.PutUint16(b[2:], h.headerLen)
	n.PutUint16(b[4:], h.segment)
	n.PutUint16(b[6:], h.sumStart)
	n.PutUint16(b[8:], h.sumAtFromThat)
}

var errFrame = errors.New("a TUN device gave something that is not a packet")

// split makes the IP packets that are in a frame, as a TUN device reads it, and calls each for every one. The kernel
// leaves checksums to us, and cutting what TCP or UDP gave it in one piece. room gives memory for a packet, nil when
// there is no more: then the rest is dropped, which is an error.
func split(frame []byte, room func(n int) []byte, each func(packet []byte)) error {
	if len(frame) < vnetBytes+ipv4Bytes {
		return errFrame
	}
	h, p := decodeVnet(frame), frame[vnetBytes:]
	version := p[0] >> 4
	if version != 4 && version != 6 || version == 6 && len(p) < ipv6Bytes {
		return errFrame
	}
	if h.gso == unix.VIRTIO_NET_HDR_GSO_NONE {
		return whole(h, p, room, each)
	}
	tcp := h.gso == unix.VIRTIO_NET_HDR_GSO_TCPV4 && version == 4 || h.gso == unix.VIRTIO_NET_HDR_GSO_TCPV6 && version == 6
	if !tcp && h.gso != unix.VIRTIO_NET_HDR_GSO_UDP_L4 {
		return errFrame
	}
	at := int(h.sumStart)
	header := at + udpBytes
	least := ipv6Bytes
	if version == 4 {
		least = int(p[0]&15) * 4
	}
	if at < least || least < ipv4Bytes || h.segment == 0 {
		return errFrame
	}
	if tcp {
		if len(p) < at+tcpBytes || p[at+12]>>4 < tcpBytes/4 {
			return errFrame
		}
		header = at + int(p[at+12]>>4)*4
	}
	if len(p) <= header {
		return errFrame
	}
	c := cutter{head: p[:header], at: at, tcp: tcp}
	for payload := p[header:]; len(payload) > 0; {
		n := min(int(h.segment), len(payload))
		out := room(header + n)
		if out == nil {
			return errFrame
		}
		c.cut(out, payload[:n], n == len(payload))
		each(out)
		payload = payload[n:]
	}
	return nil
}

// whole is a frame of one packet.
func whole(h vnetHeader, p []byte, room func(n int) []byte, each func(packet []byte)) error {
	out := room(len(p))
	if out == nil {
		return errFrame
	}
	copy(out, p)
	if h.flags&unix.VIRTIO_NET_HDR_F_NEEDS_CSUM != 0 {
		start := int(h.sumStart)
		at := start + int(h.sumAtFromThat)
		if start > len(out) || at+2 > len(out) {
			return errFrame
		}
		s := inet.Checksum(out[start:]) // the sum of the pseudo header is there already
		if s == 0 && out[0]>>4 == 6 && out[6] == unix.IPPROTO_UDP || s == 0 && out[0]>>4 == 4 && out[9] == unix.IPPROTO_UDP {
			s = 0xffff // 0 says that there is none
		}
		binary.BigEndian.PutUint16(out[at:], s)
	}
	each(out)
	return nil
}

// cutter makes segments of what was given in one piece.
type cutter struct {
	head []byte // IP and transport
	at   int    // of the transport's header
	tcp  bool
	n    int // segments made
	sent int // bytes in them
}

func (c *cutter) cut(out, payload []byte, last bool) {
	copy(out, c.head)
	copy(out[len(c.head):], payload)
	if out[0]>>4 == 4 {
		binary.BigEndian.PutUint16(out[2:], uint16(len(out)))
		binary.BigEndian.PutUint16(out[4:], binary.BigEndian.Uint16(c.head[4:])+uint16(c.n))
		out[10], out[11] = 0, 0
		binary.BigEndian.PutUint16(out[10:], inet.Checksum(out[:int(out[0]&15)*4]))
	} else {
		binary.BigEndian.PutUint16(out[4:], uint16(len(out)-ipv6Bytes))
	}
	t := out[c.at:]
	if c.tcp {
		const fin, push, cwr = 1, 8, 0x80
		binary.BigEndian.PutUint32(t[4:], binary.BigEndian.Uint32(c.head[c.at+4:])+uint32(c.sent))
		if !last {
			t[13] &^= fin | push
		}
		if c.n > 0 {
			t[13] &^= cwr
		}
		t[16], t[17] = 0, 0
		binary.BigEndian.PutUint16(t[16:], ^inet.Fold(inet.Sum(t, inet.Pseudo(ends(out), unix.IPPROTO_TCP, len(t)))))
	} else {
		binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
		t[6], t[7] = 0, 0
		s := ^inet.Fold(inet.Sum(t, inet.Pseudo(ends(out), unix.IPPROTO_UDP, len(t))))
		if s == 0 {
			s = 0xffff
		}
		binary.BigEndian.PutUint16(t[6:], s)
	}
	c.n++
	c.sent += len(payload)
}
