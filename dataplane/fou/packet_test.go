package fou

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/inet"
)

// segment makes a TCP packet of a flow, all right; family is 4 or 6.
func segment(version int, port uint16, seq uint32, payload int, flags uint8) []byte {
	var p []byte
	if version == 4 {
		p = append(p, 0x45, 2, 0, 0, byte(seq>>8), byte(seq), 0x40, 0, 64, unix.IPPROTO_TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2)
	} else {
		p = append(p, 0x60, 0x20, 0, 5, 0, 0, unix.IPPROTO_TCP, 64)
		for _, a := range []string{"fd00::1", "fd00::2"} {
			p = append(p, netip.MustParseAddr(a).AsSlice()...)
		}
	}
	at := len(p)
	p = binary.BigEndian.AppendUint16(p, port)
	p = binary.BigEndian.AppendUint16(p, 443)
	p = binary.BigEndian.AppendUint32(p, seq)
	p = binary.BigEndian.AppendUint32(p, 99)
	p = append(p, 0x80, flags, 1, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2) // with time stamps
	for i := range payload {
		p = append(p, byte(seq+uint32(i)))
	}
	if version == 4 {
		binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
		binary.BigEndian.PutUint16(p[10:], inet.Checksum(p[:20]))
	} else {
		binary.BigEndian.PutUint16(p[4:], uint16(len(p)-40))
	}
	binary.BigEndian.PutUint16(p[at+16:], ^inet.Fold(inet.Sum(p[at:], inet.Pseudo(ends(p), unix.IPPROTO_TCP, len(p)-at))))
	return p
}

// roomy gives memory without end.
func roomy(n int) []byte { return make([]byte, n) }

// frames merges packets as a device would be given them.
func frames(packets [][]byte) (out [][]byte) {
	m := &merger{}
	take := func() {
		if pieces := m.flush(); pieces != nil {
			out = append(out, slices.Concat(pieces...))
		}
	}
	for _, p := range packets {
		if !m.add(p, 1400) {
			take()
			m.add(p, 1400)
		}
	}
	take()
	return out
}

// What is merged and then split is what it was; in IPv4 the packets' numbers follow each other.
func TestMergeAndSplit(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for round := range 300 {
		version := 4 + 2*(round%2)
		var packets [][]byte
		seq, port, size := random.Uint32(), uint16(1000), 1+random.IntN(1300)
		for range 1 + random.IntN(150) {
			flags := uint8(tcpAck)
			n := size
			switch random.IntN(30) {
			case 0:
				seq += 17 // lost
			case 1:
				port++
			case 2:
				n = 1 + random.IntN(1300)
			case 3:
				flags |= tcpPush
			case 4:
				flags |= 1 // FIN
			case 5:
				n = 0
			}
			p := segment(version, port, seq, n, flags)
			if random.IntN(40) == 0 {
				p[len(p)-1]++ // wrong checksum
			}
			seq += uint32(n)
			packets = append(packets, p)
		}
		var want [][]byte
		for _, p := range packets {
			want = append(want, bytes.Clone(p))
		}
		merged := frames(packets)
		var got [][]byte
		for _, f := range merged {
			if err := split(f, roomy, func(p []byte) { got = append(got, p) }); err != nil {
				t.Fatal(err)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("round %d: %d packets, want %d", round, len(got), len(want))
		}
		for i := range got {
			for _, p := range [][]byte{got[i], want[i]} {
				if version == 4 {
					clear(p[4:6])
					clear(p[10:12])
				}
			}
			if !bytes.Equal(got[i], want[i]) {
				t.Fatalf("round %d, packet %d:\ngot  % x\nwant % x", round, i, got[i], want[i])
			}
		}
	}
}

func TestEqualSegmentsAreMerged(t *testing.T) {
	for _, version := range []int{4, 6} {
		var packets [][]byte
		for i := range 40 {
			packets = append(packets, segment(version, 1, uint32(i*1000), 1000, tcpAck))
		}
		if got := len(frames(packets)); got != 1 {
			t.Errorf("IPv%d: %d frames, want 1", version, got)
		}
	}
}

// A checksum that the sender left to a network card is the kernel's to finish, and a segment too big is its to cut.
func TestUnfinished(t *testing.T) {
	for _, version := range []int{4, 6} {
		p := segment(version, 1, 1, 5000, tcpAck)
		if h := unfinished(p, 1400); h != (vnetHeader{}) {
			t.Errorf("IPv%d: a finished packet has %+v", version, h)
		}
		_, at := transport(p)
		p[len(p)-1]++
		if h := unfinished(p, 1400); h != (vnetHeader{}) {
			t.Errorf("IPv%d: a broken packet has %+v", version, h)
		}
		binary.BigEndian.PutUint16(p[at+16:], inet.Fold(inet.Pseudo(ends(p), unix.IPPROTO_TCP, len(p)-at)))
		h := unfinished(p, 1400)
		frame := make([]byte, vnetBytes, vnetBytes+len(p))
		h.encode(frame)
		var sizes []int
		err := split(append(frame, p...), roomy, func(p []byte) {
			sizes = append(sizes, len(p))
			if _, ok := trim(p, (version-4)/2); !ok ||
				inet.Fold(inet.Sum(p[at:], inet.Pseudo(ends(p), unix.IPPROTO_TCP, len(p)-at))) != 0xffff {
				t.Errorf("IPv%d: a segment is wrong", version)
			}
		})
		if err != nil || len(sizes) != 4 || slices.Max(sizes) != 1400 {
			t.Errorf("IPv%d: segments of %d bytes, %v", version, sizes, err)
		}
	}
}

func TestECN(t *testing.T) {
	const dropped = 0xff
	// RFC 6040, figure 4, with the kernel's choice where it has one
	for _, c := range []struct{ inner, outer, want uint8 }{
		{0, 0, 0}, {0, 1, 0}, {0, 2, 0}, {0, 3, dropped},
		{2, 0, 2}, {2, 1, 1}, {2, 2, 2}, {2, 3, 3},
		{1, 0, 1}, {1, 1, 1}, {1, 2, 1}, {1, 3, 3},
		{3, 0, 3}, {3, 1, 3}, {3, 2, 3}, {3, 3, 3},
	} {
		for _, version := range []int{4, 6} {
			p := segment(version, 1, 1, 10, tcpAck)
			setECN(p, c.inner)
			got := uint8(dropped)
			if decapsulate(p, 0xb8|c.outer) {
				got = class(p)
			}
			if got != c.want {
				t.Errorf("IPv%d, inner %d, outer %d: %d, want %d", version, c.inner, c.outer, got, c.want)
			}
			if _, ok := trim(p, (version-4)/2); !ok {
				t.Errorf("IPv%d, inner %d, outer %d: the header's checksum is wrong", version, c.inner, c.outer)
			}
		}
	}
	for inner, want := range map[uint8]uint8{0: 0, 1: 1, 2: 2, 3: 2, 0xb8: 0, 0xbb: 2} {
		if got := outerClass(inner); got != want {
			t.Errorf("inner class %#x: outer %#x, want %#x", inner, got, want)
		}
	}
}

func TestTooBig(t *testing.T) {
	four, six := segment(4, 1, 1, 1400, tcpAck), segment(6, 1, 1, 1400, tcpAck)
	m4, m6 := tooBig(four, 1300), tooBig(six, 1300)
	if p, ok := trim(m4, 0); !ok || len(p) != len(m4) || len(p) > 576 || m4[20] != 3 || m4[21] != 4 ||
		binary.BigEndian.Uint16(m4[26:]) != 1300 || inet.Fold(inet.Sum(m4[20:], 0)) != 0xffff {
		t.Errorf("IPv4: % x", m4)
	}
	if p, ok := trim(m6, 1); !ok || len(p) != 1280 || m6[40] != 2 || binary.BigEndian.Uint32(m6[44:]) != 1300 ||
		inet.Fold(inet.Sum(m6[40:], inet.Pseudo(ends(m6), unix.IPPROTO_ICMPV6, len(m6)-40))) != 0xffff {
		t.Errorf("IPv6: % x", m6)
	}
	for _, c := range []struct{ packet, message []byte }{{four, m4}, {six, m6}} {
		src, dst := addresses(c.packet)
		if s, d := addresses(c.message); s != dst || d != src {
			t.Errorf("from %s to %s, want from %s to %s", s, d, dst, src)
		}
		if tooBig(c.message, 100) != nil {
			t.Error("an ICMP error is answered by another")
		}
	}
	mayBeSplit := bytes.Clone(four)
	mayBeSplit[6] = 0
	if tooBig(mayBeSplit, 1300) != nil {
		t.Error("a packet that may be fragmented is answered")
	}
	if m := tooBig(six, 900); binary.BigEndian.Uint32(m[44:]) != 1280 {
		t.Error("IPv6 below its least MTU")
	}
}

func FuzzReceived(f *testing.F) {
	f.Add(segment(4, 1, 1, 20, tcpAck), uint8(3))
	f.Add(segment(6, 1, 1, 20, tcpAck|tcpPush), uint8(1))
	f.Add([]byte{0x45}, uint8(0))
	f.Fuzz(func(t *testing.T, b []byte, outer uint8) {
		for family := range 2 {
			p, ok := trim(bytes.Clone(b), family)
			if !ok {
				continue
			}
			addresses(p)
			flow(p, 1)
			if m := tooBig(p, 1280); m != nil {
				if _, ok := trim(m, family); !ok {
					t.Fatalf("the answer is not a packet: % x", m)
				}
			}
			if !decapsulate(p, outer) {
				continue
			}
			if _, ok := trim(p, family); !ok {
				t.Fatalf("no packet any more: % x", p)
			}
			for _, frame := range frames([][]byte{bytes.Clone(p), p}) {
				if len(frame) < vnetBytes+len(p) {
					t.Fatal("bytes are lost")
				}
				_ = split(frame, roomy, func([]byte) {})
			}
		}
	})
}

func FuzzFrame(f *testing.F) {
	add := func(h vnetHeader, p []byte) {
		b := make([]byte, vnetBytes)
		h.encode(b)
		f.Add(append(b, p...))
	}
	add(vnetHeader{}, segment(4, 1, 1, 20, tcpAck))
	add(vnetHeader{1, unix.VIRTIO_NET_HDR_GSO_TCPV4, 52, 100, 20, 16}, segment(4, 1, 1, 900, tcpAck))
	add(vnetHeader{1, unix.VIRTIO_NET_HDR_GSO_TCPV6, 72, 100, 40, 16}, segment(6, 1, 1, 900, tcpAck))
	add(vnetHeader{1, unix.VIRTIO_NET_HDR_GSO_UDP_L4, 28, 100, 20, 6}, segment(4, 1, 1, 900, tcpAck))
	f.Fuzz(func(t *testing.T, b []byte) {
		left := roomBytes
		_ = split(b, func(n int) []byte {
			if left -= n; left < 0 {
				return nil
			}
			return make([]byte, n)
		}, func([]byte) {})
	})
}

func FuzzListener(f *testing.F) {
	f.Add([]byte{6, 0, 1, 0, 0x15, 0xb3, 0, 0, 5, 0, 2, 0, 10, 0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = decodeListener(b) })
}
