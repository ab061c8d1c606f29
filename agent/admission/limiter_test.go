package admission

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestLimiter(t *testing.T) {
	now := time.Unix(1000, 0)
	one := netip.MustParseAddr("192.0.2.1")
	var l Limiter
	var leaves []func()
	enter := func(from netip.Addr, want error) {
		t.Helper()
		leave, err := l.Enter(now, from)
		if !errors.Is(err, want) {
			t.Fatalf("%s: %v, want %v", from, err, want)
		}
		if leave != nil {
			leaves = append(leaves, leave)
		}
	}
	for range perSource {
		enter(one, nil)
	}
	enter(one, errPerSource)
	enter(netip.MustParseAddr("::ffff:192.0.2.1"), errPerSource)
	// Many sources together fill the places, and one that comes new still finds some.
	for i := byte(2); l.open < maxHandshakes; i++ {
		for range min(perSource, maxHandshakes-l.open) {
			enter(netip.AddrFrom4([4]byte{192, 0, 2, i}), nil)
		}
	}
	enter(netip.MustParseAddr("192.0.2.2"), errPerSource)
	enter(netip.MustParseAddr("2001:db8::1"), nil)
	for range few - 1 {
		enter(netip.MustParseAddr("2001:db8::2"), nil) // the same /64
	}
	enter(netip.MustParseAddr("2001:db8::3"), errFull)
	for i := 0; l.open < maxHandshakes+reserve; i++ {
		enter(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), nil)
	}
	enter(netip.MustParseAddr("198.51.100.1"), errFull)
	for _, leave := range leaves {
		leave()
	}
	if open, refused := l.Stats(); open != 0 || refused != 5 {
		t.Errorf("%d under way and %d refused, want 0 and 5", open, refused)
	}
	// How often a source may come is limited too.
	n := 0
	for {
		leave, err := l.Enter(now, one)
		if err != nil {
			if !errors.Is(err, errRate) {
				t.Fatal(err)
			}
			break
		}
		leave()
		n++
	}
	if n != connectBurst-perSource {
		t.Errorf("%d more connections at once, want %d", n, connectBurst-perSource)
	}
	now = now.Add(time.Second)
	for range connectRate {
		enter(one, nil)
		leaves[len(leaves)-1]()
	}
	enter(one, errRate)
	// What is quiet is forgotten, what is not is kept.
	now = now.Add(time.Minute)
	enter(netip.MustParseAddr("203.0.113.9"), nil)
	for i := range 2 * forgetAbove {
		if leave, err := l.Enter(now, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})); err == nil {
			leave()
		}
		now = now.Add(100 * time.Millisecond)
	}
	if len(l.sources) > forgetAbove+1 || l.sources[sourceOf(netip.MustParseAddr("203.0.113.9"))] == nil {
		t.Errorf("%d sources are remembered", len(l.sources))
	}
}

// Connections that never say a word hold no member up, though they come from the member's own address.
func TestListenerSurvivesAFlood(t *testing.T) {
	a, b := newKey(t), newKey(t)
	l, address := serve(t, Config{Key: a, Member: membersOf(a, b).key, Handlers: echoes()})
	var mute []net.Conn
	defer func() {
		for _, c := range mute {
			c.Close()
		}
	}()
	refused := func() uint64 { _, n := l.Stats(); return n }
	for i := 0; refused() < 20; i++ {
		if i > 1000 {
			t.Fatal("1000 mute connections, and hardly any was refused")
		}
		if c, err := net.Dial("tcp", address); err == nil { // a refusal may show here already
			mute = append(mute, c)
		}
	}
	// From another address a member gets in while all these wait.
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}, Timeout: 10 * time.Second}
	c, err := other.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	said, err := askOver(t, c, b, identity.ALPNRelay)
	if err != nil || said != fmt.Sprintf("%s %s", identity.ALPNRelay, b.ID()) {
		t.Fatalf("%q, %v", said, err)
	}
	if d := time.Since(began); d > handshakeTimeout/2 {
		t.Errorf("a member waited %s", d)
	}
	// The mute ones are ended in time.
	_ = mute[0].SetReadDeadline(time.Now().Add(2 * handshakeTimeout))
	if _, err := io.ReadAll(mute[0]); errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	if d := time.Since(began); d > 2*handshakeTimeout {
		t.Errorf("a mute connection was kept for %s", d)
	}
}

// At the control net's port each address is a source of its own: all nodes of a mesh may be in one IPv6 /64.
func TestEnterAsTellsNodesOfOneNetworkApart(t *testing.T) {
	l, now := &Limiter{}, time.Unix(0, 0)
	from := func(n int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(n)}), 128)
	}
	for range perSource {
		if _, err := l.EnterAs(now, from(1)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.EnterAs(now, from(1)); !errors.Is(err, errPerSource) {
		t.Errorf("one node beyond its bound: %v", err)
	}
	if _, err := l.EnterAs(now, from(2)); err != nil {
		t.Errorf("its neighbour: %v", err)
	}
}

// Joining is open to everybody past the handshake; those who hold places there leave some to others.
func TestJoinsAtOnceAreBounded(t *testing.T) {
	now := time.Unix(1000, 0)
	var l Limiter
	var leaves []func()
	join := func(from netip.Addr) bool {
		leave, err := l.Enter(now, from)
		if err != nil {
			t.Fatal(err)
		}
		leave() // the handshake has ended
		leave, ok := l.Join(from)
		if ok {
			leaves = append(leaves, leave)
		}
		return ok
	}
	of := func(from netip.Addr, tries int) (in int) {
		for range tries {
			if join(from) {
				in++
			}
		}
		return in
	}
	for i := range maxJoins / joinsPerSource {
		if in := of(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), joinsPerSource+5); in != joinsPerSource {
			t.Errorf("%d joins of one source, want %d", in, joinsPerSource)
		}
	}
	all := maxJoins
	for i := range joinsReserve { // some addresses that hold all places do not keep others out
		in := of(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), few+1)
		if i == 0 && in != few {
			t.Errorf("%d joins of a source that is not among those that took all places, want %d", in, few)
		}
		all += in
	}
	if want := maxJoins + joinsReserve; all != want {
		t.Errorf("%d joins at once, want %d", all, want)
	}
	for _, leave := range leaves {
		leave()
	}
	if !join(netip.MustParseAddr("203.0.113.1")) {
		t.Error("nobody joins when all have left")
	}
}

func TestListenerWithEnoughJoinersTurnsOthersAway(t *testing.T) {
	key, stranger := newKey(t), newKey(t)
	began, end := make(chan struct{}, joinsPerSource), make(chan struct{})
	l, address := serve(t, Config{Key: key, Member: membersOf(key).key, Handlers: Handlers{
		identity.ALPNJoin: func(_ context.Context, c *tls.Conn, _ identity.ID) {
			began <- struct{}{}
			<-end
			_, _ = io.WriteString(c, "in")
		},
	}})
	said := make(chan string, joinsPerSource)
	for range joinsPerSource {
		go func() { s, _ := ask(t, address, stranger, identity.ALPNJoin, nil); said <- s }()
	}
	for range joinsPerSource {
		<-began
	}
	if s, err := ask(t, address, stranger, identity.ALPNJoin, nil); s != "" {
		t.Errorf("one too many hears %q, %v", s, err)
	}
	if _, refused := l.Stats(); refused != 1 {
		t.Errorf("%d were turned away, want 1", refused)
	}
	close(end)
	for range joinsPerSource {
		if s := <-said; s != "in" {
			t.Errorf("one that was in hears %q", s)
		}
	}
}
