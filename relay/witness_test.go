package relay

import (
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/nattest"
)

var (
	loopback = netip.MustParseAddr("127.0.0.1")
	victim   = netip.MustParseAddr("198.51.100.200")
)

func TestARelayTellsWhereAPeersPacketsComeFrom(t *testing.T) {
	n, m := nattest.New(t), newMembers()
	r := startUDP(t, n.Host(nattest.Public), m, "userspace")
	a, b := startEnd(t, m, n.Host(nattest.PortRestricted), r), startEnd(t, m, n.Host(nattest.Symmetric), r)
	stranger := newKey(t).ID()
	for _, c := range []struct {
		name  string
		peer  identity.ID
		at    netip.Addr
		seen  bool
		error string
	}{
		{"where its session comes from", b.id, loopback, true, ""},
		{"a victim's address", b.id, victim, false, "it says 198.51.100.200, and is seen at 127.0.0.1"},
		{"where its UDP comes from, without UDP", b.id, b.host.Outside, false, "is seen at 127.0.0.1"},
		{"somebody without a session", stranger, victim, false, "none has a session of it"},
	} {
		err := a.Attest(t.Context(), c.peer, c.at)
		if c.seen && err != nil || !c.seen && (!errors.Is(err, ErrUnattested) || !strings.Contains(err.Error(), c.error)) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	join(t, a, b)
	for _, x := range []struct{ asker, peer *udpEnd }{{a, b}, {b, a}} {
		if err := x.asker.Attest(t.Context(), x.peer.id, x.peer.host.Outside); err != nil {
			t.Errorf("where UDP of the peer comes from: %v", err)
		}
		if err := x.asker.Attest(t.Context(), x.peer.id, r.host.Addr); !errors.Is(err, ErrUnattested) {
			t.Errorf("the relay's own address: %v", err)
		}
	}
	m.revoke(b.id)
	r.server.Kick(b.id)
	waitFor(t, "the end of the session", func() bool { return !r.server.Connected(b.id) })
	if err := a.Attest(t.Context(), b.id, b.host.Outside); !errors.Is(err, ErrUnattested) {
		t.Errorf("a node that was revoked: %v", err)
	}
}

// A peer could run a relay, list it in its record, and have it say anything.
func TestARelayThatThePeerChoseIsNoWitness(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	a := newNode(t, m, newKey(t))
	third := a.settle(t, relays)
	b := startNode(t, m, third)
	a.SetPeerLinks(b.id, []Link{{third.key.ID(), time.Millisecond}})
	waitFor(t, "a session with the peer's relay", func() bool {
		a.Ask(b.id)
		return a.needOf(third) == string(needDemand) && a.connected(third.key.ID())
	})
	if err := a.Attest(t.Context(), b.id, loopback); !errors.Is(err, ErrUnattested) {
		t.Errorf("the word of a relay that the peer's record names is taken: %v", err)
	}
	a.cfg.Witness = func(id identity.ID) bool { return id == third.key.ID() }
	if err := a.Attest(t.Context(), b.id, loopback); err != nil {
		t.Errorf("a voter's word: %v", err)
	}
	b.id = third.key.ID() // and nobody is a witness for itself
	for _, c := range a.witnesses(b.id) {
		if c.relay.ID == b.id {
			t.Error("the peer is its own witness")
		}
	}
}

// The relays that a node asks need not be those that its peer has chosen: the peer shows itself there.
func TestNodesShowThemselvesAtTheRelaysThatTheirPeersAsk(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	b := newNode(t, m, newKey(t))
	third := b.settle(t, relays)
	a := startNode(t, m, third)
	waitFor(t, "the peer not to be seen", func() bool { // its session on trial may still be ending
		return errors.Is(a.Attest(t.Context(), b.id, loopback), ErrUnattested)
	})
	b.SetPeerLinks(a.id, []Link{{third.key.ID(), time.Millisecond}})
	_ = b.Attest(t.Context(), a.id, loopback) // it wants to guess, too
	waitFor(t, "the peer to be seen", func() bool { return a.Attest(t.Context(), b.id, loopback) == nil })
}

// settle waits until a node has its two warm relays of three, and returns the third.
func (n *testNode) settle(t *testing.T, relays []*testRelay) (third *testRelay) {
	t.Helper()
	n.use(relays...)
	waitFor(t, "two warm relays and a third", func() bool {
		n.planning.Lock() // a plan that is half carried out shows what never is
		defer n.planning.Unlock()
		warm := 0
		third = nil
		for _, r := range relays {
			switch n.needOf(r) {
			case string(needWarm):
				warm++
			case string(needNone):
				third = r
			}
		}
		return warm == 2 && third != nil && !third.server.Connected(n.id) // it may have been on trial
	})
	return third
}

func (n *testNode) needOf(r *testRelay) string {
	for _, s := range n.Stats() {
		if s.Relay == r.key.ID() {
			return s.Need
		}
	}
	return ""
}

// Guessed ports are IPv4's, and a session may be one by IPv6.
func TestASessionByIPv6ShowsTheIPv4AddressToo(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	port := r.listener.Addr().(*net.TCPAddr).Port
	six, err := net.ListenTCP("tcp6", &net.TCPAddr{IP: net.IPv6loopback, Port: port})
	if err != nil {
		t.Skipf("this machine has no IPv6 loopback: %v", err)
	}
	six.Close()
	r.kill()
	if err := r.open(netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)).String()); err != nil {
		t.Fatal(err)
	}
	both := r.relay()
	both.Addresses = []string{
		netip.AddrPortFrom(netip.IPv6Loopback(), uint16(port)).String(), netip.AddrPortFrom(loopback, uint16(port)).String(),
	}
	a, b := newNode(t, m, newKey(t)), newNode(t, m, newKey(t))
	for _, n := range []*testNode{a, b} {
		n.SetRelays([]Relay{both})
		waitFor(t, "a session by IPv6", func() bool { return n.connected(both.ID) })
	}
	if err := a.Attest(t.Context(), b.id, loopback); !errors.Is(err, ErrUnattested) ||
		!strings.Contains(err.Error(), "seen at ::1") {
		t.Fatalf("before it has shown itself: %v", err)
	}
	b.SetPeerLinks(a.id, []Link{{both.ID, time.Millisecond}})
	_ = b.Attest(t.Context(), a.id, loopback) // as it wants to guess, too
	waitFor(t, "the IPv4 address to be seen", func() bool { return a.Attest(t.Context(), b.id, loopback) == nil })
}

// A relay of an earlier version ignores the question: the answer is no, soon.
func TestARelayThatCannotTellIsNoWitness(t *testing.T) {
	key := newKey(t)
	config, err := key.ServerTLS([]string{identity.ALPNRelay}, func(string, ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go olderRelay(tls.Server(c, config))
		}
	}()
	a := newNode(t, nil, newKey(t))
	a.SetRelays([]Relay{{ID: key.ID(), Addresses: []string{l.Addr().String()}, Key: key.Public()}})
	waitFor(t, "the session", func() bool { return a.connected(key.ID()) })
	began := time.Now()
	if err := a.Attest(t.Context(), newKey(t).ID(), loopback); !errors.Is(err, ErrUnattested) {
		t.Errorf("have %v", err)
	}
	if d := time.Since(began); d < whereWait || d > whereWait+5*time.Second {
		t.Errorf("the answer took %s", d)
	}
	if !a.connected(key.ID()) {
		t.Error("the question has cost the session")
	}
}

// olderRelay greets and answers pings, and ignores the rest.
func olderRelay(c *tls.Conn) {
	defer c.Close()
	r := newFrameReader()
	greeting := hello{version: 1, queueBytes: 1 << 20, queueCount: 1024, streams: 1, idleSeconds: 10}
	if _, err := c.Write(appendHello(nil, greeting)); err != nil {
		return
	}
	for {
		if _, err := r.fill(c); err != nil {
			return
		}
		for {
			typ, body, ok, err := r.next()
			if err != nil {
				return
			}
			if !ok {
				break
			}
			if typ == framePing {
				if _, err := c.Write(appendToken(nil, framePong, decodeToken(body))); err != nil {
					return
				}
			}
		}
	}
}

// A relay answers a client that asks without end at the rate that it promises.
func TestQuestionsAreFew(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	b := startNode(t, m, r)
	c := dialAs(t, m, r, newKey(t), identity.ALPNRelay)
	began := time.Now()
	go func() {
		var all []byte
		for range 10 * whereBurst {
			all = appendNode(all, frameWhere, b.id)
		}
		_, _ = c.Write(appendToken(all, framePing, 7)) // a pong comes behind the answers
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, n := newFrameReader(), 0
	for done := false; !done; {
		if _, err := f.fill(c); err != nil {
			t.Fatal(err)
		}
		for {
			typ, body, ok, err := f.next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if done = done || typ == framePong; typ == frameSeen {
				if node, addrs := decodeSeen(body); node != b.id || !slices.Contains(addrs, loopback) {
					t.Fatalf("the answer is %v for %s", addrs, node)
				}
				n++
			}
		}
	}
	most := whereBurst + int(time.Since(began).Seconds()*wherePerSecond) + 1
	if n < whereBurst || n > most {
		t.Errorf("%d answers to %d questions, want %d to %d", n, 10*whereBurst, whereBurst, most)
	}
}

// One relay that answers again and again, as to earlier questions, does not silence the others that were asked.
func TestEachRelayIsHeardOnce(t *testing.T) {
	var q questions
	liar, honest, peer := identity.ID{1}, identity.ID{2}, identity.ID{3}
	answers := make(chan testimony, 2)
	for _, relay := range []identity.ID{liar, honest} {
		q.begin(link{relay, peer}, answers)
	}
	for range 3 {
		q.told(liar, peer, []netip.Addr{victim})
	}
	q.told(honest, identity.ID{4}, []netip.Addr{victim}) // of another node
	q.told(honest, peer, []netip.Addr{loopback})
	if n := len(answers); n != 2 {
		t.Fatalf("%d answers are heard, want one of each relay", n)
	}
	if a, b := <-answers, <-answers; a.relay != liar || b.relay != honest || !slices.Contains(b.addrs, loopback) {
		t.Errorf("heard are %v and %v", a, b)
	}
	for _, relay := range []identity.ID{liar, honest} {
		q.end(link{relay, peer}, answers)
	}
	if len(q.waiting) > 0 {
		t.Errorf("%v still wait", q.waiting)
	}
}
