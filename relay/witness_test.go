package relay

import (
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

var (
	loopback = netip.MustParseAddr("127.0.0.1")
	victim   = netip.MustParseAddr("198.51.100.200")
)

// A peer could run a relay, list it in its record, and have it say anything.
func TestARelayThatThePeerChoseIsNoWitness(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	a := newNode(t, m, newKey(t))
	third := settle(t, a, relays)
	b := startNode(t, m, third)
	a.SetPeerLinks(b.id, []Link{{third.key.ID(), time.Millisecond}})
	waitFor(t, "a session with the peer's relay", func() bool {
		a.Ask(b.id)
		return needOf(a, third) == NeedDemand && a.connected(third.key.ID())
	})
	if err := a.Attest(t.Context(), b.id, loopback); !errors.Is(err, ErrUnattested) {
		t.Errorf("the word of a relay that the peer's record names is taken: %v", err)
	}
	a.SetWitness(func(id identity.ID) bool { return id == third.key.ID() })
	if err := a.Attest(t.Context(), b.id, loopback); err != nil {
		t.Errorf("a voter's word: %v", err)
	}
	b.id = third.key.ID() // and nobody is a witness for itself
	for _, id := range a.Witnesses(b.id) {
		if id == b.id {
			t.Error("the peer is its own witness")
		}
	}
}

// The relays that a node asks need not be those that its peer has chosen: the peer shows itself there.
func TestNodesShowThemselvesAtTheRelaysThatTheirPeersAsk(t *testing.T) {
	m := newMembers()
	relays := []*testRelay{startRelay(t, m), startRelay(t, m), startRelay(t, m)}
	b := newNode(t, m, newKey(t))
	third := settle(t, b, relays)
	a := startNode(t, m, third)
	waitFor(t, "the peer not to be seen", func() bool { // its session on trial may still be ending
		return errors.Is(a.Attest(t.Context(), b.id, loopback), ErrUnattested)
	})
	b.SetPeerLinks(a.id, []Link{{third.key.ID(), time.Millisecond}})
	_ = b.Attest(t.Context(), a.id, loopback) // it wants to guess, too
	waitFor(t, "the peer to be seen", func() bool { return a.Attest(t.Context(), b.id, loopback) == nil })
}

// settle waits until a node has its two warm relays of three, and returns the third.
func settle(t *testing.T, n *testNode, relays []*testRelay) (third *testRelay) {
	t.Helper()
	n.use(relays...)
	waitFor(t, "two warm relays and a third", func() bool {
		defer n.HoldPlans()() // a plan that is half carried out shows what never is
		warm := 0
		third = nil
		for _, r := range relays {
			switch needOf(n, r) {
			case NeedWarm:
				warm++
			case NeedNone:
				third = r
			}
		}
		return warm == 2 && third != nil && !third.server.Connected(n.id) // it may have been on trial
	})
	return third
}

func needOf(n *testNode, r *testRelay) string {
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
	port := int(netip.MustParseAddrPort(r.address).Port())
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
	if d := time.Since(began); d < WhereWait || d > WhereWait+5*time.Second {
		t.Errorf("the answer took %s", d)
	}
	if !a.connected(key.ID()) {
		t.Error("the question has cost the session")
	}
}

// olderRelay greets and answers pings, and ignores the rest.
func olderRelay(c *tls.Conn) {
	defer c.Close()
	r := NewFrameReader()
	greeting := Hello{Version: 1, QueueBytes: 1 << 20, QueueCount: 1024, Streams: 1, IdleSeconds: 10}
	if _, err := c.Write(AppendHello(nil, greeting)); err != nil {
		return
	}
	for {
		if _, err := r.Fill(c); err != nil {
			return
		}
		for {
			typ, body, ok, err := r.Next()
			if err != nil {
				return
			}
			if !ok {
				break
			}
			if typ == FramePing {
				if _, err := c.Write(AppendToken(nil, FramePong, DecodeToken(body))); err != nil {
					return
				}
			}
		}
	}
}
