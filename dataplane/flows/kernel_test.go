package flows_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/flows"
	"github.com/skeinmesh/skein/dataplane/testgw"
	"github.com/skeinmesh/skein/internal/testns"
)

const limit = 10 * time.Second

// target answers each UDP packet, and each TCP byte, with the source address it saw.
func target(t testing.TB, n *testns.NS) (tcp *net.TCPListener) {
	t.Helper()
	var udp *net.UDPConn
	n.Must("listening", func() (err error) {
		if udp, err = net.ListenUDP("udp", &net.UDPAddr{Port: 7}); err != nil {
			return err
		}
		tcp, err = net.ListenTCP("tcp", &net.TCPAddr{Port: 7})
		return err
	})
	t.Cleanup(func() { udp.Close(); tcp.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := udp.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = udp.WriteToUDPAddrPort([]byte(line(from)), from)
		}
	}()
	go func() {
		for {
			c, err := tcp.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if _, err := io.WriteString(c, line(c.RemoteAddr().(*net.TCPAddr).AddrPort())); err != nil {
						return
					}
				}
			}()
		}
	}()
	return tcp
}

// line is a source address as text of fixed length.
func line(a netip.AddrPort) string {
	return fmt.Sprintf("%-50s", netip.AddrPortFrom(a.Addr().Unmap(), a.Port()))
}

type flow struct {
	name string
	c    net.Conn
}

func (f flow) ask(t testing.TB) string {
	t.Helper()
	_ = f.c.SetDeadline(time.Now().Add(limit))
	if _, err := f.c.Write([]byte("?")); err != nil {
		t.Fatalf("%s: %v", f.name, err)
	}
	b := make([]byte, 50)
	if _, err := io.ReadFull(f.c, b); err != nil {
		t.Fatalf("%s: no answer: %v", f.name, err)
	}
	return string(b)
}

func dial(t testing.TB, n *testns.NS, network string, to netip.Addr, local uint16) flow {
	t.Helper()
	var c net.Conn
	n.Must("dialing "+network, func() (err error) {
		from := &net.UDPAddr{Port: int(local)}
		if network == "udp" {
			c, err = net.DialUDP(network, from, &net.UDPAddr{IP: to.AsSlice(), Port: 7})
			return err
		}
		d := net.Dialer{Timeout: limit, LocalAddr: &net.TCPAddr{Port: int(local)}}
		c, err = d.Dial(network, netip.AddrPortFrom(to, 7).String())
		return err
	})
	t.Cleanup(func() { c.Close() })
	return flow{fmt.Sprintf("%s to %s", network, to), c}
}

var match = flows.Match{Source4: testgw.Source4, Source6: testgw.Source6}

func dump(t testing.TB, n *testns.NS, m flows.Match) [][]byte {
	t.Helper()
	entries, err := flows.Dump(testgw.Path(n), m)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(entries, slices.Compare)
	return entries
}

func load(t testing.TB, n *testns.NS, m flows.Match, entries [][]byte) {
	t.Helper()
	if loaded, failed, err := flows.Load(testgw.Path(n), m, entries); err != nil || failed != 0 || loaded != len(entries) {
		t.Fatalf("loaded %d of %d, %d failed: %v", loaded, len(entries), failed, err)
	}
}

// A's connections continue through B with the same port, although B would have chosen another.
func TestFlowsGoOnThroughAnotherGateway(t *testing.T) {
	s := testgw.New(t)
	target(t, s.Target)
	s.Via(s.A)
	s.Return(s.A)
	// A cannot keep the clients' ports
	load(t, s.A.NS, flows.Match{Source4: testgw.Source4, Source6: testgw.Source6}, others())
	var all []flow
	before := map[string]string{}
	for _, network := range []string{"tcp", "udp"} {
		for i, to := range []netip.Addr{testgw.Target4, testgw.Target6} {
			f := dial(t, s.Client, network, to, uint16(40000+i))
			before[f.name] = f.ask(t)
			a := netip.MustParseAddrPort(trim(before[f.name]))
			if a.Addr() != testgw.Source4 && a.Addr() != testgw.Source6 || a.Port() == uint16(40000+i) {
				t.Fatalf("%s leaves with %s", f.name, a)
			}
			all = append(all, f)
		}
	}
	s.A.Stop()
	mine := match
	mine.Clients = []netip.Addr{testgw.Client4, testgw.Client6}
	entries := dump(t, s.A.NS, mine)
	if len(entries) != len(all) {
		t.Fatalf("%d entries of %d flows", len(entries), len(all))
	}
	load(t, s.B.NS, mine, entries)
	s.Via(s.B)
	s.Return(s.B)
	for range 3 {
		for _, f := range all {
			if after := f.ask(t); after != before[f.name] {
				t.Errorf("%s: source was %s, is %s", f.name, trim(before[f.name]), trim(after))
			}
		}
	}
	if n := s.B.Invalid(); n != 0 {
		t.Errorf("%d packets of moved flows counted as invalid", n)
	}
	if again := dump(t, s.B.NS, match); len(again) != len(all) {
		t.Errorf("B has %d flows of %d", len(again), len(all))
	}
	for _, f := range all { // a connection ends as well
		if c, ok := f.c.(*net.TCPConn); ok {
			if err := c.CloseWrite(); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadAll(c); err != nil {
				t.Errorf("%s: the other end's FIN: %v", f.name, err)
			}
		}
	}
}

// others are flows of another client that leave with the ports of the client's.
func others() (out [][]byte) {
	for i, c := range []struct {
		family        byte
		src, dst, nat netip.Addr
	}{
		{4, netip.MustParseAddr("10.1.0.3"), testgw.Target4, testgw.Source4},
		{6, netip.MustParseAddr("fd01::3"), testgw.Target6, testgw.Source6},
	} {
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			e := []byte{1, c.family, proto, 3, 0, 0, 14, 255, 0, 0, 0, 0, 0, 0}
			e = append(append(append(e, c.src.AsSlice()...), c.dst.AsSlice()...), c.nat.AsSlice()...)
			port := 40000 + i
			e = append(e, 1, 2, 0, 7, byte(port>>8), byte(port))
			if proto == unix.IPPROTO_TCP {
				e = append(e, 3, 0, 0, 0, 0)
			}
			out = append(out, e)
		}
	}
	return out
}

func trim(s string) string {
	for len(s) > 0 && s[len(s)-1] == ' ' {
		s = s[:len(s)-1]
	}
	return s
}

// A dump after a load gives the same entries: translation with a changed port, states, mark, zone, timeouts.
func TestLoadedIsDumped(t *testing.T) {
	n := testns.New(t, "ct")
	want := every()
	load(t, n, match, want)
	if got := dump(t, n, match); !same(got, want) {
		t.Errorf("loaded\n%x\ndumped\n%x", want, got)
	}
	load(t, n, match, want) // once more: what is there is replaced
	if got := dump(t, n, match); !same(got, want) {
		t.Errorf("after the second time\n%x\ndumped\n%x", want, got)
	}
	if got := dump(t, n, flows.Match{Source4: testgw.Source4}); len(got) == 0 || len(got) >= len(want) {
		t.Errorf("%d entries of %d are IPv4's", len(got), len(want))
	}
	for what, m := range map[string]flows.Match{
		"empty":          {},
		"another source": {Source4: netip.MustParseAddr("192.0.2.98")},
		"another client": {Source4: testgw.Source4, Source6: testgw.Source6,
			Clients: []netip.Addr{netip.MustParseAddr("10.1.0.3")}},
	} {
		if got := dump(t, n, m); len(got) != 0 {
			t.Errorf("%s: %d entries", what, len(got))
		}
		if loaded, failed, err := flows.Load(testgw.Path(n), m, want); loaded != 0 || failed != len(want) ||
			!errors.Is(err, flows.ErrEntry) {
			t.Errorf("%s: loaded %d, failed %d: %v", what, loaded, failed, err)
		}
	}
	clients := flows.Match{Clients: []netip.Addr{testgw.Client6, testgw.Client4}}
	if got := dump(t, n, clients); !same(got, want) {
		t.Errorf("by client %d entries of %d", len(got), len(want))
	}
}

// same compares entries, ignoring the last seconds of a timeout.
func same(a, b [][]byte) bool {
	clear := func(in [][]byte) (out [][]byte) {
		for _, e := range in {
			e = slices.Clone(e)
			e[7] = 0
			out = append(out, e)
		}
		slices.SortFunc(out, slices.Compare)
		return out
	}
	return slices.EqualFunc(clear(a), clear(b), slices.Equal)
}

// every has an entry of each protocol and family. Timeouts are a multiple of 256 plus 255.
func every() (out [][]byte) {
	for _, family := range []int{4, 6} {
		src, dst, nat := testgw.Client4, testgw.Target4, testgw.Source4
		icmp, request := byte(unix.IPPROTO_ICMP), byte(8)
		if family == 6 {
			src, dst, nat = testgw.Client6, testgw.Target6, testgw.Source6
			icmp, request = unix.IPPROTO_ICMPV6, 128
		}
		for _, c := range []struct {
			proto    byte
			dstPort  []byte
			trailing []byte
		}{
			{unix.IPPROTO_TCP, []byte{0, 80}, []byte{3, 7, 9, 3, 3}},
			{unix.IPPROTO_TCP, []byte{0, 81}, []byte{1, 0, 0, 0, 0}},
			{unix.IPPROTO_UDP, []byte{0, 53}, nil},
			{unix.IPPROTO_UDPLITE, []byte{0, 54}, nil},
			{unix.IPPROTO_SCTP, []byte{0, 55}, []byte{4, 1, 2, 3, 4, 5, 6, 7, 8}},
			{icmp, []byte{request, 0}, nil},
		} {
			e := []byte{1, byte(family), c.proto, 3, 0, 0, 14, 255, 0, 0, 0, 42, 0, 9}
			for _, a := range []netip.Addr{src, dst, nat} {
				e = append(e, a.AsSlice()...)
			}
			e = append(e, 0x9c, 0x40)
			e = append(e, c.dstPort...)
			e = append(e, 0x9d, 0x50) // another port than the client's
			out = append(out, append(e, c.trailing...))
		}
	}
	return out
}

// A flow that was created meanwhile with the same addresses and ports is replaced.
func TestLoadReplaces(t *testing.T) {
	n := testns.New(t, "ct")
	mine := every()[2]
	other, same := slices.Clone(mine), slices.Clone(mine)
	other[len(other)-6]++ // another port of the client's answers at the same place
	same[len(same)-1]++   // the same flow, translated to another port
	load(t, n, match, [][]byte{other})
	load(t, n, match, [][]byte{mine})
	if got := dump(t, n, match); len(got) != 1 || got[0][len(mine)-6] != mine[len(mine)-6] {
		t.Errorf("after one with the same answers: %x", got)
	}
	load(t, n, match, [][]byte{same})
	if got := dump(t, n, match); len(got) != 1 || got[0][len(mine)-1] != same[len(mine)-1] {
		t.Errorf("after one of the same flow: %x", got)
	}
}

func TestNoNamespace(t *testing.T) {
	if _, err := flows.Dump("/run/netns/skein-nowhere", match); err == nil {
		t.Error("dumped a namespace that is not there")
	}
	if loaded, failed, err := flows.Load("/run/netns/skein-nowhere", match, every()); loaded != 0 ||
		failed != len(every()) || err == nil {
		t.Errorf("loaded %d, failed %d: %v", loaded, failed, err)
	}
}
