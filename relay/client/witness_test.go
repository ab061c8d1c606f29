package client_test

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
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// A peer could run a relay, list it in its record, and have it say anything.
func TestARelayThatThePeerChoseIsNoWitness(t *testing.T) {
	m := relaytest.NewMembers()
	relays := []*relaytest.Relay{relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)}
	a := relaytest.NewNode(t, m, relaytest.NewKey(t))
	third := settle(t, a, relays)
	b := relaytest.StartNode(t, m, third)
	a.SetPeerLinks(b.ID, []client.Link{{third.Key.ID(), time.Millisecond}})
	relaytest.WaitFor(t, "a session with the peer's relay", func() bool {
		a.Ask(b.ID)
		return needOf(a, third) == client.NeedDemand && a.Connected(third.Key.ID())
	})
	if err := a.Attest(t.Context(), b.ID, loopback); !errors.Is(err, client.ErrUnattested) {
		t.Errorf("the word of a relay that the peer's record names is taken: %v", err)
	}
	a.SetWitness(func(id identity.ID) bool { return id == third.Key.ID() })
	if err := a.Attest(t.Context(), b.ID, loopback); err != nil {
		t.Errorf("a voter's word: %v", err)
	}
	b.ID = third.Key.ID() // and nobody is a witness for itself
	for _, id := range a.Witnesses(b.ID) {
		if id == b.ID {
			t.Error("the peer is its own witness")
		}
	}
}

// The relays that a node asks need not be those that its peer has chosen: the peer shows itself to them.
func TestNodesShowThemselvesAtTheRelaysThatTheirPeersAsk(t *testing.T) {
	m := relaytest.NewMembers()
	relays := []*relaytest.Relay{relaytest.StartRelay(t, m), relaytest.StartRelay(t, m), relaytest.StartRelay(t, m)}
	b := relaytest.NewNode(t, m, relaytest.NewKey(t))
	third := settle(t, b, relays)
	a := relaytest.StartNode(t, m, third)
	relaytest.WaitFor(t, "the peer not to be seen", func() bool { // its session on trial may still be ending
		return errors.Is(a.Attest(t.Context(), b.ID, loopback), client.ErrUnattested)
	})
	b.SetPeerLinks(a.ID, []client.Link{{third.Key.ID(), time.Millisecond}})
	_ = b.Attest(t.Context(), a.ID, loopback) // it wants to predict ports, too
	relaytest.WaitFor(t, "the peer to be seen", func() bool { return a.Attest(t.Context(), b.ID, loopback) == nil })
}

// settle waits until a node has its two warm relays of three, and returns the third.
func settle(t *testing.T, n *relaytest.Node, relays []*relaytest.Relay) (third *relaytest.Relay) {
	t.Helper()
	n.Use(relays...)
	relaytest.WaitFor(t, "two warm relays and a third", func() bool {
		defer n.HoldPlans()() // a plan that is half carried out shows what never is
		warm := 0
		third = nil
		for _, r := range relays {
			switch needOf(n, r) {
			case client.NeedWarm:
				warm++
			case client.NeedNone:
				third = r
			}
		}
		return warm == 2 && third != nil && !third.Server.Connected(n.ID) // it may have been on trial
	})
	return third
}

func needOf(n *relaytest.Node, r *relaytest.Relay) string {
	for _, s := range n.Stats() {
		if s.Relay == r.Key.ID() {
			return s.Need
		}
	}
	return ""
}

// Port prediction is for IPv4, and a session may run over IPv6.
func TestASessionByIPv6ShowsTheIPv4AddressToo(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	port := int(netip.MustParseAddrPort(r.Address).Port())
	six, err := net.ListenTCP("tcp6", &net.TCPAddr{IP: net.IPv6loopback, Port: port})
	if err != nil {
		t.Skipf("this machine has no IPv6 loopback: %v", err)
	}
	six.Close()
	r.Kill()
	if err := r.Open(netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port)).String()); err != nil {
		t.Fatal(err)
	}
	both := r.Entry()
	both.Addresses = []string{
		netip.AddrPortFrom(netip.IPv6Loopback(), uint16(port)).String(), netip.AddrPortFrom(loopback, uint16(port)).String(),
	}
	a, b := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.NewNode(t, m, relaytest.NewKey(t))
	for _, n := range []*relaytest.Node{a, b} {
		n.SetRelays([]client.Relay{both})
		relaytest.WaitFor(t, "a session by IPv6", func() bool { return n.Connected(both.ID) })
	}
	if err := a.Attest(t.Context(), b.ID, loopback); !errors.Is(err, client.ErrUnattested) ||
		!strings.Contains(err.Error(), "seen at ::1") {
		t.Fatalf("before it has shown itself: %v", err)
	}
	b.SetPeerLinks(a.ID, []client.Link{{both.ID, time.Millisecond}})
	_ = b.Attest(t.Context(), a.ID, loopback) // as it wants to predict ports, too
	relaytest.WaitFor(t, "the IPv4 address to be seen", func() bool {
		return a.Attest(t.Context(), b.ID, loopback) == nil
	})
}

// A relay of an earlier version ignores the question: the answer is no, soon.
func TestARelayThatCannotTellIsNoWitness(t *testing.T) {
	key := relaytest.NewKey(t)
	config, err := key.ServerTLS([]string{identity.ALPNRelay}, func(string, ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	l := relaytest.Serve(t, func(c net.Conn) { olderRelay(tls.Server(c, config)) })
	a := relaytest.NewNode(t, nil, relaytest.NewKey(t))
	a.SetRelays([]client.Relay{{ID: key.ID(), Addresses: []string{l.Addr().String()}, Key: key.Public()}})
	relaytest.WaitFor(t, "the session", func() bool { return a.Connected(key.ID()) })
	began := time.Now()
	if err := a.Attest(t.Context(), relaytest.NewKey(t).ID(), loopback); !errors.Is(err, client.ErrUnattested) {
		t.Errorf("have %v", err)
	}
	if d := time.Since(began); d < client.WhereWait || d > client.WhereWait+5*time.Second {
		t.Errorf("the answer took %s", d)
	}
	if !a.Connected(key.ID()) {
		t.Error("the question has cost the session")
	}
}

// olderRelay greets and answers pings, and ignores the rest.
func olderRelay(c *tls.Conn) {
	defer c.Close()
	r := wire.NewFrameReader()
	greeting := wire.Hello{Version: 1, QueueBytes: 1 << 20, QueueCount: 1024, Streams: 1, IdleSeconds: 10}
	if _, err := c.Write(wire.AppendHello(nil, greeting)); err != nil {
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
			if typ == wire.FramePing {
				if _, err := c.Write(wire.AppendToken(nil, wire.FramePong, wire.DecodeToken(body))); err != nil {
					return
				}
			}
		}
	}
}
