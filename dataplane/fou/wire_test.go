package fou_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

// datagram is an IP packet with UDP inside, from and to port 7; tag is in its payload.
func datagram(src, dst netip.Addr, class uint8, tag string) []byte {
	u := binary.BigEndian.AppendUint16(nil, 7)
	u = binary.BigEndian.AppendUint16(u, 7)
	u = binary.BigEndian.AppendUint16(u, uint16(8+len(tag)))
	u = append(u, 0, 0)
	u = append(u, tag...)
	var p []byte
	if src.Is4() {
		p = append(p, 0x45, class, 0, byte(20+len(u)), 0x12, 0x34, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0)
		p = append(append(p, src.AsSlice()...), dst.AsSlice()...)
		binary.BigEndian.PutUint16(p[10:], ^words(p))
		return append(p, u...)
	}
	p = append(p, 0x60|class>>4, class<<4, 0, 0, 0, byte(len(u)), unix.IPPROTO_UDP, 64)
	p = append(append(p, src.AsSlice()...), dst.AsSlice()...)
	binary.BigEndian.PutUint16(u[6:],
		^words(append(append([]byte{0, unix.IPPROTO_UDP, 0, byte(len(u))}, p[8:40]...), u...)))
	return append(p, u...)
}

// words is the sum of 16-bit words, the slow way.
func words(b []byte) uint16 {
	s := uint32(0)
	for i, c := range b {
		s += uint32(c) << (8 * (1 - i%2))
		s = s&0xffff + s>>16
	}
	return uint16(s)
}

// inject sends an IP packet as it is.
func inject(t testing.TB, n *testns.NS, p []byte, dst netip.Addr) {
	t.Helper()
	n.Must("sending a raw packet", func() error {
		af := unix.AF_INET
		var to unix.Sockaddr = &unix.SockaddrInet4{}
		if dst.Is6() {
			af, to = unix.AF_INET6, &unix.SockaddrInet6{Addr: dst.As16()}
		} else {
			to = &unix.SockaddrInet4{Addr: dst.As4()}
		}
		fd, err := unix.Socket(af, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, p, 0, to)
	})
}

// outer returns what goes on the wire for packets of each family and class.
func outer(t *testing.T, driver string) map[string][]byte {
	t.Helper()
	s := newScene(t, driver, fou.Userspace, false) // the kernel's listener writes into what the capture shares with it
	out := map[string][]byte{}
	w := capture(t, s.gateway, "under")
	for _, pair := range [][2]netip.Addr{{client4, target4}, {client6, target6}} {
		for _, class := range []uint8{0, 1, 2, 3, 0xb8, 0xbb} {
			tag := fmt.Sprintf("class %#02x to %s", class, pair[1])
			end := time.Now().Add(deadline)
			for out[tag] == nil && time.Now().Before(end) { // the first may be lost while the neighbour is looked for
				inject(t, s.client, datagram(pair[0], pair[1], class, tag), pair[1])
				out[tag] = w.try(func(p []byte) bool { return bytes.HasSuffix(p, []byte(tag)) })
			}
			if out[tag] == nil {
				t.Fatalf("never seen on the wire: %s", tag)
			}
		}
	}
	return out
}

func TestOuterHeader(t *testing.T) {
	for tag, p := range outer(t, fou.Userspace) {
		var inner, ecn uint8
		var to string
		fmt.Sscanf(tag, "class %v to %s", &inner, &to)
		if ecn = inner & 3; ecn == 3 {
			ecn = 2
		}
		udp := p[20:]
		if to == target4.String() {
			if p[0] != 0x45 || p[1] != ecn || p[6] != 0x40 || p[8] != dataplane.FoUTTL || p[9] != unix.IPPROTO_UDP {
				t.Errorf("%s: outer header % x: want ECN %d, no fragments, TTL %d, UDP", tag, p[:20], ecn, dataplane.FoUTTL)
			}
		} else {
			udp = p[40:]
			if p[0]<<4|p[1]>>4 != ecn || p[6] != unix.IPPROTO_UDP || p[7] != dataplane.FoUTTL {
				t.Errorf("%s: outer header % x: want ECN %d, UDP, hop limit %d", tag, p[:40], ecn, dataplane.FoUTTL)
			}
		}
		if s, d := binary.BigEndian.Uint16(udp), binary.BigEndian.Uint16(udp[2:]); s != dataplane.FoUPort ||
			d != dataplane.FoUPort {
			t.Errorf("%s: ports %d and %d, want %d", tag, s, d, dataplane.FoUPort)
		}
	}
}

// Both drivers put the same bytes on the wire, but for the IPv4 packet's number, with the header's checksum, and the
// IPv6 flow label.
func TestSameBytesByBothDrivers(t *testing.T) {
	needKernel(t)
	tun, kernel := outer(t, fou.Userspace), outer(t, fou.Kernel)
	for tag, a := range tun {
		b := kernel[tag]
		for _, p := range [][]byte{a, b} {
			if p[0]>>4 == 4 {
				copy(p[4:6], []byte{0, 0})
				copy(p[10:12], []byte{0, 0})
			} else {
				p[1] &= 0xf0
				copy(p[2:4], []byte{0, 0})
			}
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s:\nTUN    % x\nkernel % x", tag, a, b)
		}
	}
}

// outside is a UDP socket in the client's namespace that speaks to the gateway's FoU port as it likes.
func outside(t *testing.T, s *scene, from, to netip.Addr, class int) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	s.client.Must("dialing", func() (err error) {
		c, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, dataplane.FoUPort)))
		if err != nil {
			return err
		}
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(func(fd uintptr) {
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TOS, class)
			unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_TCLASS, class)
		})
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// The TUN driver lets in what a tunnel's other end sent in its own name, and counts the rest.
func TestWhatIsRefused(t *testing.T) {
	s := newScene(t, fou.Userspace, fou.Userspace, false)
	other4, other6 := netip.MustParseAddr("10.100.1.9"), netip.MustParseAddr("fd00:1::9")
	s.client.Address("under", netip.PrefixFrom(other4, 16), netip.PrefixFrom(other6, 16))
	cut := func(p []byte, n int) []byte { return p[:len(p)-n] }
	with := func(p []byte, at int, v byte) []byte { p[at] = v; return p }
	good4, good6 := func() []byte { return datagram(client4, target4, 2, "good") },
		func() []byte { return datagram(client6, target6, 2, "good") }
	for _, c := range []struct {
		name                string
		from                netip.Addr
		class               int
		packet              []byte
		stranger, malformed uint64
	}{
		{"another's address inside, IPv4", client4, 0, datagram(other4, target4, 0, "x"), 1, 0},
		{"another's address inside, IPv6", client6, 0, datagram(other6, target6, 0, "x"), 1, 0},
		{"from no client, IPv4", other4, 0, datagram(other4, target4, 0, "x"), 1, 0},
		{"from no client, IPv6", other6, 0, datagram(other6, target6, 0, "x"), 1, 0},
		{"from no client in a client's name", other4, 0, good4(), 1, 0},
		{"IPv6 in IPv4", client4, 0, datagram(client6, target6, 0, "x"), 0, 1},
		{"IPv4 in IPv6", client6, 0, datagram(client4, target4, 0, "x"), 0, 1},
		{"cut, IPv4", client4, 0, cut(good4(), 1), 0, 1},
		{"cut, IPv6", client6, 0, cut(good6(), 1), 0, 1},
		{"a header cut", client4, 0, good4()[:19], 0, 1},
		{"a header cut, IPv6", client6, 0, good6()[:39], 0, 1},
		{"a header length too short", client4, 0, with(good4(), 0, 0x44), 0, 1},
		{"a header's checksum wrong", client4, 0, with(good4(), 10, 1), 0, 1},
		{"one byte", client4, 0, []byte{0x45}, 0, 1},
		{"marked as congested, unable", client4, 3, datagram(client4, target4, 0, "x"), 0, 1},
		{"marked as congested, unable, IPv6", client6, 3, datagram(client6, target6, 0, "x"), 0, 1},
	} {
		before, _ := s.far.Stats()
		to := endpoint4
		if c.from.Is6() {
			to = endpoint6
		}
		if _, err := outside(t, s, c.from, to, c.class).Write(c.packet); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		await(t, c.name, func() bool {
			now, _ := s.far.Stats()
			return now.DroppedStranger-before.DroppedStranger == c.stranger &&
				now.DroppedMalformed-before.DroppedMalformed == c.malformed && now.RxPackets == before.RxPackets
		})
	}
	before, _ := s.far.Stats()
	outside(t, s, client4, endpoint4, 0).Write(append(good4(), "what follows"...))
	outside(t, s, client6, endpoint6, 0).Write(good6())
	for _, o := range []struct {
		c           *net.UDPConn
		level, name int
		packet      []byte
	}{{outside(t, s, client4, endpoint4, 0), unix.SOL_SOCKET, unix.SO_NO_CHECK, good4()},
		{outside(t, s, client6, endpoint6, 0), unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_TX, good6()}} {
		raw, _ := o.c.SyscallConn()
		raw.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), o.level, o.name, 1); err != nil {
				t.Error(err)
			}
		})
		o.c.Write(o.packet) // tunnels of others send no checksum outside
	}
	await(t, "four good ones", func() bool { now, _ := s.far.Stats(); return now.RxPackets == before.RxPackets+4 })
}

func await(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(deadline); !f(); {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// The congestion mark of the outer header reaches the packet inside, with both drivers.
func TestCongestionMarkGoesInside(t *testing.T) {
	for _, driver := range drivers(t) {
		s := newScene(t, fou.Userspace, driver, false)
		for _, c := range []struct {
			from, to, target netip.Addr
			outer            int
			inner, want      uint8
		}{{client4, endpoint4, target4, 3, 0xba, 0xbb}, {client6, endpoint6, target6, 3, 0xb9, 0xbb},
			{client4, endpoint4, target4, 1, 2, 1}, {client6, endpoint6, target6, 1, 2, 1},
			{client4, endpoint4, target4, 2, 1, 1}, {client4, endpoint4, target4, 0, 3, 3}} {
			// no two cases have the same: one may come late
			tag := fmt.Sprintf("outer %d, inner %#x, from %s", c.outer, c.inner, c.from)
			w := capture(t, s.gateway, s.far.Link(c.to, c.from))
			o := outside(t, s, c.from, c.to, c.outer)
			var got []byte
			for end := time.Now().Add(deadline); got == nil && time.Now().Before(end); {
				o.Write(datagram(c.from, c.target, c.inner, tag))
				got = w.try(func(p []byte) bool { return bytes.HasSuffix(p, []byte(tag)) })
			}
			if want := datagram(c.from, c.target, c.want, tag); !bytes.Equal(got, want) {
				t.Errorf("%s, %s, to %s: % x, want % x", driver, tag, c.to, got, want)
			}
		}
	}
}

// What comes to a client from another address than a tunnel leads to arrives by the catch-all device, with both
// drivers.
func TestAnyTakesOthersAnswers(t *testing.T) {
	for _, driver := range drivers(t) {
		s := newScene(t, fou.Userspace, driver, false)
		spec := fou.Spec{IPv4: true, IPv6: true, Any: true} // the gateway's namespace plays a client that knows no tunnel
		if _, err := s.far.Reconcile(spec); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct{ from, to, target netip.Addr }{{client4, endpoint4, target4},
			{client6, endpoint6, target6}} {
			link := dataplane.FoUAny4
			if c.to.Is6() {
				link = dataplane.FoUAny6
			}
			w := capture(t, s.gateway, link)
			o := outside(t, s, c.from, c.to, 0)
			var got []byte
			for end := time.Now().Add(deadline); got == nil && time.Now().Before(end); {
				o.Write(datagram(c.target, c.to, 0, "answer"))
				got = w.try(func(p []byte) bool { return bytes.HasSuffix(p, []byte("answer")) })
			}
			if got == nil {
				t.Errorf("%s: an answer from %s did not arrive by %s", driver, c.from, link)
			}
		}
		spec.Any = false
		if _, err := s.far.Reconcile(spec); err != nil {
			t.Fatal(err)
		}
		if driver == fou.Userspace {
			before, _ := s.far.Stats()
			outside(t, s, client4, endpoint4, 0).Write(datagram(target4, endpoint4, 0, "answer"))
			await(t, "a stranger's without the catch-all device", func() bool {
				now, _ := s.far.Stats()
				return now.DroppedStranger == before.DroppedStranger+1
			})
		}
	}
}
