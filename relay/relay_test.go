package relay

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
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
	r := &testRelay{key: newKey(t), members: m, conns: map[net.Conn]bool{}}
	cfg := ServerConfig{Self: r.key.ID(), Member: m.has}
	for _, c := range change {
		c(&cfg)
	}
	r.server = NewServer(cfg)
	r.listen(t, "127.0.0.1:0")
	t.Cleanup(func() { r.kill(); r.server.Close() })
	return r
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

func newNode(t testing.TB, m *members, key *identity.Key) *testNode {
	n := &testNode{key: key, id: key.ID(), packets: make(chan got, 4096), streams: make(chan net.Conn, 16)}
	if m != nil {
		m.allow(n.id)
	}
	n.Pool = NewPool(PoolConfig{
		Self: n.id, Key: key,
		OnPacket: func(from identity.ID, channel byte, b []byte) {
			select {
			case n.packets <- got{from, channel, string(b)}:
			default:
			}
		},
		OnStream: func(c net.Conn, from identity.ID) { n.streams <- c },
	})
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

func TestPacketsPassBetweenMembers(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	large := strings.Repeat("x", MaxPayload)
	for _, want := range []got{
		{a.id, ChannelWireGuard, "data"}, {a.id, ChannelGossip, "gossip"}, {a.id, ChannelSignal, "signal"},
		{a.id, ChannelGossip, ""}, {a.id, ChannelWireGuard, large},
	} {
		if err := a.Send(b.id, want.channel, []byte(want.b)); err != nil {
			t.Fatal(err)
		}
		b.want(t, want)
	}
	if err := a.Send(b.id, 0, make([]byte, MaxPayload+1)); err == nil {
		t.Error("a packet over the limit was taken")
	}
	// A relay's own host and a node itself are peers like all others.
	if err := a.Send(a.id, 0, []byte("self")); err != nil {
		t.Fatal(err)
	}
	a.want(t, got{a.id, 0, "self"})
}

func TestStrangersAreRefused(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	stranger := newNode(t, nil, newKey(t))
	stranger.use(r)
	waitFor(t, "the refusal", func() bool { return stranger.Stats()[0].LastError != "" })
	if r.server.Connected(stranger.id) {
		t.Error("a stranger has a session")
	}
}

func TestImpersonatedRelayIsRefused(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	n := newNode(t, m, newKey(t))
	other := newKey(t)
	n.SetRelays([]Relay{{ID: other.ID(), Addresses: []string{r.address}, Key: other.Public()}})
	waitFor(t, "the refusal", func() bool {
		return strings.Contains(n.Stats()[0].LastError, identity.ErrUnknownPeer.Error())
	})
	if len(n.Links()) != 0 {
		t.Errorf("links with an impersonated relay: %v", n.Links())
	}
}

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
		if _, err := readFrame(c, frameHello); err != nil {
			t.Fatal(err)
		}
		waitFor(t, "the session", func() bool { return r.server.Connected(key.ID()) })
	}
	return c
}

func TestSourceCannotBeForged(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	c := rawSession(t, r, newKey(t), identity.ALPNRelay)
	// The only ID a client can write is the destination; a frame of the relay's own kind is refused.
	if _, err := c.Write(appendNode(nil, frameHere, a.id)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); errors.Is(err, io.ErrNoProgress) {
		t.Fatal(err)
	}
	key := newKey(t)
	c = rawSession(t, r, key, identity.ALPNRelay)
	if _, err := c.Write(appendData(nil, b.id, 0, append(a.id[:], "as if from a"...))); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{key.ID(), 0, string(a.id[:]) + "as if from a"})
}

func TestBrokenFramesEndTheSession(t *testing.T) {
	for name, frame := range map[string][]byte{
		"data without destination": appendHeader(nil, frameData, 3),
		"unknown type":             appendHeader(nil, 0x55, 0),
		"long ping":                appendHeader(nil, framePing, 9),
		"longer than any frame":    {byte(frameData), 0xff, 0xff},
		"relay's frame":            appendReply(nil, replyOK, ""),
		"hello":                    appendHello(nil, hello{}),
	} {
		t.Run(name, func(t *testing.T) {
			m := newMembers()
			r := startRelay(t, m)
			key := newKey(t)
			c := rawSession(t, r, key, identity.ALPNRelay)
			if _, err := c.Write(frame); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
		})
	}
	t.Run("cut short", func(t *testing.T) {
		m := newMembers()
		r := startRelay(t, m)
		b := startNode(t, m, r)
		key := newKey(t)
		c := rawSession(t, r, key, identity.ALPNRelay)
		whole := appendData(nil, b.id, 0, []byte("never whole"))
		if _, err := c.Write(whole[:len(whole)-1]); err != nil {
			t.Fatal(err)
		}
		c.Close()
		waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
		if len(b.packets) != 0 {
			t.Error("half a packet was delivered")
		}
	})
	t.Run("types to ignore", func(t *testing.T) {
		m := newMembers()
		r := startRelay(t, m)
		b := startNode(t, m, r)
		key := newKey(t)
		c := rawSession(t, r, key, identity.ALPNRelay)
		frames := append(appendHeader(nil, 0xf0, 4), 1, 2, 3, 4)
		if _, err := c.Write(appendData(frames, b.id, 0, []byte("after"))); err != nil {
			t.Fatal(err)
		}
		b.want(t, got{key.ID(), 0, "after"})
	})
}

func TestSilentClientIsDropped(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.IdleTimeout = 300 * time.Millisecond })
	key := newKey(t)
	rawSession(t, r, key, identity.ALPNRelay)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(key.ID()) })
}

func TestPacketForLateComerIsNotLost(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	b := newNode(t, m, newKey(t))
	if err := a.Send(b.id, ChannelWireGuard, []byte("handshake")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the relay's refusal", func() bool { return a.Stats()[0].Gone == 1 })
	if err := a.Send(b.id, ChannelGossip, []byte("gossip")); !errors.Is(err, ErrNoRelay) {
		t.Errorf("gossip to an absent peer: %v, want %v", err, ErrNoRelay)
	}
	b.use(r)
	b.want(t, got{a.id, ChannelWireGuard, "handshake"})
}

func TestNewerSessionReplacesOlder(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	key := newKey(t)
	older := rawSession(t, r, key, identity.ALPNRelay) // half-open: it neither reads nor closes
	newer := rawSession(t, r, key, identity.ALPNRelay)
	if _, err := io.Copy(io.Discard, older); err == nil {
		t.Log("the older session saw a clean end")
	}
	if err := a.Send(key.ID(), 0, []byte("to the newer")); err != nil {
		t.Fatal(err)
	}
	body, err := readFrame(newer, frameData)
	if err != nil {
		t.Fatal(err)
	}
	if from, _, payload := decodeData(body); from != a.id || string(payload) != "to the newer" {
		t.Errorf("got %q from %s", payload, from)
	}
	if s := r.server.Stats(); s.Replaced < 1 || s.Sessions != 2 {
		t.Errorf("stats: %+v, want one session replaced and two present", s)
	}
}

func TestKick(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	stream, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	m.revoke(a.id)
	r.server.Kick(a.id)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(a.id) })
	if _, err := stream.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("a kicked node's stream ended with %v, want a reset", err)
	}
	waitFor(t, "the refusal to come back", func() bool { return a.Stats()[0].Reconnects > 0 && !a.Stats()[0].Connected })
}

func TestReconnectKeepsTrying(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	r.kill()
	waitFor(t, "the loss to be noticed", func() bool { return len(a.Links()) == 0 && len(b.Links()) == 0 })
	r.listen(t, r.address)
	if err := a.Send(b.id, ChannelSignal, []byte("kept over the break")); err != nil {
		t.Fatal(err)
	}
	b.want(t, got{a.id, ChannelSignal, "kept over the break"})
}

// Who knows that a relay's host is back need not wait for the backoff, which has grown meanwhile.
func TestRetryEndsTheBackoff(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	n := startNode(t, m, r)
	waitFor(t, "the session", func() bool { return n.connected(r.key.ID()) })
	r.kill()
	dials := func() uint64 { return n.Stats()[0].Reconnects }
	waitFor(t, "a backoff of some seconds", func() bool {
		n.Retry(r.key.ID())
		return dials() >= 6
	})
	r.listen(t, r.address)
	n.Retry(r.key.ID())
	began := time.Now()
	waitFor(t, "the session again", func() bool { return n.connected(r.key.ID()) })
	if d := time.Since(began); d > 2*time.Second {
		t.Errorf("took %s, as long as the backoff", d)
	}
}

func TestStreams(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a, b := startNode(t, m, r), startNode(t, m, r)
	ca, err := a.Dial(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	cb := <-b.streams
	type half interface{ CloseWrite() error }
	const size = 8 << 20
	send := func(c net.Conn, seed byte) {
		block := bytes.Repeat([]byte{seed, 1, 2, 3}, 4096)
		for range size / len(block) {
			if _, err := c.Write(block); err != nil {
				t.Errorf("write: %v", err)
				return
			}
		}
		if err := c.(half).CloseWrite(); err != nil {
			t.Errorf("close one half: %v", err)
		}
	}
	receive := func(c net.Conn, seed byte) {
		h, want := sha256.New(), sha256.Sum256(bytes.Repeat([]byte{seed, 1, 2, 3}, size/4))
		if n, err := io.Copy(h, c); err != nil || n != size || !bytes.Equal(h.Sum(nil), want[:]) {
			t.Errorf("received %d bytes (want %d), error %v, or other bytes than were sent", n, size, err)
		}
	}
	// One direction ends long before the other begins.
	var wg sync.WaitGroup
	wg.Go(func() { send(ca, 'a') })
	receive(cb, 'a')
	wg.Go(func() { send(cb, 'b') })
	receive(ca, 'b')
	wg.Wait()
	waitFor(t, "the stream to be forgotten", func() bool { return r.server.Stats().Streams == 0 })
}

func TestStreamToAbsentPeerFailsAtOnce(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := a.Dial(ctx, newKey(t).ID()); !errors.Is(err, errNotHere) || !errors.Is(err, ErrNoRelay) {
		t.Errorf("dial: %v, want %v", err, errNotHere)
	}
}

func TestStreamOfferNeedsItsOwnerAndSecret(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	a := startNode(t, m, r)
	key, thief := newKey(t), newKey(t)
	target := rawSession(t, r, key, identity.ALPNRelay)
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Dial(t.Context(), key.ID())
		dialed <- err
	}()
	body, err := readFrame(target, frameOffer)
	if err != nil {
		t.Fatal(err)
	}
	o := decodeOffer(body)
	if o.from != a.id {
		t.Errorf("offer from %s, want %s", o.from, a.id)
	}
	wrong := o.secret
	wrong[0] ^= 1
	for _, c := range []struct {
		key    *identity.Key
		secret [secretSize]byte
		want   replyCode
	}{{thief, o.secret, replyRefused}, {key, wrong, replyRefused}, {key, o.secret, replyOK},
		{key, o.secret, replyRefused}} {
		conn := rawSession(t, r, c.key, identity.ALPNSplice)
		if _, err := conn.Write(appendAccept(nil, o.stream, c.secret)); err != nil {
			t.Fatal(err)
		}
		body, err := readFrame(conn, frameReply)
		if err != nil {
			t.Fatal(err)
		}
		if code, reason := decodeReply(body); code != c.want {
			t.Errorf("answer %d %q, want %d", code, reason, c.want)
		}
	}
	if err := <-dialed; err != nil {
		t.Error(err)
	}
}

func TestStreamsAreLimited(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxStreamsPerClient = 2 })
	a, b := startNode(t, m, r), startNode(t, m, r)
	for i := range 3 {
		_, err := a.Dial(t.Context(), b.id)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	if _, err := b.Dial(t.Context(), a.id); err != nil {
		t.Errorf("another client's stream: %v", err)
	}
}

func TestSessionsAreLimited(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxSessions = 1 })
	startNode(t, m, r)
	late := newNode(t, m, newKey(t))
	late.use(r)
	waitFor(t, "the refusal", func() bool { return r.server.Stats().Refused > 0 })
}

func ExamplePool_Choose() {
	p := NewPool(PoolConfig{})
	defer p.Close()
	_, _, ok := p.Choose(identity.ID{1})
	fmt.Println(ok)
	// Output: false
}

// Limits that change while the relay works count for what comes next: sessions, streams, and what clients send.
func TestLimitsChange(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m, func(c *ServerConfig) { c.MaxSessions, c.MaxStreamsPerClient = 1, 1 })
	a := startNode(t, m, r)
	late := newNode(t, m, newKey(t))
	late.use(r)
	waitFor(t, "the refusal", func() bool { return r.server.Stats().Refused > 0 })
	r.server.SetLimits(Limits{MaxSessions: 2, MaxStreamsPerClient: 2, MaxMemory: 32 << 20, ClientPackets: 100})
	waitFor(t, "the second session", func() bool { return r.server.Stats().Sessions == 2 })
	if have := r.server.Stats().MaxMemory; have != 32<<20 {
		t.Errorf("%d bytes of memory", have)
	}
	for i := range 3 {
		_, err := a.Dial(t.Context(), late.id)
		if limited := err != nil; limited != (i == 2) {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	limited := func() uint64 {
		for range 50 {
			_ = a.Send(late.id, 1, make([]byte, 100))
		}
		return r.server.Stats().Limited
	}
	waitFor(t, "a client that sends too much is slowed", func() bool { return limited() > 0 })
	r.server.SetLimits(Limits{MaxSessions: 1})
	if n := r.server.Stats().Sessions; n != 2 {
		t.Errorf("%d sessions are left: those that are open stay", n)
	}
}
