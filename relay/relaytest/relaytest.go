package relaytest

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
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

// Relay is a relay as the agent runs it: one TLS listener, split by ALPN, members only.
type Relay struct {
	Key     *identity.Key
	Server  *server.Server
	Address string
	Members *Members
	NoWays  atomic.Uint64 // told on to clients, where the test's pools count them

	listener net.Listener
	mu       sync.Mutex
	conns    map[net.Conn]bool
	wg       sync.WaitGroup
}

// Members are the nodes that a relay lets in.
type Members struct {
	mu sync.Mutex
	m  map[identity.ID]bool
}

// Allow lets nodes in.
func (m *Members) Allow(ids ...identity.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		m.m[id] = true
	}
}

// Revoke lets a node in no more. Its session stays.
func (m *Members) Revoke(id identity.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.m, id)
}

// Has tells whether a node is let in.
func (m *Members) Has(id identity.ID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.m[id]
}

// NewKey makes a node's key.
func NewKey(t testing.TB) *identity.Key {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// StartRelay starts a relay on the loopback. It ends with the test.
func StartRelay(t testing.TB, m *Members, change ...func(*server.Config)) *Relay {
	t.Helper()
	key := NewKey(t)
	cfg := server.Config{Self: key.ID(), Member: m.Has}
	for _, c := range change {
		c(&cfg)
	}
	r := NewRelay(key, cfg)
	r.Members = m
	r.Listen(t, "127.0.0.1:0")
	t.Cleanup(func() { r.Kill(); r.Server.Close() })
	return r
}

// NewRelay makes a relay that does not listen yet, and whose members are all nodes.
func NewRelay(key *identity.Key, cfg server.Config) *Relay {
	return &Relay{Key: key, Server: server.New(cfg), conns: map[net.Conn]bool{}}
}

// Listen is Open for a test.
func (r *Relay) Listen(t testing.TB, address string) {
	t.Helper()
	if err := r.Open(address); err != nil {
		t.Fatal(err)
	}
}

// Open serves at an address. Without members everybody is one.
func (r *Relay) Open(address string) error {
	config, err := r.Key.ServerTLS([]string{identity.ALPNRelay, identity.ALPNSplice},
		func(_ string, key ed25519.PublicKey) error {
			if r.Members != nil && !r.Members.Has(identity.IDOf(key)) {
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
	r.listener, r.Address = l, l.Addr().String()
	r.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns[c] = true
			r.mu.Unlock()
			r.wg.Go(func() { r.serve(tls.Server(wire.Gather(c), config)) })
		}
	})
	return nil
}

func (r *Relay) serve(c *tls.Conn) {
	defer c.NetConn().Close()
	if c.Handshake() != nil {
		return
	}
	key, err := identity.PeerKey(c.ConnectionState())
	if err != nil {
		return
	}
	if c.ConnectionState().NegotiatedProtocol == identity.ALPNSplice {
		r.Server.HandleSplice(c, identity.IDOf(key))
	} else {
		r.Server.HandleSession(c, identity.IDOf(key))
	}
}

// Kill drops every connection and stops listening.
func (r *Relay) Kill() {
	r.listener.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.wg.Wait()
}

// Entry is the relay as a pool is told of it.
func (r *Relay) Entry() client.Relay {
	return client.Relay{ID: r.Key.ID(), Addresses: []string{r.Address}, Key: r.Key.Public()}
}

// Got is a packet that has arrived.
type Got struct {
	From    identity.ID
	Channel byte
	Payload string
}

// Node is a pool, and what has arrived at it.
type Node struct {
	*client.Pool
	Key     *identity.Key
	ID      identity.ID
	Packets chan Got
	Streams chan net.Conn
}

// StartNode makes a member and waits for its sessions with relays.
func StartNode(t testing.TB, m *Members, relays ...*Relay) *Node {
	t.Helper()
	n := NewNode(t, m, NewKey(t))
	n.Use(relays...)
	for _, r := range relays {
		WaitFor(t, "session with relay", func() bool { return n.Connected(r.Key.ID()) })
	}
	return n
}

// NewNode makes a node without relays, a member if m is not nil. It ends with the test.
func NewNode(t testing.TB, m *Members, key *identity.Key, change ...func(*client.PoolConfig)) *Node {
	t.Helper()
	n := &Node{Key: key, ID: key.ID(), Packets: make(chan Got, 4096), Streams: make(chan net.Conn, 16)}
	if m != nil {
		m.Allow(n.ID)
	}
	cfg := client.PoolConfig{
		Self: n.ID, Key: key,
		OnPacket: func(from identity.ID, channel byte, b []byte) {
			select {
			case n.Packets <- Got{from, channel, string(b)}:
			default:
			}
		},
		OnStream: func(c net.Conn, from identity.ID) { n.Streams <- c },
	}
	for _, c := range change {
		c(&cfg)
	}
	n.Pool = client.NewPool(cfg)
	t.Cleanup(func() { n.Close() })
	return n
}

// Use tells the node which relays there are.
func (n *Node) Use(relays ...*Relay) {
	var rs []client.Relay
	for _, r := range relays {
		rs = append(rs, r.Entry())
	}
	n.SetRelays(rs)
}

// Connected tells whether the node has a session with a relay, and the relay answers.
func (n *Node) Connected(relay identity.ID) bool {
	for _, s := range n.Stats() {
		if s.Relay == relay {
			return s.Connected && !s.Suspect
		}
	}
	return false
}

// WaitFor waits for a condition, and ends the test when that takes too long.
func WaitFor(t testing.TB, what string, ok func() bool) {
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

// Want ends the test if another packet arrives next, or none.
func (n *Node) Want(t testing.TB, from identity.ID, channel byte, payload string) {
	t.Helper()
	want := Got{from, channel, payload}
	select {
	case have := <-n.Packets:
		if have != want {
			t.Fatalf("got packet %v, want %v", have, want)
		}
	case <-time.After(10 * time.Second):
		t.Fatalf("no packet, want %v", want)
	}
}

// NewMembers makes an empty list of members.
func NewMembers() *Members { return &Members{m: map[identity.ID]bool{}} }

// RawSession speaks to a relay without a Pool, so that it can misbehave.
func RawSession(t testing.TB, r *Relay, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	r.Members.Allow(key.ID())
	config, err := key.ClientTLS(alpn, identity.Expect(r.Key.Public()))
	if err != nil {
		t.Fatal(err)
	}
	c, err := tls.Dial("tcp", r.Address, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.NetConn().Close() })
	if alpn == identity.ALPNRelay {
		if _, err := wire.ReadFrame(c, wire.FrameHello); err != nil {
			t.Fatal(err)
		}
		WaitFor(t, "the session", func() bool { return r.Server.Connected(key.ID()) })
	}
	return c
}

// Choice is the relay that the node uses for a peer.
func (n *Node) Choice(peer identity.ID) identity.ID {
	id, _, _ := n.Choose(peer)
	return id
}

// DialAs connects to a relay as a member would, and leaves what is said to the test.
func DialAs(t *testing.T, m *Members, r *Relay, key *identity.Key, alpn string) *tls.Conn {
	t.Helper()
	m.Allow(key.ID())
	config, err := key.ClientTLS(alpn, identity.Expect(r.Key.Public()))
	if err != nil {
		t.Fatal(err)
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: config}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := d.DialContext(ctx, "tcp", r.Address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*tls.Conn)
}
