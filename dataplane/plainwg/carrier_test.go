package plainwg

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/identity"
)

// pipe is a TUN link whose packets the test writes and reads.
type pipe struct {
	in, out chan []byte
	events  chan tun.Event
	closed  chan struct{}
	once    sync.Once
}

func newPipe() *pipe {
	return &pipe{in: make(chan []byte, 16), out: make(chan []byte, 16), events: make(chan tun.Event, 1),
		closed: make(chan struct{})}
}

func (p *pipe) Read(b [][]byte, sizes []int, offset int) (int, error) {
	select {
	case x := <-p.in:
		sizes[0] = copy(b[0][offset:], x)
		return 1, nil
	case <-p.closed:
		return 0, os.ErrClosed
	}
}

func (p *pipe) Write(b [][]byte, offset int) (int, error) {
	for _, x := range b {
		select {
		case p.out <- append([]byte(nil), x[offset:]...):
		default: // nobody reads here now
		}
	}
	return len(b), nil
}

// send is a packet of the kernel's, which is dropped where the device is behind.
func (p *pipe) send(b []byte) {
	select {
	case p.in <- b:
	default:
	}
}

func (p *pipe) Close() error {
	p.once.Do(func() { close(p.closed); close(p.events) })
	return nil
}
func (p *pipe) File() *os.File           { return nil }
func (p *pipe) MTU() (int, error)        { return 1420, nil }
func (p *pipe) Name() (string, error)    { return "pipe", nil }
func (p *pipe) Events() <-chan tun.Event { return p.events }
func (p *pipe) BatchSize() int           { return 1 }

func newKey(t *testing.T) (private, public dataplane.Key) {
	t.Helper()
	k, err := identity.NewWireGuardKey()
	if err != nil {
		t.Fatal(err)
	}
	p, err := k.Public()
	if err != nil {
		t.Fatal(err)
	}
	return dataplane.Key(k), dataplane.Key(p)
}

// packet is an IPv4 packet without anything in it.
func packet(from, to string) []byte {
	b := make([]byte, 20)
	b[0], b[3], b[8], b[9] = 0x45, 20, 64, 59
	f, d := netip.MustParseAddr(from).As4(), netip.MustParseAddr(to).As4()
	copy(b[12:], f[:])
	copy(b[16:], d[:])
	return b
}

// node is a carrier on a free port of loopback.
type node struct {
	*Carrier
	tun  *pipe
	own  dataplane.Key // public
	port string
}

// reporter tells the port that a bind got.
type reporter struct {
	conn.Bind
	port uint16
}

func (r *reporter) Open(p uint16) ([]conn.ReceiveFunc, uint16, error) {
	f, got, err := r.Bind.Open(p)
	r.port = got
	return f, got, err
}

func newNode(t *testing.T) *node {
	t.Helper()
	private, public := newKey(t)
	n := &node{tun: newPipe(), own: public}
	bind := &reporter{Bind: wireguard.NewBind()}
	c, err := open(Config{MTU: 1420, OwnKey: private}, n.tun, bind)
	if err != nil {
		t.Fatal(err)
	}
	n.Carrier, n.port = c, fmt.Sprintf("127.0.0.1:%d", bind.port)
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return n
}

// carry is Set without the kernel's routes.
func (n *node) carry(t *testing.T, peers ...Peer) {
	t.Helper()
	var ways []way
	for _, p := range peers {
		if err := n.add(p); err != nil {
			t.Fatal(err)
		}
		for _, x := range p.Prefixes {
			ways = append(ways, way{x, n.sessions[p.ID].tap})
		}
	}
	n.link.setWays(ways)
}

// end is what a plain peer's own kernel sends into its link, and gets from there.
type end struct {
	send func([]byte)
	out  <-chan []byte
}

// client is a plain peer with wireguard-go.
func client(t *testing.T, private, carrierKey, psk dataplane.Key, nodes ...*node) end {
	t.Helper()
	p := newPipe()
	d := device.NewDevice(p, conn.NewDefaultBind(), &device.Logger{Verbosef: device.DiscardLogf,
		Errorf: device.DiscardLogf})
	t.Cleanup(d.Close)
	var b strings.Builder
	fmt.Fprintf(&b, "private_key=%s\n", hex.EncodeToString(private[:]))
	peer := func(key dataplane.Key, at, allowed string) {
		fmt.Fprintf(&b, "public_key=%s\npreshared_key=%s\nendpoint=%s\npersistent_keepalive_interval=25\n%s",
			hexOf(key), hexOf(psk), at, allowed)
	}
	peer(carrierKey, nodes[0].port, "allowed_ip=10.4.0.0/16\n")
	for _, n := range nodes {
		peer(n.own, n.port, "")
	}
	if err := errors.Join(d.IpcSet(b.String()), d.Up()); err != nil {
		t.Fatal(err)
	}
	return end{p.send, p.out}
}

func arrives(t *testing.T, what string, send func(), out <-chan []byte, want []byte) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		send()
		select {
		case b := <-out:
			if string(b) == string(want) {
				return
			}
		case <-time.After(100 * time.Millisecond):
		case <-deadline:
			t.Fatalf("%s: nothing arrives", what)
		}
	}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for began := time.Now(); !f(); {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("%s: not within 20 s", what)
		}
		select {
		case <-t.Context().Done():
			t.Fatal("interrupted")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// A stock client has a session with the first carrier, and a way to each; it follows the second one when that begins
// a session, and what it
// sends under an address that is not its own goes nowhere.
func TestAClientFollows(t *testing.T) { follows(t, client) }

// The same client as the kernel has it.
func TestAKernelClientFollows(t *testing.T) { follows(t, kernelClient) }

func follows(t *testing.T, client func(t *testing.T, private, carrierKey, psk dataplane.Key, nodes ...*node) end) {
	t.Helper()
	private, public := newKey(t)
	shared, sharedPublic := newKey(t)
	psk, _ := newKey(t)
	other, otherPublic := newKey(t)
	otherShared, _ := newKey(t)
	p := Peer{ID: 7, PublicKey: public, CarrierKey: shared, PresharedKey: psk,
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.4.255.254/32")}}
	q := Peer{ID: 8, PublicKey: otherPublic, CarrierKey: otherShared, PresharedKey: other,
		Prefixes: []netip.Prefix{netip.MustParsePrefix("10.4.255.253/32")}}
	a, b := newNode(t), newNode(t)
	a.carry(t, p, q)
	b.carry(t, p, q)
	c := client(t, private, sharedPublic, psk, a, b)

	up, down := packet("10.4.255.254", "10.4.0.9"), packet("10.4.0.9", "10.4.255.254")
	arrives(t, "to the mesh", func() { c.send(up) }, a.tun.out, up)
	arrives(t, "to the client", func() { a.tun.send(down) }, c.out, down)
	var second Status
	eventually(t, "the second carrier hears the client", func() bool {
		second = b.Status(time.Now())[7]
		return !second.Way.Handshake.IsZero() && second.Way.Endpoint.IsValid() && !second.Way.Heard.IsZero()
	})
	if first := a.Status(time.Now())[7]; first.Session.Handshake.IsZero() || first.Session.Received == 0 ||
		!second.Session.Handshake.IsZero() {
		t.Errorf("the first carrier has %+v, the second %+v", first, second)
	}
	c.send(packet("10.4.255.253", "10.4.0.9"))
	arrives(t, "after what is forged", func() { c.send(up) }, a.tun.out, up)

	if err := a.Drop(7); err != nil {
		t.Fatal(err)
	}
	if err := b.Begin(7, second.Way.Endpoint); err != nil {
		t.Fatal(err)
	}
	arrives(t, "to the mesh by the second", func() { c.send(up) }, b.tun.out, up)
	arrives(t, "to the client by the second", func() { b.tun.send(down) }, c.out, down)
	if now := b.Status(time.Now())[7]; now.Session.Handshake.IsZero() {
		t.Errorf("the second carrier has %+v", now)
	}
	if first := a.Status(time.Now())[7]; !first.Session.Handshake.IsZero() {
		t.Errorf("the first one, which dropped it, has %+v", first)
	}
	b.remove(7)
	if s := b.Status(time.Now()); len(s) != 1 {
		t.Errorf("after its removal there are %v", s)
	}
}

// What is not a message of WireGuard's, or for no device here, goes nowhere.
func TestStrayDatagrams(t *testing.T) {
	s := &splitter{indexes: map[uint32]owned{}}
	_, public := newKey(t)
	p := s.newPort(public)
	s.sends(p, []byte{initiation, 0, 0, 0, 9, 0, 0, 0}, time.Now())
	message := func(kind byte, size int, index byte, at int) []byte {
		b := make([]byte, size)
		b[0], b[at] = kind, index
		return b
	}
	for what, b := range map[string][]byte{
		"nothing": nil, "short": {4}, "another type": message(9, 200, 9, 4), "an index of nobody": message(data, 64,
			8, 4),
		"an initiation without its mac": message(initiation, initiationSize, 0, 4),
		"an initiation of another size": message(initiation, 100, 9, 4),
		"a response of another size":    message(response, 91, 9, 8), "a response's own index": message(response,
			responseSize, 9, 4),
	} {
		if s.owner(b) != nil {
			t.Errorf("%s is taken", what)
		}
	}
	for what, b := range map[string][]byte{"data": message(data, 64, 9, 4), "a response": message(response,
		responseSize, 9, 8), "a cookie": message(cookie, cookieSize, 9, 4)} {
		if s.owner(b) != p {
			t.Errorf("%s is not taken", what)
		}
	}
	s.sends(p, []byte{initiation, 0, 0, 0, 10, 0, 0, 0}, time.Now().Add(2*indexLife))
	if s.owner(message(data, 64, 9, 4)) != nil || s.owner(message(data, 64, 10, 4)) != p {
		t.Error("old indexes are not forgotten, or new ones are")
	}
	s.drop(p)
	if s.owner(message(data, 64, 10, 4)) != nil || len(s.ports) != 0 {
		t.Error("a device that is gone is still known")
	}
}
