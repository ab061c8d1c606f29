package control_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testns"
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
	port    uint16
	keys    map[identity.ID]ed25519.PublicKey // of its roster
	tunnel  control.Tunnel
	codes   bool                                       // it believes of all that they put codes on packets
	enter   func(netip.Addr) (leave func(), err error) // nil: all may
	mu      sync.Mutex
	packets chan string
}

// trio makes two members and a stranger who share a relay.
func trio(t *testing.T) (w *wire, nodes []*node) {
	t.Helper()
	return trioOver(t, "")
}

// trioOver is trio with a tunnel by a link.
func trioOver(t *testing.T, link string) (w *wire, nodes []*node) {
	t.Helper()
	w = &wire{nodes: map[identity.ID]*control.Net{}, got: map[identity.ID]func(identity.ID, byte, []byte){}}
	everybody := roster{map[identity.ID]ed25519.PublicKey{}, map[identity.ID]netip.Addr{}}
	var keys []*identity.Key
	for i := range 3 {
		k, err := identity.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, k)
		everybody.keys[k.ID()], everybody.addrs[k.ID()] = k.Public(), netip.AddrFrom4([4]byte{127, 77, 0, byte(i + 1)})
	}
	port := freePort(t)
	for i, k := range keys {
		r := roster{maps.Clone(everybody.keys), everybody.addrs}
		if i != 2 {
			delete(r.keys, keys[2].ID())
		}
		n := &node{id: k.ID(), port: port, keys: r.keys, packets: make(chan string, 16)}
		received := func(from identity.ID, channel byte, b []byte) {
			n.packets <- from.String() + " " + string('0'+channel) + " " + string(b)
		}
		var err error
		n.net, err = control.New(control.Config{
			Key: k, Roster: r, Relay: wireEnd{w, k.ID()}, Port: port, Link: link,
			PacketKey: func(id identity.ID) ([32]byte, bool) { return [32]byte{7}, true }, OnPacket: received,
			Log:    slog.New(slog.DiscardHandler),
			Tunnel: func(identity.ID) control.Tunnel { n.mu.Lock(); defer n.mu.Unlock(); return n.tunnel },
			Coded:  func(identity.ID) bool { n.mu.Lock(); defer n.mu.Unlock(); return n.codes },
			OnEcho: func(from identity.ID, at, self netip.AddrPort, b []byte) {
				n.packets <- fmt.Sprintf("%s echo from %s at %s, %d: %.10s", from, at.Addr(), self, len(b), b)
			},
			Enter: func(from netip.Addr) (func(), error) {
				n.mu.Lock()
				defer n.mu.Unlock()
				if n.enter == nil {
					return func() {}, nil
				}
				return n.enter(from)
			},
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

// pipe is both ends of a stream.
type pipe struct{ from, to *control.Conn }

// dial opens a stream.
func dial(t *testing.T, from, to *node) pipe {
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
		t.Cleanup(func() { a.Close() })
		if have := a.(*control.Conn).Peer(); have != from.id {
			t.Fatalf("accepted from %s, want %s", have, from.id)
		}
		return pipe{c.(*control.Conn), a.(*control.Conn)}
	case <-ctx.Done():
		t.Fatal("nothing was accepted")
	}
	return pipe{}
}

// echo is a stream that was seen to carry bytes.
func echo(t *testing.T, from, to *node) *control.Conn {
	t.Helper()
	p := dial(t, from, to)
	go func() { io.WriteString(p.from, "hello"); p.from.CloseWrite(); io.Copy(io.Discard, p.from) }()
	if b, err := io.ReadAll(p.to); err != nil || string(b) != "hello" {
		t.Fatalf("have %q, %v", b, err)
	}
	return p.from
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

// While the tunnel's link is away, nothing goes where the routes would lead it, in the clear.
func TestNothingGoesBesideTheTunnel(t *testing.T) {
	for link, there := range map[string]bool{"lo": true, "skein-none": false} {
		w, n := trioOver(t, link)
		bind(t, 0, n[0])
		bind(t, 1, n[1])
		n[0].tunnel = control.Up
		if there { // where packets do go by the link, they arrive
			if way := echo(t, n[0], n[1]).Way(); way != "tunnel" {
				t.Errorf("over %s the way is %s", link, way)
			}
			w.down = true
			if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("x")); err != nil {
				t.Errorf("over %s: %v", link, err)
			}
			n[1].want(t, n[0].id, "2 x")
			continue
		}
		if way := echo(t, n[0], n[1]).Way(); way != "relay" {
			t.Errorf("over %s the way is %s", link, way)
		}
		w.down = true
		if c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC); !errors.Is(err, control.ErrNoWay) ||
			!errors.Is(err, syscall.ENODEV) {
			t.Errorf("a stream over %s: %v, %v", link, c, err)
		}
		if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("x")); !errors.Is(err, control.ErrNoWay) ||
			!errors.Is(err, syscall.ENODEV) {
			t.Errorf("a packet over %s: %v", link, err)
		}
	}
}

// want waits for a packet.
func (n *node) want(t *testing.T, from identity.ID, text string) {
	t.Helper()
	select {
	case have := <-n.packets:
		if have != from.String()+" "+text {
			t.Fatalf("have %q, want %q", have, text)
		}
	case <-time.After(5 * time.Second):
		t.Fatalf("%q did not arrive", text)
	}
}

// onLink lets a neighbour reach an address over a link where nobody else would look for it.
func onLink(t *testing.T, here, there *testns.NS, link string, at netip.Addr) {
	t.Helper()
	var mac net.HardwareAddr
	here.Must("its hardware address", func() error {
		l, err := netlink.LinkByName(link)
		if err == nil {
			mac = l.Attrs().HardwareAddr
		}
		return err
	})
	there.Must("the way by "+link, func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: netlink.NewIPNet(at.AsSlice()),
			Priority: 9999}); err != nil {
			return err
		}
		return netlink.NeighAdd(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: at.AsSlice(), HardwareAddr: mac,
			State: netlink.NUD_PERMANENT})
	})
}

// A neighbour on the LAN can put a member's overlay address on a packet. Only what came out of the tunnel is the
// member's.
func TestOverlayAddressesFromOutsideTheTunnelAreForged(t *testing.T) {
	here, there := testns.New(t, "ctl"), testns.New(t, "ctl")
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	member := identity.ID{1}
	for _, c := range []struct{ here, there string }{{"10.9.0.1", "10.9.0.2"}, {"fd00:9::1", "fd00:9::2"}} {
		from, to := netip.MustParseAddr(c.there), netip.MustParseAddr(c.here)
		lan, tunnel := "lan"+strconv.Itoa(from.BitLen()), "tun"+strconv.Itoa(from.BitLen())
		bits := from.BitLen() - 8
		testns.Link(here, there, tunnel, []netip.Prefix{netip.PrefixFrom(to, bits)},
			[]netip.Prefix{netip.PrefixFrom(from, bits)})
		testns.Link(here, there, lan, nil, nil)
		here.Must("no reverse path filter", func() error {
			for _, name := range []string{"all", lan} {
				if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/rp_filter", []byte("0"), 0o644); err != nil {
					return err
				}
			}
			return nil
		})
		onLink(t, here, there, lan, to)
		packets := make(chan string, 64)
		n, err := control.New(control.Config{Key: key, Roster: roster{addrs: map[identity.ID]netip.Addr{member: from}},
			Port: 7946, Link: tunnel, Log: slog.New(slog.DiscardHandler),
			OnPacket: func(from identity.ID, channel byte, b []byte) { packets <- string(b) }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(n.Close)
		here.Must("bind", func() error { return n.Bind(to) })
		send := func(link, text string) {
			t.Helper()
			there.Must("send over "+link, func() error {
				d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
					Control: func(_, _ string, c syscall.RawConn) (err error) {
						e := c.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), link) })
						return errors.Join(e, err)
					}}
				s, err := d.Dial("udp", netip.AddrPortFrom(to, 7946).String())
				if err != nil {
					return err
				}
				defer s.Close()
				_, err = s.Write([]byte("\x02" + text))
				return err
			})
		}
		for range 20 {
			send(lan, "forged")
		}
		for limit := time.Now().Add(10 * time.Second); ; {
			send(tunnel, "honest")
			select {
			case have := <-packets:
				if have != "honest" {
					t.Errorf("taken from outside the tunnel: %q", have)
				}
			case <-time.After(20 * time.Millisecond):
				if time.Now().Before(limit) {
					continue
				}
				t.Error("what comes out of the tunnel is not taken")
			}
			break
		}
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
	accepted := make(chan net.Conn, 2)
	l := n[1].net.Listen(identity.ALPNRPC)
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			accepted <- c
		}
	}()
	t.Cleanup(func() { l.Close() })
	for _, tunnel := range []control.Tunnel{control.Up, control.Down} { // by either way
		n[2].tunnel = tunnel
		refused(t, n[2], n[1])
	}
	n[0].tunnel = control.Up
	c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC) // after the others, so that they would be here
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := (<-accepted).(*control.Conn).Peer(); got != n[0].id {
		t.Errorf("accepted %s, who is not a member", got)
	}
}

// An ID is a part of its key's hash. Who has found another key with a member's ID is not that member.
func TestAnotherKeyWithAMembersID(t *testing.T) {
	w, n := trio(t)
	bind(t, 1, n[1])
	w.down = true
	n[1].keys[n[2].id] = n[1].keys[n[0].id] // the member with the third node's ID has another key than that node
	n[2].tunnel = control.Up
	refused(t, n[2], n[1])
}

// refused wants a node to turn another one away.
func refused(t *testing.T, from, to *node) {
	t.Helper()
	c, err := from.net.Dial(t.Context(), to.id, identity.ALPNRPC)
	if err == nil { // in TLS 1.3 the client learns at its first read
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, err = c.Read(make([]byte, 1))
		c.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "bad certificate") {
		t.Errorf("with tunnel %d: it was answered %v", from.tunnel, err)
	}
}

// A relay that joins a stream to another node than the one that was dialled does not get it past the dialler.
func TestImpostorAtTheOtherEnd(t *testing.T) {
	w, n := trio(t)
	n[0].tunnel = control.Away // the relay is the only way
	w.nodes[n[1].id] = n[2].net
	c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC)
	if !errors.Is(err, identity.ErrUnknownPeer) {
		t.Fatalf("dialled %s and reached %s: %v, %v", n[1].id, n[2].id, c, err)
	}
}

// Who is thrown out loses the streams that are open, and nobody else does.
func TestKick(t *testing.T) {
	_, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	n[0].tunnel, n[1].tunnel = control.Up, control.Up
	there, back := dial(t, n[0], n[1]), dial(t, n[1], n[0])
	n[0].net.Kick(n[2].id)
	for _, s := range []pipe{there, back} {
		if _, err := s.from.Write([]byte("x")); err != nil {
			t.Fatalf("another node was kicked, and this stream broke: %v", err)
		}
		if _, err := io.ReadFull(s.to, make([]byte, 1)); err != nil {
			t.Fatalf("another node was kicked, and this stream broke: %v", err)
		}
	}
	n[0].net.Kick(n[1].id)
	for name, c := range map[string]*control.Conn{"dialled": there.from, "accepted": back.to, "the other end of the " +
		"dialled": there.to, "the other end of the accepted": back.from} {
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		var timeout net.Error
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.As(err, &timeout) && timeout.Timeout() {
			t.Errorf("the %s stream is still open: %v", name, err)
		}
	}
}

// A packet that comes through the tunnel is its address's owner's; who owns none is not a member.
func TestPacketsOfUnknownAddressesAreDropped(t *testing.T) {
	_, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	to := net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 77, 0, 2}), n[1].port))
	c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 77, 0, 99)}, to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("\x02forged")); err != nil {
		t.Fatal(err)
	}
	n[0].tunnel = control.Up
	if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("honest")); err != nil {
		t.Fatal(err)
	}
	n[1].want(t, n[0].id, "2 honest")
}

func TestPackets(t *testing.T) {
	w, n := trio(t)
	bind(t, 0, n[0])
	bind(t, 1, n[1])
	want := func(text string) { t.Helper(); n[1].want(t, n[0].id, text) }
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
	for _, tunnel := range []control.Tunnel{control.Away, control.Idle} {
		n[0].tunnel, w.down = tunnel, true
		if err := n[0].net.SendPacket(n[1].id, control.ChannelSignal, []byte("x")); !errors.Is(err, control.ErrNoWay) {
			t.Fatalf("without a relay, tunnel %d: %v", tunnel, err)
		}
		if c, err := n[0].net.Dial(t.Context(), n[1].id, identity.ALPNRPC); !errors.Is(err, control.ErrNoWay) {
			t.Fatalf("without a relay, tunnel %d: %v %v", tunnel, c, err)
		}
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
	n[1].net.TakePacket(n[0].id, control.ChannelSignal, append(bytes.Clone(sealed[:len(sealed)-1]), 'z'))
	n[1].net.TakePacket(n[0].id, control.ChannelSignal, append(bytes.Clone(sealed), 'z'))
	n[1].net.TakePacket(n[0].id, control.ChannelSignal, sealed[:15])
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
