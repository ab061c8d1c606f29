package control

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

// WireGuard pads the packet with its IP and UDP headers to 16 bytes and adds 32.
func TestInTunnel(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.4.0.1"), netip.MustParseAddr("fd00::1")
	for _, c := range []struct {
		bytes int
		at    netip.Addr
		want  uint64
	}{
		{100, v4, 160}, {101, v4, 176}, {100, v6, 192}, {0, v4, 64}, {4, netip.MustParseAddr("::ffff:10.4.0.1"),
			64}, {5, v4, 80},
	} {
		if got := inTunnel(c.bytes, c.at); got != c.want {
			t.Errorf("%d bytes at %s: %d, want %d", c.bytes, c.at, got, c.want)
		}
	}
}

// A stream's bytes are counted as long as they are to be, in each direction, with what acknowledges them.
func TestStreamsAreCounted(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	var nobody, by carried
	at := &nobody
	c := &countedConn{Conn: a, at: func() *carried { return at }}
	defer c.Close()
	exchange := func(n int) {
		t.Helper()
		go func() { _, _ = io.CopyN(b, b, int64(n)) }()
		if _, err := c.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
	}
	c.ends.Store(true)
	exchange(100)
	if nobody.sent.Load() != 0 || nobody.received.Load() != 0 {
		t.Error("a stream is counted that is not to be")
	}
	c.ends.Store(false)
	exchange(100)
	first := nobody.sent.Load()
	at = &by // another peer passes it on now
	exchange(100)
	if s := nobody.sent.Load(); s != first || s != by.sent.Load() {
		t.Errorf("100 bytes each way are counted as %d sent at one peer and, later, as %d at another, where the first has "+
			"%d then", first, by.sent.Load(), s)
	}
	if s, r := by.sent.Load(), by.received.Load(); s < 100+52+32 || s > 300 || r != s {
		t.Errorf("100 bytes each way: %d sent, %d received", s, r)
	}
	if s, r := by.acksSent.Load(), by.acksReceived.Load(); s < 64+32 || s > 128 || r != s {
		t.Errorf("100 bytes each way: acknowledgements of %d sent, %d received", s, r)
	}
	before := by.acksSent.Load()
	for range 2 { // a second Close changes nothing
		_ = c.Close()
	}
	if n := by.acksSent.Load() - before; n != closePackets*ackBytes || by.acksReceived.Load() != by.acksSent.Load() {
		t.Errorf("the end of a stream is counted as %d bytes in each direction, want %d", n, closePackets*ackBytes)
	}
	var opened carried
	newCounted(b, func() *carried { return &opened })
	if s, r := opened.acksSent.Load(), opened.acksReceived.Load(); s != openPackets*ackBytes || r != s {
		t.Errorf("the start of a stream is counted as %d bytes sent and %d received, want %d", s, r, openPackets*ackBytes)
	}
	for alpn, want := range map[string]bool{identity.ALPNRPC: true, identity.ALPNGossip: true, identity.ALPNRaft: false} {
		if counts(alpn) != want {
			t.Errorf("streams of %s are counted: %v", alpn, !want)
		}
	}
}

// What goes to a node and comes from it is counted at the peer of the tunnel that passes it on, as WireGuard counts it.
func TestPassedPacketsAreCountedAtThePeerThatPassesThem(t *testing.T) {
	leader, far := identity.ID{1}, identity.ID{2}
	n := &Net{cfg: Config{Via: func(id identity.ID) identity.ID {
		if id == far {
			return leader
		}
		return id
	}}}
	n.count(far).sent.Add(5)
	n.count(leader).received.Add(7)
	if got, want := n.Carried(leader), (Carried{Sent: 5, Received: 7}); got != want {
		t.Errorf("by the leader went %+v, want %+v", got, want)
	}
	if got := n.Carried(far); got != (Carried{}) {
		t.Errorf("by a node that is not a peer went %+v", got)
	}
	if n.CountEcho(far, true, 100, netip.IPv6Loopback()); n.Carried(far).Sent == 0 {
		t.Error("an echo by a peer is counted elsewhere")
	}
}
