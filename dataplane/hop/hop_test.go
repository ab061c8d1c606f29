package hop

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/inet"
)

var (
	pfx  = netip.MustParsePrefix
	addr = netip.MustParseAddr
)

// table is that of 10.4.0.1, with a way by 10.4.0.2 and one by 10.4.0.3, both of whom may bring packets.
func table(t testing.TB) *Table {
	t.Helper()
	out, notes := NewTable(dataplane.Hops{
		Self: addr("10.4.0.1"),
		Routes: []dataplane.HopRoute{
			{Prefix: pfx("10.4.8.0/24"), Via: addr("10.4.0.2")}, {Prefix: pfx("10.4.8.7/32"), Via: addr("10.4.0.3")},
			{Prefix: pfx("fd00:8::/64"), Via: addr("10.4.0.2")},
			{Prefix: pfx("10.4.0.2/32"), Via: addr("10.4.0.2"), Last: true},
			{Prefix: pfx("fd00:5::2/128"), Via: addr("10.4.0.2"), Last: true},
			{Prefix: pfx("10.4.8.9/32"), Via: addr("10.4.8.9"), Last: true}, // within a wider one
		},
		Own: []netip.Prefix{pfx("10.4.0.1/32"), pfx("fd00:5::1/128")},
		Guards: []dataplane.HopGuard{
			{From: addr("10.4.0.2"), Sources: []netip.Prefix{pfx("10.4.8.0/24"), pfx("fd00:8::/64")}},
			{From: addr("10.4.0.3"), Sources: []netip.Prefix{pfx("10.4.9.0/24")}},
		},
	})
	if out == nil || len(notes) > 0 {
		t.Fatalf("%v, notes %q", out, notes)
	}
	return out
}

// packet is an IP packet with a payload of n bytes.
func packet(from, to string, class byte, n int) []byte {
	src, dst := addr(from), addr(to)
	var b []byte
	if src.Is6() {
		b = []byte{0x60 | class>>4, class << 4, 0, 0, 0, 0, 17, 64}
		binary.BigEndian.PutUint16(b[4:], uint16(n))
	} else {
		b = []byte{0x45, class, 0, 0, 1, 2, 0x40, 0, 64, 17, 0, 0}
		binary.BigEndian.PutUint16(b[2:], uint16(20+n))
	}
	b = append(append(b, src.AsSlice()...), dst.AsSlice()...)
	if src.Is4() {
		binary.BigEndian.PutUint16(b[10:], inet.Checksum(b))
	}
	for i := range n {
		b = append(b, byte(i))
	}
	return b
}

// within is a packet inside another one.
func within(from, to string, inner []byte) []byte {
	outer := packet(from, to, 0, len(inner))
	copy(outer[20:], inner)
	outer[9] = inIPv4
	if inner[0]>>4 == 6 {
		outer[9] = inIPv6
	}
	return outer
}

func class(p []byte) byte {
	if p[0]>>4 == 6 {
		return p[0]<<4 | p[1]>>4
	}
	return p[1]
}

func sound(t *testing.T, header []byte) {
	t.Helper()
	if s := inet.Checksum(header[:20]); header[0]>>4 == 4 && s != 0 {
		t.Errorf("the checksum of % x is wrong by %#x", header[:20], s)
	}
}

// link is a TUN device that gives what it holds and keeps what it gets.
type link struct {
	tun.Device
	give [][]byte
	got  [][]byte
	err  error
}

func (l *link) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	for i, p := range l.give {
		sizes[i] = copy(bufs[i][offset:], p)
	}
	return len(l.give), l.err
}

func (l *link) Write(bufs [][]byte, offset int) (int, error) {
	for _, b := range bufs {
		if cap(b) < offset {
			return 0, errors.New("no room")
		}
		l.got = append(l.got, bytes.Clone(b[offset:]))
	}
	return len(bufs), nil
}

const offset = 16 // wireguard-go's

func read(t *testing.T, d *Device, count int) [][]byte {
	t.Helper()
	bufs, sizes := make([][]byte, count), make([]int, count)
	for i := range bufs {
		bufs[i] = make([]byte, 2000)
	}
	n, err := d.Read(bufs, sizes, offset)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		bufs[i] = bufs[i][offset : offset+sizes[i]]
	}
	return bufs[:n]
}

func write(t *testing.T, d *Device, packets ...[]byte) {
	t.Helper()
	var bufs [][]byte
	for _, p := range packets {
		bufs = append(bufs, append(make([]byte, offset, 2000), p...))
	}
	if _, err := d.Write(bufs, offset); err != nil {
		t.Fatal(err)
	}
}

// TestPacketsForOthersAreWrapped: by the longest prefix, with the class of the packet inside; others stay as they are.
func TestPacketsForOthersAreWrapped(t *testing.T) {
	l := &link{}
	d := NewDevice(l)
	d.Set(table(t))
	wrapped, each := uint64(0), uint64(0)
	for _, c := range []struct{ from, to, via string }{
		{"10.4.0.1", "10.4.8.1", "10.4.0.2"}, {"10.4.0.1", "10.4.8.7", "10.4.0.3"}, {"10.4.0.1", "10.4.8.8", "10.4.0.2"},
		{"fd00:5::1", "fd00:8::1", "10.4.0.2"},
		{"10.4.9.1", "10.4.0.2", "10.4.0.2"}, {"fd00:9::1", "fd00:5::2", "10.4.0.2"}, // passed on to where it belongs
		{"10.4.0.1", "10.4.8.9", ""}, {"10.4.9.1", "10.4.8.9", "10.4.8.9"},
		{"10.4.0.1", "10.4.9.1", ""}, {"10.4.0.1", "10.4.0.2", ""}, {"10.4.0.1", "255.255.255.255", ""},
		{"fd00:5::1", "fd00:5::2", ""}, {"fd00:5::1", "::ffff:10.4.8.1", ""},
	} {
		p := packet(c.from, c.to, 0xb9, 100)
		l.give = append(l.give, p)
		out := read(t, d, len(l.give)) // with those before
		got := out[len(out)-1]
		if c.via != "" {
			each++
		}
		wrapped += each
		if c.via == "" {
			if !bytes.Equal(got, p) {
				t.Errorf("a packet to %s was changed: % x", c.to, got)
			}
			continue
		}
		if len(got) != overhead+len(p) || !bytes.Equal(got[overhead:], p) {
			t.Fatalf("the packet to %s is not inside: % x", c.to, got)
		}
		sound(t, got)
		h := got[:overhead]
		if from, _ := address(h, 12, 0); from != addr("10.4.0.1") {
			t.Errorf("%s: from %s", c.to, from)
		}
		if to, _ := address(h, 16, 0); to != addr(c.via) {
			t.Errorf("%s: to %s, want %s", c.to, to, c.via)
		}
		if h[0] != 0x45 || h[1] != 0xb9 || int(binary.BigEndian.Uint16(h[2:])) != len(got) ||
			h[6] != 0x40 || h[7] != 0 || h[8] != 64 {
			t.Errorf("%s: header % x", c.to, h)
		}
		if want := map[bool]byte{true: 41, false: 4}[p[0]>>4 == 6]; h[9] != want {
			t.Errorf("%s: protocol %d, want %d", c.to, h[9], want)
		}
	}
	if n := d.Counts().Wrapped; n != wrapped {
		t.Errorf("%d packets counted, want %d", n, wrapped)
	}
	l.give = append(l.give, packet("10.4.0.1", "10.4.8.1", 0, 2000-offset-overhead-overhead+1))
	if out := read(t, d, len(l.give)); len(out[len(out)-1]) != 0 || d.Counts().TooLarge != 1 {
		t.Errorf("a packet without room for another header: %d bytes, %+v", len(out[len(out)-1]), d.Counts())
	}
}

// TestRedirectsStayHere, and other ICMP messages do not.
func TestRedirectsStayHere(t *testing.T) {
	l := &link{}
	d := NewDevice(l)
	d.Set(table(t))
	for kind := range 20 {
		p := packet("10.4.0.1", "10.4.0.2", 0, 28)
		p[9], p[20] = 1, byte(kind)
		l.give = append(l.give, p)
	}
	for kind, p := range read(t, d, len(l.give)) {
		if (len(p) == 0) != (kind == 5) {
			t.Errorf("ICMP type %d: %d bytes", kind, len(p))
		}
	}
	d.Set(nil)
	if out := read(t, d, len(l.give)); len(out[5]) == 0 {
		t.Error("without hops a redirect is dropped")
	}
}

// TestReadKeepsErrors: what was read is wrapped even so, as wireguard-go uses it.
func TestReadKeepsErrors(t *testing.T) {
	l := &link{give: [][]byte{packet("10.4.0.1", "10.4.8.1", 0, 1)}, err: tun.ErrTooManySegments}
	d := NewDevice(l)
	d.Set(table(t))
	b, sizes := [][]byte{make([]byte, 200)}, []int{0}
	if n, err := d.Read(b, sizes, offset); n != 1 || !errors.Is(err, tun.ErrTooManySegments) || sizes[0] != 41 {
		t.Errorf("%d packets of %v bytes, %v", n, sizes, err)
	}
}

// TestGuards: which packets come out, and how the others are counted.
func TestGuards(t *testing.T) {
	good4, good6 := packet("10.4.8.1", "10.4.0.1", 0, 9), packet("fd00:8::1", "fd00:5::1", 0, 9)
	with := func(p []byte, f func([]byte)) []byte { p = bytes.Clone(p); f(p); return p }
	ours := within("10.4.0.2", "10.4.0.1", good4)
	ours6 := within("10.4.0.2", "10.4.0.1", good6)
	for _, c := range []struct {
		what    string
		packet  []byte
		want    []byte // nil: it is dropped
		refused bool   // and else malformed
	}{
		{"IPv4", ours, good4, false},
		{"IPv6", ours6, good6, false},
		{"a plain packet", good4, good4, false},
		{"plain IPv6", good6, good6, false},
		{"for another node", within("10.4.0.2", "10.4.0.9", good4), within("10.4.0.2", "10.4.0.9", good4), false},
		{"bytes behind the packet inside", within("10.4.0.2", "10.4.0.1", append(bytes.Clone(good4), 1, 2, 3)), good4, false},
		{"bytes behind the packet", append(bytes.Clone(ours), 1, 2, 3), good4, false},
		{"a packet inside one inside", within("10.4.0.2", "10.4.0.1", within("10.4.8.1", "10.4.0.1", good4)),
			within("10.4.8.1", "10.4.0.1", good4), false},
		{"another's source", within("10.4.0.2", "10.4.0.1", packet("10.4.9.1", "10.4.0.1", 0, 9)), nil, true},
		{"the source of another node's guard", within("10.4.0.3", "10.4.0.1", good4), nil, true},
		{"another's IPv6 source", within("10.4.0.2", "10.4.0.1", packet("fd00:9::1", "fd00:5::1", 0, 9)), nil, true},
		{"an IPv4 source as IPv6", within("10.4.0.2", "10.4.0.1", packet("::ffff:10.4.8.1", "fd00:5::1", 0, 9)), nil, true},
		{"who has no guard", within("10.4.0.4", "10.4.0.1", good4), nil, true},
		{"a first fragment", with(ours, func(p []byte) { p[6] = 0x20 }), nil, false},
		{"a later fragment", with(ours, func(p []byte) { p[7] = 1 }), nil, false},
		{"options", with(ours, func(p []byte) { p[0] = 0x46 }), nil, false},
		{"a header that is too short", with(ours, func(p []byte) { p[0] = 0x44 }), nil, false},
		{"longer than it is", with(ours, func(p []byte) { p[3]++ }), nil, false},
		{"shorter than a header", with(ours, func(p []byte) { p[3] = 19 }), nil, false},
		{"longer inside than it is", with(ours, func(p []byte) { p[23]++ }), nil, false},
		{"longer inside than it is, IPv6", with(ours6, func(p []byte) { p[25]++ }), nil, false},
		{"IPv6 under IPv4's number", with(ours6, func(p []byte) { p[9] = 4 }), nil, false},
		{"IPv4 under IPv6's number", with(ours, func(p []byte) { p[9] = 41 }), nil, false},
		{"a header inside that is too short", with(ours, func(p []byte) { p[20] = 0x44 }), nil, false},
		{"a header inside that is too long", with(ours, func(p []byte) { p[20] = 0x4f }), nil, false},
		{"nothing inside", with(ours[:20], func(p []byte) { p[3] = 20 }), nil, false},
	} {
		l := &link{}
		d := NewDevice(l)
		d.Set(table(t))
		write(t, d, good6, c.packet, good6) // it leaves others alone
		want := [][]byte{good6, good6}
		if c.want != nil {
			want = [][]byte{good6, c.want, good6}
		}
		if fmt.Sprintf("%x", l.got) != fmt.Sprintf("%x", want) {
			t.Errorf("%s: out came\n%x, want\n%x", c.what, l.got, want)
		}
		n := d.Counts()
		dropped := c.want == nil
		if n.Refused+n.Malformed != map[bool]uint64{true: 1}[dropped] || dropped && (n.Refused == 1) != c.refused {
			t.Errorf("%s: counted as %+v", c.what, n)
		}
		by := netip.Addr{}
		if c.refused {
			by = netip.AddrFrom4([4]byte(c.packet[12:16]))
		}
		if n.RefusedOf != by {
			t.Errorf("%s: it was brought by %s, want %s", c.what, n.RefusedOf, by)
		}
		l.got = nil
		d.Set(nil)
		write(t, d, c.packet)
		if len(l.got) != 1 || !bytes.Equal(l.got[0], c.packet) {
			t.Errorf("%s: without hops out came %x", c.what, l.got)
		}
	}
}

// TestCongestionIsPassedOn: all of RFC 6040's figure 4, with sound checksums, and the class is else the inner packet's.
func TestCongestionIsPassedOn(t *testing.T) {
	const dropped = 9
	for inner, row := range [4][4]byte{ // by the outer field: not ECT, ECT(1), ECT(0), CE
		{0, 0, 0, dropped},
		{1, 1, 1, 3},
		{2, 1, 2, 3},
		{3, 3, 3, 3},
	} {
		for outer, want := range row {
			for _, p := range [][]byte{packet("10.4.8.1", "10.4.0.1", 0xb8|byte(inner), 9),
				packet("fd00:8::1", "fd00:5::1", 0xb8|byte(inner), 9)} {
				l := &link{}
				d := NewDevice(l)
				d.Set(table(t))
				w := within("10.4.0.2", "10.4.0.1", p)
				w[1] = 0x28 | byte(outer)
				write(t, d, w)
				switch {
				case want == dropped:
					if len(l.got) > 0 || d.Counts().Congested != 1 {
						t.Errorf("inner %d, outer %d: %x, %+v", inner, outer, l.got, d.Counts())
					}
				case len(l.got) != 1 || class(l.got[0]) != 0xb8|want:
					t.Errorf("inner %d, outer %d: %x, want %d", inner, outer, l.got, want)
				default:
					sound(t, l.got[0])
				}
			}
		}
	}
}

// TestLongestPrefixWins compares the ranges with what a search of all prefixes says.
func TestLongestPrefixWins(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random := func() netip.Addr {
		if r.IntN(2) == 0 { // few bits that differ, so that prefixes nest, and both ends of the families
			return netip.AddrFrom4([4]byte{byte(r.IntN(2) * 255), byte(r.IntN(2) * 255), byte(r.IntN(256)), byte(r.IntN(256))})
		}
		var a [16]byte
		a[0], a[1], a[14], a[15] = byte(r.IntN(2)*255), byte(r.IntN(2)*255), byte(r.IntN(256)), byte(r.IntN(256))
		if a[0] == 255 {
			for i := range 14 {
				a[i] = 255
			}
		}
		return netip.AddrFrom16(a)
	}
	for round := range 300 {
		var entries []entry[int]
		seen := map[netip.Prefix]bool{}
		for i := range r.IntN(40) {
			a := random()
			p, _ := a.Prefix(r.IntN(a.BitLen() + 1))
			if !seen[p] {
				seen[p] = true
				entries = append(entries, entry[int]{p, 1 + i%5})
			}
		}
		rs := newRanges(entries)
		for range 200 {
			a := random()
			if r.IntN(4) == 0 {
				a = a.Next()
			}
			if !a.IsValid() {
				continue
			}
			best, want := -1, 0
			for _, e := range entries {
				if e.prefix.Contains(a) && e.prefix.Bits() > best {
					best, want = e.prefix.Bits(), e.value
				}
			}
			if have := rs.of(a); have != want {
				t.Fatalf("round %d: %s has %d, want %d, of %v", round, a, have, want, entries)
			}
		}
	}
}

func TestNotes(t *testing.T) {
	if d, notes := NewTable(dataplane.Hops{}); d != nil || notes != nil {
		t.Errorf("no hops: %v, %q", d, notes)
	}
	if d, notes := NewTable(dataplane.Hops{Self: addr("fd00::1")}); d != nil || len(notes) != 1 {
		t.Errorf("IPv6: %v, %q", d, notes)
	}
	_, notes := NewTable(dataplane.Hops{Self: addr("10.4.0.1"),
		Routes: []dataplane.HopRoute{{Prefix: pfx("10.0.0.0/8"), Via: addr("fd00::1")}},
		Guards: []dataplane.HopGuard{{From: addr("fd00::7")}}})
	text := strings.Join(notes, "\n")
	if len(notes) != 2 || !strings.Contains(text, "fd00::1") || !strings.Contains(text, "fd00::7") {
		t.Errorf("notes %q", notes)
	}
}

// TestNothingIsAllocated on the way of a packet.
func TestNothingIsAllocated(t *testing.T) {
	d, l, bufs, sizes := loaded(t)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := d.Read(bufs, sizes, offset); err != nil {
			t.Fatal(err)
		}
		back(l, bufs, sizes)
		if _, err := d.Write(l.out, offset); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations for %d packets", n, len(bufs))
	}
	if c := d.Counts(); c.Wrapped == 0 || c.Wrapped != c.Unwrapped {
		t.Errorf("%+v", c)
	}
}

// echo is a TUN device with the same packets all the time, which forgets what it gets.
type echo struct {
	tun.Device
	packet []byte
	out    [][]byte
}

func (e *echo) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	for i := range bufs {
		sizes[i] = copy(bufs[i][offset:], e.packet)
	}
	return len(bufs), nil
}

func (e *echo) Write(bufs [][]byte, _ int) (int, error) { return len(bufs), nil }

// loaded is a device of a node in a mesh of 2,000 others behind hops, which bring their packets to it.
func loaded(t testing.TB) (*Device, *echo, [][]byte, []int) {
	t.Helper()
	h := dataplane.Hops{Self: addr("10.4.0.1")}
	g := dataplane.HopGuard{From: h.Self}
	for i := range 2000 {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4, byte(8 + i>>8), byte(i)}), 32)
		h.Routes = append(h.Routes, dataplane.HopRoute{Prefix: p, Via: h.Self})
		g.Sources = append(g.Sources, p)
	}
	h.Guards = []dataplane.HopGuard{g}
	table, notes := NewTable(h)
	if len(notes) > 0 {
		t.Fatal(notes)
	}
	l := &echo{packet: packet("10.4.9.1", "10.4.9.2", 0, 1380)}
	d := NewDevice(l)
	d.Set(table)
	bufs, sizes := make([][]byte, 64), make([]int, 64)
	for i := range bufs {
		bufs[i] = make([]byte, 1<<16)
	}
	l.out = make([][]byte, 0, len(bufs))
	return d, l, bufs, sizes
}

func back(l *echo, bufs [][]byte, sizes []int) {
	l.out = l.out[:0]
	for i, b := range bufs {
		l.out = append(l.out, b[:offset+sizes[i]])
	}
}

// BenchmarkHop: what a full packet costs on the way out and in, in a mesh of 2,000 nodes behind hops.
func BenchmarkHop(b *testing.B) {
	run := func(b *testing.B, set bool) {
		d, l, bufs, sizes := loaded(b)
		if !set {
			d.Set(nil)
		}
		b.ReportAllocs()
		packets := 0
		for b.Loop() {
			if _, err := d.Read(bufs, sizes, offset); err != nil {
				b.Fatal(err)
			}
			back(l, bufs, sizes)
			if _, err := d.Write(l.out, offset); err != nil {
				b.Fatal(err)
			}
			packets += len(bufs)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(packets), "ns/packet")
	}
	b.Run("hops", func(b *testing.B) { run(b, true) })
	b.Run("none", func(b *testing.B) { run(b, false) })
}

// FuzzUnwrap: whatever comes, only a whole packet from an allowed source comes out, and it lies within what came.
func FuzzUnwrap(f *testing.F) {
	tab := table(f)
	f.Add(within("10.4.0.2", "10.4.0.1", packet("10.4.8.1", "10.4.0.1", 1, 9)))
	f.Add(within("10.4.0.2", "10.4.0.1", packet("fd00:8::1", "fd00:5::1", 3, 9)))
	f.Add(within("10.4.0.3", "10.4.0.1", packet("10.4.8.1", "10.4.0.1", 0, 9)))
	f.Add(packet("10.4.0.2", "10.4.0.1", 0, 9))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, p []byte) {
		came := bytes.Clone(p)
		n, v := tab.unwrap(p)
		if v != inside {
			if n != 0 || !bytes.Equal(p, came) {
				t.Fatalf("verdict %d changed % x to %d bytes % x", v, came, n, p)
			}
			return
		}
		inner := p[overhead : overhead+n]
		source, ok := address(inner, 12, 8)
		if !ok || !tab.allows([4]byte(came[12:16]), source) || [4]byte(came[16:20]) != tab.self {
			t.Fatalf("% x came out of % x", inner, came)
		}
		if inner[0]>>4 != came[overhead]>>4 || !bytes.Equal(inner[12:], came[overhead+12:overhead+n]) {
			t.Fatalf("% x came out of % x", inner, came)
		}
		if via, ok := tab.next(inner); ok { // and back
			b := append(make([]byte, overhead), inner...)
			tab.wrap(b, via)
			if inet.Checksum(b[:overhead]) != 0 || length(b[overhead:], b[9]) != n {
				t.Fatalf("% x was wrapped as % x", inner, b)
			}
		}
	})
}
