package udp_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
	"github.com/skeinmesh/skein/relay/wire"
)

// kernelTable is the driver as the agent gives it to the relay, looked at from the relay's namespace.
type kernelTable struct {
	*relaynft.Table
	host *nattest.Host
}

func (k kernelTable) Map(old, new udp.Mapping) error {
	return k.Table.Map(relaynft.Mapping(old), relaynft.Mapping(new))
}

func (k kernelTable) Used(m udp.Mapping) (bool, error) { return k.Table.Used(relaynft.Mapping(m)) }

func (k kernelTable) Ready(ipv6 bool) (err error) {
	k.host.Do(func() { err = k.Table.Ready(ipv6) })
	return err
}

// udpRelay is a relay on a public host: its sessions pass the test's own loopback, its UDP the little internet.
type udpRelay struct {
	*relaytest.Relay
	host  *nattest.Host
	ns    netns.NsHandle
	udp   *udp.Relay
	table *relaynft.Table // nil: userspace
}

func startUDP(
	t testing.TB, host *nattest.Host, m *relaytest.Members, driver string, change ...func(*udp.Config),
) *udpRelay {
	t.Helper()
	r := &udpRelay{host: host}
	host.Do(func() {
		var err error
		if r.ns, err = netns.Get(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { r.ns.Close() })
	cfg := udp.Config{First: 24000, Last: 24099, Namespace: &r.ns}
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
	if r.udp, err = udp.New(cfg); err != nil {
		t.Fatal(err)
	}
	r.Relay = relaytest.StartRelay(t, m, func(c *server.Config) { c.UDP = r.udp })
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
		if x.Name == dataplane.DefaultNumbers().RelayNftTable {
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
	*relaytest.Node
	t     testing.TB
	host  *nattest.Host
	relay *udpRelay
	ipv6  bool // it sends to the relay's IPv6 address
	holds bool // what was granted counts, also when a later request was refused

	onPacket func([]byte) // what comes in the session; set before anything is sent

	mu       sync.Mutex
	conn     *net.UDPConn
	ended    chan struct{} // its reader has
	reserved map[identity.ID]client.Reservation
	heard    map[string]netip.AddrPort // payload -> where it came from
	binds    [][]byte                  // that were sent
}

func startEnd(t testing.TB, m *relaytest.Members, host *nattest.Host, r *udpRelay, change ...func(*udpEnd)) *udpEnd {
	t.Helper()
	e := &udpEnd{t: t, host: host, relay: r,
		reserved: map[identity.ID]client.Reservation{}, heard: map[string]netip.AddrPort{}}
	for _, c := range change {
		c(e)
	}
	key := relaytest.NewKey(t)
	m.Allow(key.ID())
	pool := client.NewPool(client.PoolConfig{Self: key.ID(), Key: key,
		OnPacket: func(_ identity.ID, _ byte, b []byte) { e.onPacket(b) },
		OnReserved: func(x client.Reservation) {
			e.mu.Lock()
			if !e.holds || x.Endpoint.IsValid() || !e.reserved[x.Peer].Endpoint.IsValid() {
				e.reserved[x.Peer] = x
			}
			e.mu.Unlock()
		}})
	t.Cleanup(func() { pool.Close() })
	e.Node = &relaytest.Node{Pool: pool, Key: key, ID: key.ID()}
	e.Use(r.Relay)
	relaytest.WaitFor(t, "a session with the relay", func() bool { return e.Connected(r.Key.ID()) })
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
			if wire.IsBind(b[:n]) {
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

func (e *udpEnd) reservation(peer *udpEnd) client.Reservation {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reserved[peer.ID]
}

// port is where this end sends what is for a peer.
func (e *udpEnd) port(peer *udpEnd) netip.AddrPort {
	at := e.relay.host.Addr
	if e.ipv6 {
		at = e.relay.host.Addr6
	}
	return netip.AddrPortFrom(at, e.reservation(peer).Endpoint.Port())
}

// bind sends the proof of where this end is, which goes ahead of a ping.
func (e *udpEnd) bind(peer *udpEnd) {
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
	if err := a.Reserve(a.relay.Key.ID(), b.ID); err != nil {
		t.Fatal(err)
	}
	relaytest.WaitFor(t, "both ends' ports", func() bool {
		return a.reservation(b).Endpoint.IsValid() && b.reservation(a).Endpoint.IsValid()
	})
	proven(t, a, b)
}

func proven(t testing.TB, a, b *udpEnd) {
	t.Helper()
	relaytest.WaitFor(t, "the proof of both mappings", func() bool {
		a.bind(b)
		b.bind(a)
		return a.reservation(b).Ready && b.reservation(a).Ready
	})
}

var said int

// passes sends both ways until both have heard, and tells from where.
func passes(t testing.TB, a, b *udpEnd) (atA, atB netip.AddrPort) {
	t.Helper()
	said++
	x, y := fmt.Sprintf("a to b %d", said), fmt.Sprintf("b to a %d", said)
	relaytest.WaitFor(t, "packets in both directions", func() bool {
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
