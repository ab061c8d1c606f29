package control_test

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/identity"
)

// roster is a fixed membership on loopback addresses.
type roster struct {
	keys  map[identity.ID]ed25519.PublicKey
	addrs map[identity.ID]netip.Addr
}

func (r roster) Key(id identity.ID) (ed25519.PublicKey, bool) { k, ok := r.keys[id]; return k, ok }
func (r roster) Overlay(id identity.ID) (v4, v6 netip.Addr, ok bool) {
	a, ok := r.addrs[id]
	return a, netip.Addr{}, ok
}
func (r roster) Owner(a netip.Addr) (identity.ID, bool) {
	for id, b := range r.addrs {
		if a == b {
			return id, true
		}
	}
	return identity.ID{}, false
}

// wire is the relay of a test: it joins streams and hands packets over, as long as it is up.
type wire struct {
	mu    sync.Mutex
	down  bool
	nodes map[identity.ID]*control.Net
	got   map[identity.ID]func(identity.ID, byte, []byte)
	dials int
}

type wireEnd struct {
	*wire
	self identity.ID
}

func (w wireEnd) Dial(_ context.Context, peer identity.ID) (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dials++
	if w.down || w.nodes[peer] == nil {
		return nil, errors.New("no relay")
	}
	a, b := net.Pipe()
	w.nodes[peer].TakeStream(b, w.self)
	return a, nil
}

func (w wireEnd) Send(peer identity.ID, channel byte, b []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.down {
		return errors.New("no relay")
	}
	w.got[peer](w.self, channel, b)
	return nil
}

type node struct {
	id      identity.ID
	net     *control.Net
	tunnel  control.Tunnel
	mu      sync.Mutex
	packets chan string
}

// pair makes two members and a stranger who share a relay.
func trio(t *testing.T) (w *wire, nodes []*node) {
	t.Helper()
	w = &wire{nodes: map[identity.ID]*control.Net{}, got: map[identity.ID]func(identity.ID, byte, []byte){}}
	members := roster{map[identity.ID]ed25519.PublicKey{}, map[identity.ID]netip.Addr{}}
	everybody := roster{map[identity.ID]ed25519.PublicKey{}, map[identity.ID]netip.Addr{}}
	var keys []*identity.Key
	for i := range 3 {
		k, err := identity.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k)
		for _, r := range []roster{members, everybody} {
			r.keys[k.ID()], r.addrs[k.ID()] = k.Public(), netip.AddrFrom4([4]byte{127, 77, 0, byte(i + 1)})
		}
	}
	delete(members.keys, keys[2].ID())
	port := freePort(t)
	for i, k := range keys {
		n := &node{id: k.ID(), packets: make(chan string, 16)}
		r := members
		if i == 2 {
			r = everybody
		}
		received := func(from identity.ID, channel byte, b []byte) {
			n.packets <- from.String() + " " + string('0'+channel) + " " + string(b)
		}
		var err error
		n.net, err = control.New(control.Config{
			Key: k, Roster: r, Relay: wireEnd{w, k.ID()}, Port: port,
			PacketKey: func(id identity.ID) ([32]byte, bool) { return [32]byte{7}, true }, OnPacket: received, Log: slog.New(slog.DiscardHandler),
			Tunnel: func(identity.ID) control.Tunnel { n.mu.Lock(); defer n.mu.Unlock(); return n.tunnel },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(n.net.Close)
		w.nodes[n.id], w.got[n.id] = n.net, n.net.TakePacket
		nodes = append(nodes, n)
	}
	return w, nodes
}

func freePort(t *testing.T) uint16 {
	l, err := net.Listen("tcp", "127.77.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

func bind(t *testing.T, i int, n *node) {
	t.Helper()
	if err := n.net.Bind(netip.AddrFrom4([4]byte{127, 77, 0, byte(i + 1)})); err != nil {
		t.Fatal(err)
	}
}

func echo(t *testing.T, from, to *node) *control.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := to.net.Listen(identity.ALPNRPC).Accept()
		if err == nil {
			accepted <- c
		}
	}()
	c, err := from.net.Dial(ctx, to.id, identity.ALPNRPC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	select {
	case a := <-accepted:
		defer a.Close()
		if have := a.(*control.Conn).Peer(); have != from.id {
			t.Fatalf("accepted from %s, want %s", have, from.id)
		}
		go func() { io.WriteString(c, "hello"); c.(*control.Conn).CloseWrite(); io.Copy(io.Discard, c) }()
		if b, err := io.ReadAll(a); err != nil || string(b) != "hello" {
			t.Fatalf("have %q, %v", b, err)
		}
	case <-ctx.Done():
		t.Fatal("nothing was accepted")
	}
	return c.(*control.Conn)
}

func TestTunnelFirst(t *testing.T) {
	w, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	n[0].tunnel = control.Up
	if way := echo(t, n[0], n[1]).Way(); way != "tunnel" || w.dials != 0 {
		t.Fatalf("way %s after %d relay dials", way, w.dials)
	}
}

func TestRelayWhenTheTunnelIsDead(t *testing.T) {
	_, n := trio(t)
	n[0].tunnel = control.Likely // believed up, and nobody listens
	if way := echo(t, n[0], n[1]).Way(); way != "relay" {
		t.Fatalf("way %s", way)
	}
}

func TestNoWayAtAll(t *testing.T) {
	w, n := trio(t)
	w.down = true
	_, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRaft)
	if !errors.Is(err, control.ErrNoWay) {
		t.Fatal(err)
	}
}

func TestStrangersAreRefused(t *testing.T) {
	_, n := trio(t)
	bind(t, 1, n[1])
	if _, err := n[0].net.Dial(t.Context(), n[2].id, identity.ALPNRPC); !errors.Is(err, control.ErrNotMember) {
		t.Fatalf("dialled a stranger: %v", err)
	}
	c, err := n[2].net.Dial(t.Context(), n[1].id, identity.ALPNRPC)
	if err == nil { // in TLS 1.3 the client learns at its first read
		_, err = c.Read(make([]byte, 1))
	}
	if err == nil || errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "EOF") {
		t.Fatal("a stranger was let in")
	}
}

func TestPackets(t *testing.T) {
	w, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	want := func(text string) {
		t.Helper()
		select {
		case have := <-n[1].packets:
			if have != n[0].id.String()+" "+text {
				t.Fatalf("have %q, want %q", have, text)
			}
		case <-time.After(5 * time.Second):
			t.Fatal("nothing arrived")
		}
	}
	for _, c := range []struct {
		tunnel    control.Tunnel
		relayDown bool
	}{{control.Up, true}, {control.Likely, false}, {control.Down, false}, {control.Down, true}} {
		n[0].tunnel, w.down = c.tunnel, c.relayDown
		if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("x")); err != nil {
			t.Fatal(err)
		}
		want("2 x")
	}
	n[0].tunnel, w.down = control.Away, true
	if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("x")); !errors.Is(err, control.ErrNoWay) {
		t.Fatalf("to a node that is away: %v", err)
	}
	if c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC); !errors.Is(err, control.ErrNoWay) {
		t.Fatalf("to a node that is away: %v %v", c, err)
	}
	// What a relay invents, changes, or sends back to where it came from is dropped.
	w.got[n[1].id](n[0].id, control.ChannelSignal, []byte("0123456789abcdefx"))
	caught := make(chan []byte, 1)
	w.got[n[1].id] = func(_ identity.ID, _ byte, b []byte) { caught <- b }
	n[0].tunnel, w.down = control.Down, false
	if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("y")); err != nil {
		t.Fatal(err)
	}
	sealed := <-caught
	n[0].net.TakePacket(n[1].id, control.ChannelSignal, sealed)
	n[1].net.TakePacket(n[0].id, control.ChannelGossip, sealed)
	n[1].net.TakePacket(n[0].id, control.ChannelSignal, sealed)
	want("2 y")
	select {
	case p := <-n[0].packets:
		t.Fatalf("a packet that was sent back was taken: %q", p)
	case p := <-n[1].packets:
		t.Fatalf("a changed packet was taken: %q", p)
	default:
	}
	if err := n[0].net.SendPacket(n[1].id, 1, make([]byte, control.MaxPacket+1)); !errors.Is(err, control.ErrTooLarge) {
		t.Fatal(err)
	}
}
