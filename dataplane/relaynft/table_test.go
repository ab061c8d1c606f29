package relaynft

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nattest"
)

// place is a relay's host with two clients, each a UDP socket, and the two sockets that hold the reserved ports.
type place struct {
	t     *testing.T
	relay *nattest.Host
	ns    netns.NsHandle
	a, b  *net.UDPConn // the clients'
	m     Mapping
}

func newPlace(t *testing.T, ipv6 bool) *place {
	n := nattest.New(t)
	p := &place{t: t, relay: n.Host(nattest.Public)}
	x, y := n.Host(nattest.Public), n.Host(nattest.Public)
	at := func(h *nattest.Host) netip.Addr {
		if ipv6 {
			return h.Addr6
		}
		return h.Addr
	}
	listen := func(h *nattest.Host) (c *net.UDPConn) {
		h.Do(func() {
			var err error
			if c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at(h), 0))); err != nil {
				t.Error(err)
			}
		})
		t.Cleanup(func() { c.Close() })
		return c
	}
	p.relay.Do(func() {
		var err error
		if p.ns, err = netns.Get(); err != nil {
			t.Error(err)
		}
		for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte("1"), 0o644); err != nil {
				t.Error(err)
			}
		}
	})
	t.Cleanup(func() { p.ns.Close() })
	p.a, p.b = listen(x), listen(y)
	local := func(c *net.UDPConn) netip.AddrPort { return c.LocalAddr().(*net.UDPAddr).AddrPort() }
	p.m = Mapping{
		ALocal: local(listen(p.relay)), BLocal: local(listen(p.relay)), ARemote: local(p.a), BRemote: local(p.b),
	}
	return p
}

func (p *place) open() *Table {
	p.t.Helper()
	t, err := Open(Config{NetNS: int(p.ns)})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { t.Close() })
	return t
}

// passes sends until the other end hears, and tells whether it did.
func (p *place) passes(from, to *net.UDPConn, at netip.AddrPort, within time.Duration) bool {
	p.t.Helper()
	payload := []byte(time.Now().String())
	b := make([]byte, 2048)
	for deadline := time.Now().Add(within); time.Now().Before(deadline); {
		if _, err := from.WriteToUDPAddrPort(payload, at); err != nil {
			p.t.Fatal(err)
		}
		to.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		for {
			n, _, err := to.ReadFromUDPAddrPort(b)
			if err != nil {
				break
			}
			if bytes.Equal(b[:n], payload) {
				return true
			}
		}
	}
	return false
}

func (p *place) both() {
	p.t.Helper()
	if !p.passes(p.a, p.b, p.m.ALocal, 10*time.Second) || !p.passes(p.b, p.a, p.m.BLocal, 10*time.Second) {
		p.t.Fatal("packets do not pass in both directions")
	}
}

func (p *place) nothing() {
	p.t.Helper()
	if p.passes(p.a, p.b, p.m.ALocal, 300*time.Millisecond) || p.passes(p.b, p.a, p.m.BLocal, 300*time.Millisecond) {
		p.t.Error("packets pass")
	}
}

func TestMappingsPassAndEnd(t *testing.T) {
	for name, ipv6 := range map[string]bool{"ipv4": false, "ipv6": true} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t, ipv6)
			table := p.open()
			// The flows are known before, untranslated: both clients have sent.
			p.nothing()
			if used, err := table.Used(p.m); used || err != nil {
				t.Errorf("used before it is there: %t, %v", used, err)
			}
			if err := table.Map(Mapping{}, p.m); err != nil {
				t.Fatal(err)
			}
			p.both()
			if used, err := table.Used(p.m); !used || err != nil {
				t.Errorf("used: %t, %v", used, err)
			}
			if err := table.Map(p.m, p.m); err != nil { // renewed
				t.Fatal(err)
			}
			p.both()
			if err := table.Map(p.m, Mapping{}); err != nil {
				t.Fatal(err)
			}
			p.nothing()
			if err := table.Map(p.m, Mapping{}); err != nil { // what is not there
				t.Error(err)
			}
		})
	}
}

func TestWhatIsInTheWayIsReplaced(t *testing.T) {
	p := newPlace(t, false)
	table := p.open()
	other := p.m
	other.BRemote = netip.AddrPortFrom(p.m.BRemote.Addr(), 9)
	for _, before := range []Mapping{other, p.m} {
		if err := table.Map(Mapping{}, before); err != nil {
			t.Fatal(err)
		}
		if err := table.Map(Mapping{}, p.m); err != nil { // by somebody who does not know of it
			t.Fatal(err)
		}
		if table.Stale(p.m.ALocal.Port()) {
			t.Error("what this run forwards is called a former run's, and would end with it")
		}
		p.both()
		if err := table.Map(p.m, Mapping{}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestATableOfAnotherShapeIsMadeAnew(t *testing.T) {
	p := newPlace(t, false)
	c, err := nftables.New(nftables.WithNetNSFd(int(p.ns)))
	if err != nil {
		t.Fatal(err)
	}
	x := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: dataplane.DefaultNumbers().RelayNftTable})
	if err := c.AddSet(&nftables.Set{Table: x, Name: mapFlows4, KeyType: nftables.TypeMark}, nil); err != nil {
		t.Fatal(err)
	}
	c.AddChain(&nftables.Chain{Table: x, Name: chainIn})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	table := p.open()
	if err := table.Map(Mapping{}, p.m); err != nil {
		t.Fatal(err)
	}
	p.both()
}

func TestAFormerRunsFlowsEnd(t *testing.T) {
	p := newPlace(t, false)
	before := p.open()
	if err := before.Map(Mapping{}, p.m); err != nil {
		t.Fatal(err)
	}
	p.both()
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	after := p.open()
	if !after.Stale(p.m.ALocal.Port()) || !after.Stale(p.m.BLocal.Port()) || after.Stale(1) {
		t.Error("it is not known which ports are in use")
	}
	p.both()
	if err := after.endStale(); err != nil {
		t.Fatal(err)
	}
	p.nothing()
	if after.Stale(p.m.ALocal.Port()) {
		t.Error("the ports are not free")
	}
	if err := after.Map(Mapping{}, p.m); err != nil {
		t.Fatal(err)
	}
	p.both()
	if err := after.Close(); err != nil { // or it would repair what is purged
		t.Fatal(err)
	}
	for range 2 { // the second finds nothing
		if err := Purge(Config{NetNS: int(p.ns)}); err != nil {
			t.Fatal(err)
		}
	}
	p.nothing()
}

func TestReadyNamesTheSwitch(t *testing.T) {
	dir := t.TempDir()
	table := &Table{proc: dir}
	for name, ipv6 := range map[string]bool{"net/ipv4/ip_forward": false, "net/ipv6/conf/all/forwarding": true} {
		if err := table.Ready(ipv6); err == nil {
			t.Errorf("%s is not there, and the host is called ready", name)
		}
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			text  string
			ready bool
		}{{"0\n", false}, {"1\n", true}} {
			if err := os.WriteFile(file, []byte(c.text), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := table.Ready(ipv6); (err == nil) != c.ready {
				t.Errorf("%s %q: %v", name, c.text, err)
			}
		}
	}
}

// FuzzFlow reads keys of maps as the kernel gives them, of whatever shape.
func FuzzFlow(f *testing.F) {
	f.Add(flow{netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:2")}.key())
	f.Add(flow{netip.MustParseAddrPort("[2001:db8::1]:1"), netip.MustParseAddrPort("[2001:db8::2]:2")}.key())
	f.Fuzz(func(t *testing.T, b []byte) {
		x, ok := decodeFlow(b)
		if !ok {
			return
		}
		again, ok := decodeFlow(x.key())
		if !ok || again != x || !slices.Contains([]int{16, 40}, len(b)) {
			t.Errorf("%x is %v, and again %v", b, x, again)
		}
	})
}

// TestAPairThatTheKernelRefusesIsForgotten: its relay forwards it by other means, and a repair must not bring it back.
func TestAPairThatTheKernelRefusesIsForgotten(t *testing.T) {
	p := newPlace(t, false)
	table := p.open()
	table.listener.Close()                                 // nobody repairs meanwhile
	table.numbers.RelayNftTable = strings.Repeat("x", 300) // longer than the kernel takes
	if err := table.Map(Mapping{}, p.m); err == nil {
		t.Fatal("it was written")
	}
	if len(table.pairs) > 0 {
		t.Errorf("still wanted: %v", table.pairs)
	}
}

// TestWhatOthersDeleteIsRepaired: the table, its rules, or the elements of a pair; what is not a pair's any more stays
// away.
func TestWhatOthersDeleteIsRepaired(t *testing.T) {
	p := newPlace(t, false)
	table := p.open()
	at := func(a netip.AddrPort, port uint16) netip.AddrPort { return netip.AddrPortFrom(a.Addr(), port) }
	other := Mapping{ALocal: at(p.m.ALocal, 5), BLocal: at(p.m.BLocal, 6), ARemote: at(p.m.ARemote, 7),
		BRemote: at(p.m.BRemote, 8)}
	for _, step := range []struct{ old, new Mapping }{{Mapping{}, p.m}, {Mapping{}, other}, {other, Mapping{}}} {
		if err := table.Map(step.old, step.new); err != nil {
			t.Fatal(err)
		}
	}
	c, err := nftables.New(nftables.WithNetNSFd(int(p.ns)))
	if err != nil {
		t.Fatal(err)
	}
	ours := &nftables.Table{Family: nftables.TableFamilyINet, Name: dataplane.DefaultNumbers().RelayNftTable}
	whole := func() bool {
		es, err := c.GetSetElements(table.named(mapFlows4))
		if err != nil || len(es) != 2 {
			return false
		}
		rules, err := c.GetRules(ours, &nftables.Chain{Table: ours, Name: chainIn})
		return err == nil && len(rules) == 2
	}
	if !whole() {
		t.Fatal("the pair is not there at first")
	}
	for what, do := range map[string]func(){
		"the table":    func() { c.DelTable(ours) },
		"the elements": func() { c.FlushSet(table.named(mapFlows4)) },
		"one of them": func() {
			e := elements(p.m)[0]
			_ = c.SetDeleteElements(table.named(e.set), []nftables.SetElement{{Key: e.elements[0].Key}})
		},
		"the rules":   func() { c.FlushChain(&nftables.Chain{Table: ours, Name: chainIn}) },
		"the sources": func() { c.FlushSet(table.named(mapSources4)) },
	} {
		do()
		if err := c.Flush(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for deadline := time.Now().Add(10 * time.Second); !whole(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: not repaired", what)
			}
		}
	}
	if !p.passes(p.a, p.b, p.m.ALocal, 5*time.Second) {
		t.Error("packets do not pass afterwards")
	}
}
