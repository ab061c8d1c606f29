package agent

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

func TestDoor(t *testing.T) {
	now := time.Unix(1000, 0)
	one := netip.MustParseAddr("192.0.2.1")
	var d door
	var leave []func()
	enter := func(from netip.Addr, want error) {
		t.Helper()
		l, err := d.enter(now, from)
		if !errors.Is(err, want) {
			t.Fatalf("%s: %v, want %v", from, err, want)
		}
		if l != nil {
			leave = append(leave, l)
		}
	}
	for range doorPerSource {
		enter(one, nil)
	}
	enter(one, errDoorSource)
	enter(netip.MustParseAddr("::ffff:192.0.2.1"), errDoorSource)
	// Many sources together fill the places, and one that comes new still finds some.
	for i := byte(2); d.open < doorHandshakes; i++ {
		for range min(doorPerSource, doorHandshakes-d.open) {
			enter(netip.AddrFrom4([4]byte{192, 0, 2, i}), nil)
		}
	}
	enter(netip.MustParseAddr("192.0.2.2"), errDoorSource)
	enter(netip.MustParseAddr("2001:db8::1"), nil)
	for range doorFew - 1 {
		enter(netip.MustParseAddr("2001:db8::2"), nil) // the same /64
	}
	enter(netip.MustParseAddr("2001:db8::3"), errDoorFull)
	for i := 0; d.open < doorHandshakes+doorReserve; i++ {
		enter(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), nil)
	}
	enter(netip.MustParseAddr("198.51.100.1"), errDoorFull)
	for _, l := range leave {
		l()
	}
	if open, refused := d.stats(); open != 0 || refused != 5 {
		t.Errorf("%d under way and %d refused, want 0 and 5", open, refused)
	}
	// How often a source may come is limited too.
	n := 0
	for {
		l, err := d.enter(now, one)
		if err != nil {
			if !errors.Is(err, errDoorRate) {
				t.Fatal(err)
			}
			break
		}
		l()
		n++
	}
	if n != doorBurst-doorPerSource {
		t.Errorf("%d more connections at once, want %d", n, doorBurst-doorPerSource)
	}
	now = now.Add(time.Second)
	for range doorRate {
		enter(one, nil)
		leave[len(leave)-1]()
	}
	enter(one, errDoorRate)
	// What is quiet is forgotten, what is not is kept.
	now = now.Add(time.Minute)
	enter(netip.MustParseAddr("203.0.113.9"), nil)
	for i := range 2 * doorSources {
		if l, err := d.enter(now, netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})); err == nil {
			l()
		}
		now = now.Add(100 * time.Millisecond)
	}
	if len(d.sources) > doorSources+1 || d.sources[sourceOf(netip.MustParseAddr("203.0.113.9"))] == nil {
		t.Errorf("%d sources are remembered", len(d.sources))
	}
}

// Connections that never say a word hold no member up, though they come from the member's own address.
func TestFrontSurvivesAFlood(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, a, b)
	f, address := serveFront(t, a.key, newRoster(w.state), nil)
	var mute []net.Conn
	defer func() {
		for _, c := range mute {
			c.Close()
		}
	}()
	refused := func() uint64 { _, n := f.door.stats(); return n }
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
	said, err := askOver(t, c, b.key, identity.ALPNRelay)
	if err != nil || said != fmt.Sprintf("%s %s", identity.ALPNRelay, b.key.ID()) {
		t.Fatalf("%q, %v", said, err)
	}
	if d := time.Since(began); d > frontHandshakeTimeout/2 {
		t.Errorf("a member waited %s", d)
	}
	// The mute ones are ended in time.
	_ = mute[0].SetReadDeadline(time.Now().Add(2 * frontHandshakeTimeout))
	if _, err := io.ReadAll(mute[0]); errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
	if d := time.Since(began); d > 2*frontHandshakeTimeout {
		t.Errorf("a mute connection was kept for %s", d)
	}
}

// At the control net's port each address is a source of its own: all nodes of a mesh may be in one IPv6 /64.
func TestDoorOfTheControlNetTellsNodesApart(t *testing.T) {
	d, now := &door{}, time.Unix(0, 0)
	from := func(n int) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(n)}), 128)
	}
	for range doorPerSource {
		if _, err := d.enterAs(now, from(1)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.enterAs(now, from(1)); !errors.Is(err, errDoorSource) {
		t.Errorf("one node beyond its bound: %v", err)
	}
	if _, err := d.enterAs(now, from(2)); err != nil {
		t.Errorf("its neighbour: %v", err)
	}
}

// Joining is open to everybody past the handshake; those who hold places there leave some to others.
func TestJoinsAtOnceAreBounded(t *testing.T) {
	now := time.Unix(1000, 0)
	var d door
	var leaves []func()
	join := func(from netip.Addr) bool {
		leave, err := d.enter(now, from)
		if err != nil {
			t.Fatal(err)
		}
		leave() // the handshake has ended
		leave, ok := d.join(from)
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
	for i := range doorJoins / doorJoinsSource {
		if in := of(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), doorJoinsSource+5); in != doorJoinsSource {
			t.Errorf("%d joins of one source, want %d", in, doorJoinsSource)
		}
	}
	all := doorJoins
	for i := range doorJoinsReserve { // some addresses that hold all places do not keep others out
		in := of(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), doorFew+1)
		if i == 0 && in != doorFew {
			t.Errorf("%d joins of a source that is not among those that took all places, want %d", in, doorFew)
		}
		all += in
	}
	if want := doorJoins + doorJoinsReserve; all != want {
		t.Errorf("%d joins at once, want %d", all, want)
	}
	for _, leave := range leaves {
		leave()
	}
	if !join(netip.MustParseAddr("203.0.113.1")) {
		t.Error("nobody joins when all have left")
	}
}

func TestAFrontWithEnoughJoinersTurnsOthersAway(t *testing.T) {
	key := newHost(t, "a")
	began, end := make(chan struct{}, doorJoinsSource), make(chan struct{})
	f, address := serveFrontWith(t, key.key, newRoster(newWorld(t, key).state), nil, map[string]func(context.Context,
		*tls.Conn, identity.ID){
		identity.ALPNJoin: func(_ context.Context, c *tls.Conn, _ identity.ID) {
			began <- struct{}{}
			<-end
			_, _ = io.WriteString(c, "in")
		},
	})
	stranger := newHost(t, "x")
	said := make(chan string, doorJoinsSource)
	for range doorJoinsSource {
		go func() { s, _ := ask(t, address, stranger.key, identity.ALPNJoin, nil); said <- s }()
	}
	for range doorJoinsSource {
		<-began
	}
	if s, err := ask(t, address, stranger.key, identity.ALPNJoin, nil); s != "" {
		t.Errorf("one too many hears %q, %v", s, err)
	}
	if _, refused := f.door.stats(); refused != 1 {
		t.Errorf("%d were turned away, want 1", refused)
	}
	close(end)
	for range doorJoinsSource {
		if s := <-said; s != "in" {
			t.Errorf("one that was in hears %q", s)
		}
	}
}
