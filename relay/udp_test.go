package relay

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
)

// kernelTable is the driver as the agent gives it to the relay, looked at from the relay's namespace.
type kernelTable struct {
	*relaynft.Table
	host *nattest.Host
}

func (k kernelTable) Map(old, new Mapping) error {
	return k.Table.Map(relaynft.Mapping(old), relaynft.Mapping(new))
}

func (k kernelTable) Used(m Mapping) (bool, error) { return k.Table.Used(relaynft.Mapping(m)) }

func (k kernelTable) Ready(ipv6 bool) (err error) {
	k.host.Do(func() { err = k.Table.Ready(ipv6) })
	return err
}

// udpRelay is a relay on a public host: its sessions pass the test's own loopback, its UDP the little internet.
type udpRelay struct {
	*testRelay
	host  *nattest.Host
	ns    netns.NsHandle
	udp   *UDP
	table *relaynft.Table // nil: userspace
}

func startUDP(t testing.TB, host *nattest.Host, m *members, driver string, change ...func(*UDPConfig)) *udpRelay {
	t.Helper()
	r := &udpRelay{host: host}
	host.Do(func() {
		var err error
		if r.ns, err = netns.Get(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { r.ns.Close() })
	cfg := UDPConfig{First: 24000, Last: 24099, Namespace: &r.ns}
	if driver == "kernel" {
		forwarding(t, host, "1")
		var err error
		if r.table, err = relaynft.Open(relaynft.Config{NetNS: int(r.ns)}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.table.Close() })
		cfg.Kernel, cfg.Avoid = kernelTable{r.table, host}, r.table.Stale
	}
	for _, c := range change {
		c(&cfg)
	}
	var err error
	if r.udp, err = NewUDP(cfg); err != nil {
		t.Fatal(err)
	}
	r.testRelay = startRelay(t, m, func(c *ServerConfig) { c.UDP = r.udp })
	return r
}

func forwarding(t testing.TB, h *nattest.Host, value string) {
	h.Do(func() {
		for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
			if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0o644); err != nil {
				t.Error(err)
			}
		}
	})
}

// sysctl sets what the relay's namespace has for itself.
func (r *udpRelay) sysctl(t testing.TB, name, value string) {
	t.Helper()
	r.host.Do(func() {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0o644); err != nil {
			t.Error(err)
		}
	})
}

// nft is a connection to the nftables of the relay's namespace.
func (r *udpRelay) nft(t testing.TB) *nftables.Conn {
	t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(r.ns)))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// ours is the relay's table, nil if there is none.
func (r *udpRelay) ours(t testing.TB) *nftables.Table {
	t.Helper()
	tables, err := r.nft(t).ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range tables {
		if x.Name == relaynft.TableName {
			return x
		}
	}
	return nil
}

// entries counts the elements of all maps of the relay's table.
func (r *udpRelay) entries(t testing.TB) (n int) {
	t.Helper()
	c := r.nft(t)
	sets, err := c.GetSets(r.ours(t))
	if err != nil || len(sets) != 4 {
		t.Fatalf("%d maps, %v", len(sets), err)
	}
	for _, s := range sets {
		e, err := c.GetSetElements(s)
		if err != nil {
			t.Fatal(err)
		}
		n += len(e)
	}
	return n
}

// udpEnd is a member whose WireGuard port is a socket on a host of the little internet.
type udpEnd struct {
	*testNode
	t     testing.TB
	host  *nattest.Host
	relay *udpRelay
	ipv6  bool // it sends to the relay's IPv6 address
	holds bool // what was granted counts, also when a later request was refused

	onPacket func([]byte) // what comes in the session; set before anything is sent

	mu       sync.Mutex
	conn     *net.UDPConn
	ended    chan struct{} // its reader has
	reserved map[identity.ID]Reservation
	heard    map[string]netip.AddrPort // payload -> where it came from
	binds    [][]byte                  // that were sent
}

func startEnd(t testing.TB, m *members, host *nattest.Host, r *udpRelay, change ...func(*udpEnd)) *udpEnd {
	t.Helper()
	e := &udpEnd{t: t, host: host, relay: r, reserved: map[identity.ID]Reservation{}, heard: map[string]netip.AddrPort{}}
	for _, c := range change {
		c(e)
	}
	key := newKey(t)
	m.allow(key.ID())
	pool := NewPool(PoolConfig{Self: key.ID(), Key: key, OnPacket: func(_ identity.ID, _ byte, b []byte) { e.onPacket(b) }, OnReserved: func(x Reservation) {
		e.mu.Lock()
		if !e.holds || x.Endpoint.IsValid() || !e.reserved[x.Peer].Endpoint.IsValid() {
			e.reserved[x.Peer] = x
		}
		e.mu.Unlock()
	}})
	t.Cleanup(func() { pool.Close() })
	e.testNode = &testNode{Pool: pool, key: key, id: key.ID()}
	e.use(r.testRelay)
	waitFor(t, "a session with the relay", func() bool { return e.connected(r.key.ID()) })
	e.open()
	return e
}

// open opens the socket, or another one: what a NAT maps then is another mapping.
func (e *udpEnd) open() {
	var c *net.UDPConn
	network := "udp4"
	if e.ipv6 {
		network = "udp6"
	}
	e.host.Do(func() {
		var err error
		if c, err = net.ListenUDP(network, nil); err != nil {
			e.t.Error(err)
		}
	})
	e.mu.Lock()
	old := e.conn
	e.conn, e.ended = c, make(chan struct{})
	ended := e.ended
	e.mu.Unlock()
	if old != nil {
		old.Close()
	}
	e.t.Cleanup(func() { c.Close() })
	go func() {
		defer close(ended)
		b := make([]byte, 65536)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if IsBind(b[:n]) {
				if answer, ok := e.TakeChallenge(e.endpoint(from.Port()), b[:n]); ok {
					c.WriteToUDPAddrPort(answer, from)
				}
				continue
			}
			e.mu.Lock()
			e.heard[string(b[:n])] = from
			e.mu.Unlock()
		}
	}()
}

// takeOver ends the reader and leaves the socket to the caller.
func (e *udpEnd) takeOver() {
	e.conn.SetReadDeadline(time.Unix(1, 0))
	<-e.ended
	e.conn.SetReadDeadline(time.Time{})
}

// endpoint is a reserved port as the pool knows it: at the address of the session, which here is the loopback.
func (e *udpEnd) endpoint(port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
}

func (e *udpEnd) reservation(peer *udpEnd) Reservation {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reserved[peer.id]
}

// port is where this end sends what is for a peer.
func (e *udpEnd) port(peer *udpEnd) netip.AddrPort {
	at := e.relay.host.Addr
	if e.ipv6 {
		at = e.relay.host.Addr6
	}
	return netip.AddrPortFrom(at, e.reservation(peer).Endpoint.Port())
}

// knock sends what goes ahead of a ping.
func (e *udpEnd) knock(peer *udpEnd) {
	r := e.reservation(peer)
	if b, ok := e.Bind(r.Endpoint); ok {
		e.mu.Lock()
		e.binds = append(e.binds, b)
		e.mu.Unlock()
		e.conn.WriteToUDPAddrPort(b, e.port(peer))
	}
}

func (e *udpEnd) send(peer *udpEnd, payload string) {
	e.conn.WriteToUDPAddrPort([]byte(payload), e.port(peer))
}

func (e *udpEnd) from(payload string) (netip.AddrPort, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	a, ok := e.heard[payload]
	return a, ok
}

// join reserves a pair and proves both ends.
func join(t testing.TB, a, b *udpEnd) {
	t.Helper()
	if err := a.Reserve(a.relay.key.ID(), b.id); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "both ends' ports", func() bool { return a.reservation(b).Endpoint.IsValid() && b.reservation(a).Endpoint.IsValid() })
	proven(t, a, b)
}

func proven(t testing.TB, a, b *udpEnd) {
	t.Helper()
	waitFor(t, "the proof of both mappings", func() bool {
		a.knock(b)
		b.knock(a)
		return a.reservation(b).Ready && b.reservation(a).Ready
	})
}

var said int

// passes sends both ways until both have heard, and tells from where.
func passes(t testing.TB, a, b *udpEnd) (atA, atB netip.AddrPort) {
	t.Helper()
	said++
	x, y := fmt.Sprintf("a to b %d", said), fmt.Sprintf("b to a %d", said)
	waitFor(t, "packets in both directions", func() bool {
		a.send(b, x)
		b.send(a, y)
		_, ok1 := b.from(x)
		_, ok2 := a.from(y)
		return ok1 && ok2
	})
	atB, _ = b.from(x)
	atA, _ = a.from(y)
	return atA, atB
}

// eachDriver runs a test with the kernel's driver and with this process's: on the wire they are the same.
func eachDriver(t *testing.T, f func(t *testing.T, driver string)) {
	for _, d := range []string{"kernel", "userspace"} {
		t.Run(d, func(t *testing.T) { f(t, d) })
	}
}

func TestUDPPassesBetweenSymmetricNATs(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		atA, atB := passes(t, a, b)
		if atA != a.port(b) || atB != b.port(a) {
			t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atB, a.port(b), b.port(a))
		}
		for _, size := range []int{1, 1472} {
			large := strings.Repeat("x", size)
			waitFor(t, fmt.Sprintf("a packet of %d bytes", size), func() bool { a.send(b, large); _, ok := b.from(large); return ok })
		}
		if st := r.udp.Stats(); st.Ready != 1 || (st.InKernel == 1) != (driver == "kernel") || (st.Packets > 0) != (driver == "userspace") {
			t.Errorf("%+v", st)
		}
	})
}

func TestOneMappingMayHaveManyPairs(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a := startEnd(t, m, n.Host(nattest.PortRestricted), r) // one outside port for all that it sends
		others := []*udpEnd{startEnd(t, m, n.Host(nattest.PortRestricted), r), startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Public), r)}
		for _, b := range others {
			join(t, a, b)
		}
		for _, b := range others {
			atA, atB := passes(t, a, b)
			if atA != a.port(b) || atB != b.port(a) {
				t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atB, a.port(b), b.port(a))
			}
		}
	})
}

func TestUDPSpeaksIPv6AndBetweenFamilies(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		six := func(e *udpEnd) { e.ipv6 = true }
		a, b := startEnd(t, m, n.Host(nattest.Public), r, six), startEnd(t, m, n.Host(nattest.Public), r, six)
		c := startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		join(t, a, c)
		for _, other := range []*udpEnd{b, c} {
			atA, atOther := passes(t, a, other)
			if atA != a.port(other) || atOther != other.port(a) {
				t.Errorf("packets come from %s and %s, want the reserved ports %s and %s", atA, atOther, a.port(other), other.port(a))
			}
		}
		if st := r.udp.Stats(); driver == "kernel" && st.InKernel != 1 { // it does not translate between families
			t.Errorf("%+v", st)
		}
	})
}

func TestNothingIsForwardedForStrangers(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		c := startEnd(t, m, n.Host(nattest.Public), r) // a member, but not of this pair
		join(t, a, b)
		passes(t, a, b)
		for _, to := range []netip.AddrPort{a.port(b), b.port(a)} {
			c.conn.WriteToUDPAddrPort([]byte("from a stranger"), to)
			a.conn.WriteToUDPAddrPort([]byte("to the other's port"), b.port(a))
		}
		passes(t, a, b) // what was sent before has arrived by now, if it ever does
		for _, e := range []*udpEnd{a, b} {
			for _, payload := range []string{"from a stranger", "to the other's port"} {
				if from, ok := e.from(payload); ok {
					t.Errorf("%q arrived from %s", payload, from)
				}
			}
		}
	})
}

func TestUDPFollowsAReboundMappingAndNoReplay(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		thief := startEnd(t, m, n.Host(nattest.Public), r)
		join(t, a, b)
		passes(t, a, b)
		before := r.udp.Stats()

		// Somebody who heard the binds sends copies from elsewhere, and one that never arrived: the mapping stays.
		var fresh []byte
		waitFor(t, "the next bind", func() (ok bool) { fresh, ok = a.Bind(a.reservation(b).Endpoint); return ok })
		for _, copied := range append(slices.Clone(a.binds), fresh) {
			thief.conn.WriteToUDPAddrPort(copied, a.port(b))
		}
		waitFor(t, "the copies", func() bool { return r.udp.Stats().Refused >= before.Refused+uint64(len(a.binds)) })
		passes(t, a, b)
		if st := r.udp.Stats(); st.Rebound != before.Rebound {
			t.Errorf("a copied bind moved the mapping: %+v", st)
		}

		a.open() // a new mapping
		waitFor(t, "the new mapping", func() bool { a.knock(b); return r.udp.Stats().Rebound > before.Rebound })
		atA, _ := passes(t, a, b)
		if atA != a.port(b) {
			t.Errorf("packets come from %s, want %s", atA, a.port(b))
		}
	})
}

func TestUnusedPairsEndAndTheirPortsAreFree(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver, func(c *UDPConfig) { c.Idle = 2 * time.Second; c.First, c.Last = 24000, 24001 })
		// The kernel remembers a UDP flow for so long after its last packet.
		r.sysctl(t, "net/netfilter/nf_conntrack_udp_timeout", "1")
		r.sysctl(t, "net/netfilter/nf_conntrack_udp_timeout_stream", "1")
		a, b, c := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r)
		join(t, a, b)
		passes(t, a, b)
		if err := a.Reserve(r.key.ID(), c.id); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the refusal while all ports are taken", func() bool { return a.reservation(c).Refused == deniedFull.String() })
		waitFor(t, "the end of the pair", func() bool { return r.udp.Stats().Pairs == 0 && a.reservation(b).Refused != "" })
		if driver == "kernel" && r.entries(t) != 0 {
			t.Errorf("%d entries of the ended pair are left", r.entries(t))
		}
		join(t, a, c)
		passes(t, a, c)
		if driver == "kernel" && r.entries(t) != 4 {
			t.Errorf("%d entries of one pair, want two for each end", r.entries(t))
		}
	})
}

func TestReservationsHaveTheirLimits(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace", func(c *UDPConfig) { c.PairsPerClient = 1 })
	h := n.Host(nattest.Public)
	a, b, c := startEnd(t, m, h, r), startEnd(t, m, h, r), startEnd(t, m, h, r)
	join(t, a, b)
	if err := a.Reserve(r.key.ID(), c.id); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the quota", func() bool { return a.reservation(c).Refused == deniedQuota.String() })
	join(t, c, a) // whoever asks pays
	absent := newKey(t)
	if err := b.Reserve(r.key.ID(), absent.ID()); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the refusal for somebody who is not there", func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.reserved[absent.ID()].Refused == deniedNotHere.String()
	})
	a.GiveUpReservation(r.key.ID(), b.id)
	waitFor(t, "the end that one side wished", func() bool { return b.reservation(a).Refused != "" })
	a.Reserve(r.key.ID(), c.id)
	join(t, a, b)
}

func TestKickedNodesAreForwardedNoMore(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		passes(t, a, b)
		to := a.port(b)
		m.revoke(a.id)
		r.server.Kick(a.id)
		waitFor(t, "the news at the other end", func() bool { return b.reservation(a).Refused != "" })
		a.conn.WriteToUDPAddrPort([]byte("after the end"), to)
		c := startEnd(t, m, n.Host(nattest.Public), r)
		join(t, c, b)
		passes(t, c, b)
		if _, ok := b.from("after the end"); ok {
			t.Error("a packet of a revoked node arrived")
		}
	})
}

func TestWithoutForwardingInTheKernelThisProcessForwards(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	forwarding(t, r.host, "0")
	if name, why := r.udp.Driver(); name != "userspace" || why == nil || !strings.Contains(why.Error(), "ip_forward") {
		t.Errorf("driver %s: %v", name, why)
	}
	a, b, c := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Public), r)
	join(t, a, b)
	passes(t, a, b)
	if st := r.udp.Stats(); st.InKernel != 0 {
		t.Errorf("%+v", st)
	}
	forwarding(t, r.host, "1")
	join(t, a, c)
	passes(t, a, c)
	if st := r.udp.Stats(); st.InKernel != 1 {
		t.Errorf("after forwarding was allowed: %+v", st)
	}
}

func TestAFirewallThatDropsIsNoticed(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	c, drop := r.nft(t), nftables.ChainPolicyDrop
	other := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "other"})
	c.AddChain(&nftables.Chain{Table: other, Name: "forward", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	waitFor(t, "the fall back to userspace", func() bool {
		a.knock(b)
		a.send(b, "lost")
		a.ReservationFailed(r.key.ID(), b.id)
		return r.udp.Stats().FellBack == 1
	})
	passes(t, a, b)
	if name, why := r.udp.Driver(); name != "userspace" || why == nil || !strings.Contains(why.Error(), "firewall") {
		t.Errorf("driver %s: %v", name, why)
	}
}

func TestFlowsOutliveTheirRelaysAgent(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	host := n.Host(nattest.Public)
	r := startUDP(t, host, m, "kernel")
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	passes(t, a, b)
	used := a.port(b).Port()
	r.kill()
	r.server.Close()
	r.table.Close()
	passes(t, a, b) // nobody but the kernel is left
	again, err := relaynft.Open(relaynft.Config{NetNS: int(r.ns)})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if !again.Stale(used) || again.Stale(24099) {
		t.Errorf("port %d is not known to be in use", used)
	}
	passes(t, a, b)
	if err := relaynft.Purge(relaynft.Config{NetNS: int(r.ns)}); err != nil {
		t.Fatal(err)
	}
	if r.ours(t) != nil {
		t.Error("the table is there after the purge")
	}
	a.send(b, "after the purge")
	c := startUDP(t, host, m, "kernel")
	d, e := startEnd(t, m, n.Host(nattest.Public), c), startEnd(t, m, n.Host(nattest.Public), c)
	join(t, d, e)
	passes(t, d, e)
	if _, ok := b.from("after the purge"); ok {
		t.Error("a flow outlived the purge")
	}
}

func TestATableThatSomebodyDeletedIsMended(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	join(t, a, b)
	passes(t, a, b)
	nft := r.nft(t)
	nft.DelTable(r.ours(t))
	if err := nft.Flush(); err != nil {
		t.Fatal(err)
	}
	a.open() // whose new mapping has no entry in the connection table
	waitFor(t, "the table to be mended", func() bool { a.knock(b); b.knock(a); return r.udp.Stats().Rebound > 0 })
	passes(t, a, b)
}

func TestASessionAfterTheFirstKeepsThePair(t *testing.T) {
	eachDriver(t, func(t *testing.T, driver string) {
		n, m := nattest.New(t), newMembers()
		r := startUDP(t, n.Host(nattest.Public), m, driver)
		a, b := startEnd(t, m, n.Host(nattest.Symmetric), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
		join(t, a, b)
		passes(t, a, b)
		before := a.port(b)
		a.SetRelays(nil)
		waitFor(t, "the end of the session", func() bool { return !r.server.Connected(a.id) })
		passes(t, a, b) // a client whose agent is away goes on being served
		a.use(r.testRelay)
		waitFor(t, "the new session", func() bool { return a.connected(r.key.ID()) })
		join(t, a, b)
		if a.port(b) != before {
			t.Errorf("port %s after the new session, %s before", a.port(b), before)
		}
		binds := r.udp.Stats()
		a.open() // its key is a new one, and its counter began anew
		waitFor(t, "the rebinding", func() bool { a.knock(b); return r.udp.Stats().Rebound > binds.Rebound })
		passes(t, a, b)
	})
}

func TestAClientsRequestsArePaced(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace")
	h := n.Host(nattest.Public)
	a, b := startEnd(t, m, h, r, func(e *udpEnd) { e.holds = true }), startEnd(t, m, h, r) // refusals may still be on their way when b asks
	for range 1000 {
		if err := a.Reserve(r.key.ID(), b.id); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "the refusal of some", func() bool { return r.udp.Stats().Denied >= 1000-256-16-100 })
	if st := r.udp.Stats(); st.Pairs != 1 {
		t.Errorf("%d pairs", st.Pairs)
	}
	join(t, b, a) // the other end is not concerned
	passes(t, a, b)
}

func TestAFloodAtAReservedPortWakesNobody(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "kernel")
	a, b, c := startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r), startEnd(t, m, n.Host(nattest.Public), r)
	join(t, a, b)
	passes(t, a, b)
	for range 2000 {
		c.conn.WriteToUDPAddrPort(make([]byte, 1400), a.port(b))
	}
	passes(t, a, b) // what was sent before has been dropped by now
	if st := r.udp.Stats(); st.Refused != 0 {
		t.Errorf("%d datagrams of a stranger reached this process", st.Refused)
	}
}
