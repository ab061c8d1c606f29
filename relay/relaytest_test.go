package relay

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// testRelay is a relay as the agent runs it: one TLS listener, split by ALPN, members only.
type testRelay struct {
	key     *identity.Key
	server  *Server
	address string
	members *members
	noWays  atomic.Uint64 // told on to clients, where the test's pools count them

	listener net.Listener
	mu       sync.Mutex
	conns    map[net.Conn]bool
	wg       sync.WaitGroup
}

type members struct {
	mu sync.Mutex
	m  map[identity.ID]bool
}

func (m *members) allow(ids ...identity.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		m.m[id] = true
	}
}

func (m *members) revoke(id identity.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.m, id)
}

func (m *members) has(id identity.ID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.m[id]
}

func newKey(t testing.TB) *identity.Key {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func startRelay(t testing.TB, m *members, change ...func(*ServerConfig)) *testRelay {
	t.Helper()
	key := newKey(t)
	cfg := ServerConfig{Self: key.ID(), Member: m.has}
	for _, c := range change {
		c(&cfg)
	}
	r := newRelay(key, cfg)
	r.members = m
	r.listen(t, "127.0.0.1:0")
	t.Cleanup(func() { r.kill(); r.server.Close() })
	return r
}

// newRelay makes a relay that does not listen yet, and whose members are all nodes.
func newRelay(key *identity.Key, cfg ServerConfig) *testRelay {
	return &testRelay{key: key, server: NewServer(cfg), conns: map[net.Conn]bool{}}
}

func (r *testRelay) listen(t testing.TB, address string) {
	t.Helper()
	if err := r.open(address); err != nil {
		t.Fatal(err)
	}
}

// open serves at an address. Without members everybody is one.
func (r *testRelay) open(address string) error {
	config, err := r.key.ServerTLS([]string{identity.ALPNRelay, identity.ALPNSplice},
		func(_ string, key ed25519.PublicKey) error {
			if r.members != nil && !r.members.has(identity.IDOf(key)) {
				return errors.New("not a member")
			}
			return nil
		})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	r.listener, r.address = l, l.Addr().String()
	r.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns[c] = true
			r.mu.Unlock()
			r.wg.Go(func() { r.serve(tls.Server(Gather(c), config)) })
		}
	})
	return nil
}

func (r *testRelay) serve(c *tls.Conn) {
	defer c.NetConn().Close()
	if c.Handshake() != nil {
		return
	}
	key, err := identity.PeerKey(c.ConnectionState())
	if err != nil {
		return
	}
	if c.ConnectionState().NegotiatedProtocol == identity.ALPNSplice {
		r.server.HandleSplice(c, identity.IDOf(key))
	} else {
		r.server.HandleSession(c, identity.IDOf(key))
	}
}

// kill drops every connection and stops listening.
func (r *testRelay) kill() {
	r.listener.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

func (r *testRelay) relay() Relay {
	return Relay{ID: r.key.ID(), Addresses: []string{r.address}, Key: r.key.Public()}
}

type got struct {
	from    identity.ID
	channel byte
	b       string
}

type testNode struct {
	*Pool
	key     *identity.Key
	id      identity.ID
	packets chan got
	streams chan net.Conn
}

func startNode(t testing.TB, m *members, relays ...*testRelay) *testNode {
	t.Helper()
	n := newNode(t, m, newKey(t))
	n.use(relays...)
	for _, r := range relays {
		waitFor(t, "session with relay", func() bool { return n.connected(r.key.ID()) })
	}
	return n
}

func newNode(t testing.TB, m *members, key *identity.Key, change ...func(*PoolConfig)) *testNode {
	t.Helper()
	n := &testNode{key: key, id: key.ID(), packets: make(chan got, 4096), streams: make(chan net.Conn, 16)}
	if m != nil {
		m.allow(n.id)
	}
	cfg := PoolConfig{
		Self: n.id, Key: key,
		OnPacket: func(from identity.ID, channel byte, b []byte) {
			select {
			case n.packets <- got{from, channel, string(b)}:
			default:
			}
		},
		OnStream: func(c net.Conn, from identity.ID) { n.streams <- c },
	}
	for _, c := range change {
		c(&cfg)
	}
	n.Pool = NewPool(cfg)
	t.Cleanup(func() { n.Close() })
	return n
}

func (n *testNode) use(relays ...*testRelay) {
	var rs []Relay
	for _, r := range relays {
		rs = append(rs, r.relay())
	}
	n.SetRelays(rs)
}

func (n *testNode) connected(relay identity.ID) bool {
	for _, s := range n.Stats() {
		if s.Relay == relay {
			return s.Connected && !s.Suspect
		}
	}
	return false
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	// nothing takes so long; a busy machine, with the race detector, takes some of it
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
		time.Sleep(2 * time.Millisecond) // polling a condition with a deadline
	}
}

func (n *testNode) want(t testing.TB, want got) {
	t.Helper()
	select {
	case have := <-n.packets:
		if have != want {
			t.Fatalf("got packet %v, want %v", have, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("no packet, want %v", want)
	}
}

func newMembers() *members { return &members{m: map[identity.ID]bool{}} }

// rawSession speaks to a relay without a Pool, so that it can misbehave.
func rawSession(t testing.TB, r *testRelay, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	r.members.allow(key.ID())
	config, err := key.ClientTLS(alpn, identity.Expect(r.key.Public()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := tls.Dial("tcp", r.address, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.NetConn().Close() })
	if alpn == identity.ALPNRelay {
		if _, err := ReadFrame(c, FrameHello); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the session", func() bool { return r.server.Connected(key.ID()) })
	}
	return c
}

func (n *testNode) choice(peer identity.ID) identity.ID {
	id, _, _ := n.Choose(peer)
	return id
}

// dialAs connects to a relay as a member would, and leaves what is said to the test.
func dialAs(t *testing.T, m *members, r *testRelay, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	m.allow(key.ID())
	config, err := key.ClientTLS(alpn, identity.Expect(r.key.Public()))
	if err != nil {
		t.Fatal(err)
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: config}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", r.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*tls.Conn)
}
