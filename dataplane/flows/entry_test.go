package flows

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/internal/nfnl"
	"github.com/skeinmesh/skein/internal/testns"
)

func tcp4() entry {
	return entry{
		proto: unix.IPPROTO_TCP, status: seenReply | assured, timeout: 300, mark: 7,
		src: netip.MustParseAddr("10.1.0.2"), dst: netip.MustParseAddr("198.51.100.7"),
		nat:     netip.MustParseAddr("192.0.2.99"),
		srcPort: 40000, dstPort: 443, natPort: 40001,
		state: 3, scale: [2]uint8{7, 9}, flags: [2]uint8{3, 3},
	}
}

func ping6() entry {
	return entry{
		proto: unix.IPPROTO_ICMPV6, status: seenReply, timeout: 29, zone: 3,
		src: netip.MustParseAddr("fd01::2"), dst: netip.MustParseAddr("2001:db8::7"),
		nat:     netip.MustParseAddr("2001:db8:2::99"),
		srcPort: 17, dstPort: icmp6Echo << 8, natPort: 18,
	}
}

func TestEntryIsReadAsWritten(t *testing.T) {
	for _, e := range []entry{tcp4(), ping6()} {
		b := e.append(nil)
		if len(b) > MaxEntryBytes {
			t.Errorf("%d bytes, the largest has %d", len(b), MaxEntryBytes)
		}
		if got, err := parse(b); err != nil || got != e {
			t.Errorf("wrote %+v, read %+v: %v", e, got, err)
		}
	}
}

func TestEntryIsRefused(t *testing.T) {
	any4, six := netip.IPv4Unspecified(), netip.MustParseAddr("fd01::2")
	for _, c := range []struct {
		what   string
		change func(*entry)
	}{
		{"protocol", func(e *entry) { e.proto = unix.IPPROTO_ESP }},
		{"status", func(e *entry) { e.status = 1 << 2 }},
		{"no timeout", func(e *entry) { e.timeout = 0 }},
		{"endless timeout", func(e *entry) { e.timeout = maxTimeout + 1 }},
		{"source", func(e *entry) { e.src = any4 }},
		{"destination", func(e *entry) { e.dst = netip.MustParseAddr("224.0.0.1") }},
		{"loopback", func(e *entry) { e.dst = netip.MustParseAddr("127.0.0.1") }},
		{"translation", func(e *entry) { e.nat = any4 }},
		{"IPv4 in IPv6", func(e *entry) {
			*e = ping6()
			e.dst = netip.MustParseAddr("::ffff:192.0.2.1")
		}},
		{"source port", func(e *entry) { e.srcPort = 0 }},
		{"destination port", func(e *entry) { e.dstPort = 0 }},
		{"translated port", func(e *entry) { e.natPort = 0 }},
		{"TCP state 0", func(e *entry) { e.state = 0 }},
		{"TCP state", func(e *entry) { e.state = 10 }},
		{"window scale", func(e *entry) { e.scale[1] = 15 }},
		{"TCP flags", func(e *entry) { e.flags[0] = 0x80 }},
		{"SCTP state", func(e *entry) { e.proto, e.state = unix.IPPROTO_SCTP, 200 }},
		{"ICMP answer", func(e *entry) { e.proto, e.dstPort = unix.IPPROTO_ICMP, 0 }},
		{"ICMP code", func(e *entry) { e.proto, e.dstPort = unix.IPPROTO_ICMP, 8<<8|1 }},
		{"ICMP error", func(e *entry) { e.proto, e.dstPort = unix.IPPROTO_ICMP, 3<<8 }},
		{"ICMPv6 in IPv4", func(e *entry) { e.proto, e.dstPort = unix.IPPROTO_ICMPV6, icmp6Echo<<8 }},
	} {
		e := tcp4()
		c.change(&e)
		if _, err := parse(e.append(nil)); !errors.Is(err, ErrEntry) {
			t.Errorf("%s: %v", c.what, err)
		}
	}
	good := tcp4()
	b := good.append(nil)
	for n := range b {
		if _, err := parse(b[:n]); !errors.Is(err, ErrEntry) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for what, b := range map[string][]byte{
		"one more byte": append(bytes.Clone(b), 0), "version": append([]byte{2}, b[1:]...),
		"family": append([]byte{1, 5}, b[2:]...),
	} {
		if _, err := parse(b); !errors.Is(err, ErrEntry) {
			t.Errorf("%s: %v", what, err)
		}
	}
	mixed := tcp4()
	mixed.nat = six
	if mixed.check() == nil {
		t.Error("translated into another family")
	}
}

func TestMatch(t *testing.T) {
	e4, e6 := tcp4(), ping6()
	other := netip.MustParseAddr("10.9.9.9")
	for _, c := range []struct {
		m      Match
		v4, v6 bool
	}{
		{Match{}, false, false},
		{Match{Source4: e4.nat}, true, false},
		{Match{Source6: e6.nat}, false, true},
		{Match{Source4: e4.nat, Source6: e6.nat}, true, true},
		{Match{Source4: other, Source6: e6.nat}, false, true},
		{Match{Clients: []netip.Addr{e6.src, other, e4.src}}, true, true},
		{Match{Clients: []netip.Addr{other}}, false, false},
		{Match{Source4: e4.nat, Clients: []netip.Addr{other, e6.src}}, false, true},
		{Match{Source4: other, Clients: []netip.Addr{e4.src}}, false, false},
	} {
		s := c.m.sorted()
		if g4, g6 := s.has(&e4) == nil, s.has(&e6) == nil; g4 != c.v4 || g6 != c.v6 {
			t.Errorf("%+v: IPv4 %v, IPv6 %v", c.m, g4, g6)
		}
		if g4, g6 := c.m.has(&e4) == nil, c.m.has(&e6) == nil; g4 != c.v4 || g6 != c.v6 {
			t.Errorf("%+v unsorted: IPv4 %v, IPv6 %v", c.m, g4, g6)
		}
	}
}

// An accepted entry is encoded to the same bytes again, and converts to a kernel flow.
func FuzzParse(f *testing.F) {
	for _, e := range []entry{tcp4(), ping6()} {
		f.Add(e.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := parse(b)
		if err != nil {
			return
		}
		if got := e.append(nil); !bytes.Equal(got, b) {
			t.Fatalf("%x became %x", b, got)
		}
		flow := e.flow()
		if got := entryOf(&flow); got != e {
			t.Fatalf("%+v for the table is %+v", e, got)
		}
		var w nfnl.Writer
		flow.Encode(&w)
		flow = conntrack.Decode(w.B)
		d := entryOf(&flow)
		if d.src != e.src || d.dst != e.dst || d.srcPort != e.srcPort || d.dstPort != e.dstPort || d.state != e.state {
			t.Fatalf("%+v in the kernel's form is %+v", e, d)
		}
	})
}

func FuzzDecode(f *testing.F) {
	e := tcp4()
	flow := e.flow()
	var w nfnl.Writer
	flow.Encode(&w)
	f.Add(w.B)
	f.Fuzz(func(t *testing.T, b []byte) {
		flow := conntrack.Decode(b)
		d := entryOf(&flow)
		if d.invalid == nil && d.check() == nil {
			if _, err := parse(d.append(nil)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// The cost of moving the flows of a busy slot.
func BenchmarkMove50000(b *testing.B) {
	const n = 50000
	var entries [][]byte
	for i := range n {
		e := tcp4()
		e.dst = netip.AddrFrom4([4]byte{198, 18, byte(i >> 14), byte(i>>6) | 1})
		e.srcPort, e.natPort = uint16(1024+i), uint16(1024+i)
		e.dstPort = uint16(1 + i/40000)
		e.src = netip.AddrFrom4([4]byte{10, 1, byte(i / 60000), 2})
		entries = append(entries, e.append(nil))
	}
	m := Match{Source4: tcp4().nat}
	var dumped int
	var dumping time.Duration
	for i := range b.N {
		b.StopTimer()
		from, to := testns.New(b, fmt.Sprintf("f%d", i)), testns.New(b, fmt.Sprintf("t%d", i))
		if _, _, err := Load("/run/netns/"+from.Name, m, entries); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		start := time.Now()
		got, err := Dump("/run/netns/"+from.Name, m)
		if err != nil {
			b.Fatal(err)
		}
		dumping += time.Since(start)
		if loaded, _, err := Load("/run/netns/"+to.Name, m, got); err != nil || loaded != n {
			b.Fatalf("loaded %d: %v", loaded, err)
		}
		dumped += len(got)
	}
	var bytesEach int
	for _, e := range entries {
		bytesEach += len(e)
	}
	b.ReportMetric(float64(dumping.Milliseconds())/float64(b.N), "dump-ms/op")
	b.ReportMetric(float64(dumped)/float64(b.N), "entries/op")
	b.ReportMetric(float64(bytesEach)/n, "bytes/entry")
}
