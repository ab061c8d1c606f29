package egressclient

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/nlcount"
	"github.com/skeinmesh/skein/internal/testns"
)

// udp4 is an IPv4 packet with a UDP datagram in it, which goes without a checksum.
func udp4(src, dst string, port uint16, text string) []byte {
	b := make([]byte, 28, 28+len(text))
	b[0], b[8], b[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(b[2:], uint16(28+len(text)))
	copy(b[12:], netip.MustParseAddr(src).AsSlice())
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum))
	binary.BigEndian.PutUint16(b[20:], 4444)
	binary.BigEndian.PutUint16(b[22:], port)
	binary.BigEndian.PutUint16(b[24:], uint16(8+len(text)))
	return append(b, text...)
}

// listener notes what a client's namespace hears on UDP port 9999.
type listener struct {
	mu    sync.Mutex
	heard []string
}

func listenIn(t *testing.T, ns *testns.NS) *listener {
	t.Helper()
	l := &listener{}
	var c *net.UDPConn
	ns.Must("listening", func() (err error) { c, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 9999}); return err })
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			l.mu.Lock()
			l.heard = append(l.heard, string(b[:n]))
			l.mu.Unlock()
		}
	}()
	return l
}

func (l *listener) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Contains(l.heard, text)
}

// sendFrom sends a datagram from an address of a namespace.
func sendFrom(t *testing.T, ns *testns.NS, from, to string, b []byte) {
	t.Helper()
	ns.Must("sending", func() error {
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from)),
			net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to)))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(b)
		return err
	})
}

// TestStrangersDoNotSendIntoTunnels: only the ends of a client's egresses can put packets into its namespace, and
// only over the link that leads to them. Otherwise a stranger would reach what the firewall of its link protects.
func TestStrangersDoNotSendIntoTunnels(t *testing.T) {
	drivers := []string{fou.Userspace}
	if fou.TryKernel() == nil {
		drivers = append(drivers, fou.Kernel)
	}
	for _, driver := range drivers {
		for _, filter := range []string{"0", "1", "2"} {
			t.Run(driver+" all.rp_filter="+filter, func(t *testing.T) { strangersSend(t, driver, filter) })
		}
	}
}

func strangersSend(t *testing.T, driver, rpFilter string) {
	ns, far := tunnels(t, driver)
	ns.Sysctl("net.ipv4.conf.all.rp_filter", rpFilter)
	stranger := testns.New(t, "st")
	testns.Link(ns, stranger, "pub0", []netip.Prefix{pfx("198.51.100.1/24")}, []netip.Prefix{pfx("198.51.100.66/24")})
	ns.Address("lo", pfx("192.168.77.1/32")) // an address of inside
	stranger.Address("lo", pfx("10.68.124.145/32"))
	far.ns.Address("eth0", pfx("10.68.99.99/32")) // no end of this client's
	c, err := Open(Options{NetNS: path(ns), Driver: driver})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	apply(t, c, dual())
	l := listenIn(t, ns)
	// the tunnel's far end is heard; packets sent before it have been heard or dropped by then
	fromEnd := func(text string) {
		t.Helper()
		deadline := time.Now().Add(5 * time.Second)
		for !l.has(text) {
			if time.Now().After(deadline) {
				t.Fatalf("%q from the tunnel's end is not heard", text)
			}
			sendFrom(t, far.ns, "8.8.8.8:4444", "10.20.30.40:9999", []byte(text))
			time.Sleep(5 * time.Millisecond)
		}
	}
	for _, s := range []struct {
		name string
		ns   *testns.NS
		from string
		to   string
	}{
		{"a stranger on another link", stranger, "198.51.100.66:5555", "198.51.100.1:5555"},
		{"the same from another port", stranger, "198.51.100.66:0", "198.51.100.1:5555"},
		{"a stranger under the end's address", stranger, "10.68.124.145:5555", "198.51.100.1:5555"},
		{"another member by the right link", far.ns, "10.68.99.99:0", "10.20.30.40:5555"},
	} {
		for _, dst := range []string{"192.168.77.1", "198.51.100.1", "10.20.30.40"} {
			text := fmt.Sprintf("%s to %s", s.name, dst)
			sendFrom(t, s.ns, s.from, s.to, udp4("192.168.10.1", dst, 9999, text))
			fromEnd("after " + text)
			if l.has(text) {
				t.Errorf("heard %q", text)
			}
		}
	}
}

// equal compares which senders are admitted.
func (f Filter) equal(o Filter) bool {
	return slices.Equal(f.Ends, o.Ends) && slices.Equal(f.Links, o.Links) && slices.Equal(f.Ports, o.Ports)
}

// TestTheFilterIsRepairedAndGoes: the filter exists before and while the port is open, and is removed with the
// tunnels.
func TestTheFilterIsRepairedAndGoes(t *testing.T) {
	ns := pod(t)
	d := &pairs{ns: ns, far: testns.New(t, "ep")}
	c, err := open(Options{NetNS: path(ns)}, func(string) (fou.Driver, error) { return d, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want := wantFilter(dual())
	state := func() filterState {
		t.Helper()
		s, err := c.filter.read()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	d.during = func() {
		if s := state(); !s.lets(c.filter, want) {
			t.Errorf("while tunnels are made: %v", s)
		}
	}
	apply(t, c, dual())
	if s := state(); !s.lets(c.filter, want) {
		t.Fatalf("the filter lets in %s", s)
	}
	d.during = nil
	k := keep(t, c, dual())
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: c.filter.table}
	chain := &nftables.Chain{Table: table, Name: filterChain}
	ends := c.filter.of(want).Kernel(setEnds4)
	for name, do := range map[string]func(*nlcount.Nft){
		"table deleted": func(k *nlcount.Nft) { k.DelTable(table) },
		"rules flushed": func(k *nlcount.Nft) { k.FlushChain(chain) },
		"ends flushed":  func(k *nlcount.Nft) { k.FlushSet(ends) },
		"a stranger added": func(k *nlcount.Nft) {
			_ = k.SetAddElements(ends, []nftables.SetElement{{Key: []byte{198, 51, 100, 66}}})
		},
	} {
		conn, err := nlcount.NewNft(nftables.WithNetNSFd(int(c.ns)))
		if err != nil {
			t.Fatal(err)
		}
		if do(conn); conn.Flush() != nil {
			t.Fatalf("%s: not done", name)
		}
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			if s := state(); s.lets(c.filter, want) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: not repaired: %v", name, state())
			}
		}
	}
	k.stop()
	if err := c.Remove(); err != nil {
		t.Fatal(err)
	}
	if s := state(); s.There {
		t.Errorf("after the end there is %v", s)
	}
}

// TestASlotMovesWithoutAGap: the new end is admitted before anything else changes, and the former one until all has.
func TestASlotMovesWithoutAGap(t *testing.T) {
	ns := pod(t)
	d := &pairs{ns: ns, far: testns.New(t, "ep")}
	c, err := open(Options{NetNS: path(ns)}, func(string) (fou.Driver, error) { return d, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before := dual()
	apply(t, c, before)
	after := dual()
	after.Tunnels[1] = tun("10.68.200.1")
	after.Routes[1] = to("0.0.0.0/0", "10.68.200.1")
	both := wantFilter(before).with(wantFilter(after))
	met := false
	d.during = func() {
		met = true
		if s, err := c.filter.read(); err != nil || !s.equal(both) {
			t.Errorf("while the slot moves, the filter lets in %s (%v); want %s", s, err, both)
		}
	}
	apply(t, c, after)
	if s, err := c.filter.read(); err != nil || !s.equal(wantFilter(after)) || !met {
		t.Errorf("then it lets in %s (%v)", s, err)
	}
	d.during = nil
	if n := apply(t, c, after); n != 0 {
		t.Errorf("%d writes for nothing", n)
	}
}

// A client may use 64 egresses of 64 slots each, with an endpoint per family: more than fits into one message to the
// kernel.
func TestAsManyEndsAsAClientMayHave(t *testing.T) {
	c, err := open(Options{NetNS: path(pod(t))}, func(string) (fou.Driver, error) { return &pairs{}, nil })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := Filter{Links: []string{"eth0"}}
	for i := range 64 * 64 {
		all.Ends = append(all.Ends, netip.AddrFrom4([4]byte{10, 68, byte(i >> 8), byte(i)}),
			netip.AddrFrom16([16]byte{0xfd, 14: byte(i >> 8), 15: byte(i)}))
	}
	all.Ends = distinct(all.Ends, nil)
	few := Filter{Ends: all.Ends[:2], Links: all.Links}
	have := filterState{}
	for i, want := range []Filter{all, few, all, {}} {
		if _, err := c.filter.write(want, &have); err != nil {
			t.Fatalf("%d: %d ends: %v", i, len(want.Ends), err)
		}
		// The kernel's dump of a hash table lacks elements while the table is growing.
		for deadline := time.Now().Add(10 * time.Second); ; runtime.Gosched() {
			have, err = c.filter.read()
			if err == nil && (have.equal(want) || want.empty()) && have.There != want.empty() {
				break
			}
			if err != nil || time.Now().After(deadline) {
				t.Fatalf("%d: of %d ends there are %d: %v", i, len(want.Ends), len(have.Ends), err)
			}
		}
	}
}

// The host's own gateway is reached over another link than the tunnel's.
func TestWantFilter(t *testing.T) {
	s := dataplane.ClientSpec{Uplink: "skein0", Links: []string{"sk0123456789ab"},
		Ends: []netip.Addr{addr("10.68.0.2"), addr("10.68.0.1")}, Tunnels: []dataplane.ClientTunnel{tun("10.68.0.1")}}
	if got, want := wantFilter(s).String(), "only [10.68.0.1 10.68.0.2], by [sk0123456789ab skein0]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	s.Tunnels = nil
	if f := wantFilter(s); !f.empty() {
		t.Errorf("without tunnels: %s", f)
	}
}
