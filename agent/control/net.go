package control

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/mmsg"
	"github.com/skeinmesh/skein/internal/race"
)

// pace is that of the two ways: what the better one gets before the other is tried as well.
var pace = race.Pace{Stagger: 300 * time.Millisecond, Proof: 2 * time.Second}

const (
	handshakeTimeout = 5 * time.Second
	dialTimeout      = 8 * time.Second
	dialsMax         = 4 // at a time, fewer where this process is late
	turnMost         = time.Second
	backlog          = 64 // accepted streams per protocol that nobody has taken yet
)

// MaxPacket is the largest packet, in bytes, that SendPacket takes: it fits the tunnel's MTU unfragmented.
const MaxPacket = 1300

// Channels that packets are sorted by. Channel 0 is the relay's own, for WireGuard.
const (
	ChannelGossip byte = 1
	ChannelSignal byte = 2
	ChannelEcho   byte = 3 // by the tunnel only, of any size, and always with a code
)

// Errors a caller decides by.
var (
	ErrNotMember = errors.New("not a member of this cluster")
	ErrNoWay     = errors.New("neither the tunnel nor a relay reaches the node")
	ErrTooLarge  = errors.New("packet is larger than the control net carries")
)

// Roster is who is a member.
type Roster interface {
	Key(id identity.ID) (ed25519.PublicKey, bool)
	// Overlay are the node's addresses in the tunnel.
	Overlay(id identity.ID) (v4, v6 netip.Addr, ok bool)
	// Owner is the node that has an overlay address.
	Owner(addr netip.Addr) (identity.ID, bool)
}

// Relay is the second way.
type Relay interface {
	Dial(ctx context.Context, peer identity.ID) (net.Conn, error)
	Send(peer identity.ID, channel byte, b []byte) error
}

// Tunnel is what is known of the tunnel to a node.
type Tunnel int

// What may be known. A stream may try a tunnel that is only likely, and so begin its session; a packet
// goes where packets have gone before.
const (
	Down   Tunnel = iota // no direct path: a relay is the shorter way
	Likely               // the direct path answers
	Up                   // and WireGuard has a session
	Away                 // no path at all, while relays can be asked: a packet would only wait in the device
	Idle                 // nobody talks by the tunnel: what the control net has to say goes by a relay and leaves it so
)

// Config is what the control net stands on.
type Config struct {
	Key    *identity.Key
	Roster Roster
	Relay  Relay
	Port   uint16 // TCP and UDP, on the overlay addresses
	// the tunnel: nothing leaves in the clear while it is away, and no packet from elsewhere is taken for one of it
	Link string
	// Tunnel tells what is known of the tunnel to a node now.
	Tunnel func(identity.ID) Tunnel
	// Via is the peer of the tunnel that passes packets on to a node, such as a leader of this node's site; a peer is its
	// own. It must be quick. nil: every node is a peer.
	Via func(identity.ID) identity.ID
	// PacketKey is a key that only this node and another know. Packets by a relay carry a code made with
	// it: a relay's word for who sent them is not enough.
	PacketKey func(identity.ID) (key [32]byte, ok bool)
	// Coded tells whether this node and another both put the code on packets by the tunnel as well, so that one without
	// is forged. nil: none does.
	Coded func(identity.ID) bool
	// Enter lets a connection from a member's overlay address begin its handshake, which ends with leave, or says why not.
	// nil: all may.
	Enter func(from netip.Addr) (leave func(), err error)
	// OnPacket takes what arrives. It must not block; b is its own.
	OnPacket func(from identity.ID, channel byte, b []byte)
	// OnEcho takes packets of ChannelEcho, from one of a member's overlay addresses to one of this node's. They may have
	// come by other nodes: the code alone proves whose they are. nil: they are dropped. It must not block; b is only lent.
	OnEcho func(from identity.ID, at, self netip.AddrPort, b []byte)
	// Lag, if set, is how late this process lately woke: the ways of a stream wait so much longer for each other.
	Lag *lag.Meter
	Log *slog.Logger
}

// Net is one node's end of the control net.
type Net struct {
	cfg    Config
	server *tls.Config
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup
	// streams are the accepted ones by protocol; the map never changes.
	streams map[string]*stream

	carried sync.Map // identity.ID → *carried
	dials   lag.Gate

	mu    sync.Mutex
	open  map[*Conn]struct{}
	tcp   []net.Listener
	udp   []*net.UDPConn
	bound []netip.Addr
}

// New makes a control net that carries nothing yet but relayed streams; Bind opens the tunnel's side.
func New(cfg Config) (*Net, error) {
	n := &Net{cfg: cfg, streams: map[string]*stream{}, open: map[*Conn]struct{}{}, dials: lag.Gate{Meter: cfg.Lag,
		Most: dialsMax}}
	n.ctx, n.stop = context.WithCancel(context.Background())
	var err error
	n.server, err = cfg.Key.ServerTLS([]string{identity.ALPNRaft, identity.ALPNRPC, identity.ALPNGossip},
		func(_ string, key ed25519.PublicKey) error {
			return n.member(key)
		})
	if err != nil {
		return nil, err
	}
	for _, alpn := range []string{identity.ALPNRaft, identity.ALPNRPC, identity.ALPNGossip} {
		n.streams[alpn] = &stream{alpn: alpn, conns: make(chan net.Conn, backlog)}
	}
	return n, nil
}

func (n *Net) member(key ed25519.PublicKey) error {
	id := identity.IDOf(key)
	known, ok := n.cfg.Roster.Key(id)
	if !ok || !known.Equal(key) {
		return fmt.Errorf("node %s: %w", id, ErrNotMember)
	}
	return nil
}

// Listen gives the streams of one protocol. Streams that arrive while no listener of the protocol is
// open wait for the next one, a few of them.
func (n *Net) Listen(alpn string) net.Listener {
	return &listener{stream: n.streams[alpn], closed: make(chan struct{}), done: n.ctx.Done()}
}

// Bind listens on this node's overlay addresses. The addresses need not exist yet. Calling it again
// with the same addresses does nothing.
func (n *Net) Bind(addrs ...netip.Addr) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	lc := net.ListenConfig{Control: freeBind}
	for _, a := range addrs {
		if !a.IsValid() || slices.Contains(n.bound, a) {
			continue
		}
		at := netip.AddrPortFrom(a, n.cfg.Port).String()
		tcp, err := lc.Listen(n.ctx, "tcp", at)
		if err != nil {
			return fmt.Errorf("control net: listen on %s/tcp: %w (set ports.control to another port if it is taken)", at, err)
		}
		pc, err := lc.ListenPacket(n.ctx, "udp", at)
		if err != nil {
			tcp.Close()
			return fmt.Errorf("control net: listen on %s/udp: %w (set ports.control to another port if it is taken)", at, err)
		}
		udp := pc.(*net.UDPConn)
		reader, err := mmsg.NewReader(udp, 1)
		if err != nil {
			tcp.Close()
			udp.Close()
			return fmt.Errorf("control net: %w", err)
		}
		n.tcp, n.udp, n.bound = append(n.tcp, tcp), append(n.udp, udp), append(n.bound, a)
		n.wg.Add(2)
		go n.accept(tcp)
		go n.receive(udp, reader)
	}
	return nil
}

// Close ends all listeners and waits for the accept loops. Streams that were handed out stay.
func (n *Net) Close() {
	n.stop()
	n.mu.Lock()
	for _, l := range n.tcp {
		l.Close()
	}
	for _, c := range n.udp {
		c.Close()
	}
	n.mu.Unlock()
	n.wg.Wait()
}

// Dial opens an authenticated stream to a node: by the tunnel if its path is direct, else by a relay, and
// when that does not answer at once, by the other way too; the first that is up is used.
func (n *Net) Dial(ctx context.Context, node identity.ID, alpn string) (net.Conn, error) {
	key, ok := n.cfg.Roster.Key(node)
	if !ok {
		return nil, fmt.Errorf("dial node %s: %w", node, ErrNotMember)
	}
	conf, err := n.cfg.Key.ClientTLS(alpn, identity.Expect(key))
	if err != nil {
		return nil, err
	}
	if counts(alpn) { // Raft's do not wait behind others
		if err := n.dials.Enter(ctx); err != nil {
			return nil, fmt.Errorf("dial node %s: its turn did not come: %w", node, err)
		}
		leave := sync.OnceFunc(n.dials.Leave)
		defer leave()
		defer time.AfterFunc(turnMost, leave).Stop() // who has not answered by then costs nothing but time
	}
	late := n.cfg.Lag.Late(time.Now())
	ctx, cancel := context.WithTimeout(ctx, dialTimeout+2*late)
	defer cancel()
	pace := race.Pace{Stagger: pace.Stagger + 2*late, Proof: pace.Proof + 4*late}
	secured := func(way string, raw func(context.Context) (net.Conn, error)) race.Way[*Conn] {
		return func(ctx context.Context, connected func()) (*Conn, error) {
			c, err := raw(ctx)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", way, err)
			}
			connected()
			if way == "tunnel" && counts(alpn) {
				c = newCounted(c, func() *carried { return n.count(node) })
			}
			t := tls.Client(c, conf)
			if err := t.HandshakeContext(ctx); err != nil {
				c.Close()
				return nil, fmt.Errorf("%s: TLS: %w", way, err)
			}
			return n.track(t, node, way), nil
		}
	}
	ways := []race.Way[*Conn]{
		secured("tunnel", func(ctx context.Context) (net.Conn, error) { return n.dialTunnel(ctx, node) }),
		secured("relay", func(ctx context.Context) (net.Conn, error) { return n.cfg.Relay.Dial(ctx, node) }),
	}
	switch n.cfg.Tunnel(node) {
	case Down:
		slices.Reverse(ways)
	case Away:
		ways = ways[1:]
	case Idle:
		if counts(alpn) { // Raft's streams are traffic: servers are to have the best path to each other
			ways = ways[1:]
		}
	}
	c, errs := race.First(ctx, pace, ways, func(c *Conn) { c.Close() })
	if c == nil {
		return nil, fmt.Errorf("dial node %s: %w: %w", node, ErrNoWay, errors.Join(errs...))
	}
	return c, nil
}

func (n *Net) dialTunnel(ctx context.Context, node identity.ID) (net.Conn, error) {
	v4, v6, ok := n.cfg.Roster.Overlay(node)
	if !ok {
		return nil, ErrNotMember
	}
	self4, self6, _ := n.cfg.Roster.Overlay(n.cfg.Key.ID())
	d := net.Dialer{KeepAliveConfig: keepAlive}
	if n.cfg.Link != "" {
		d.Control = bindTo(n.cfg.Link)
	}
	to, from := v6, self6
	if v4.IsValid() {
		to, from = v4, self4
	}
	if from.IsValid() { // the other end takes streams from members' addresses alone
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))
	}
	return d.DialContext(ctx, "tcp", netip.AddrPortFrom(to, n.cfg.Port).String())
}

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3}

func (n *Net) track(t *tls.Conn, peer identity.ID, way string) *Conn {
	c := &Conn{Conn: t, peer: peer, way: way, net: n}
	n.mu.Lock()
	n.open[c] = struct{}{}
	n.mu.Unlock()
	return c
}

// Kick closes all streams with a node that is no longer a member.
func (n *Net) Kick(node identity.ID) {
	n.mu.Lock()
	var cut []*Conn
	for c := range n.open {
		if c.peer == node {
			cut = append(cut, c)
		}
	}
	n.mu.Unlock()
	for _, c := range cut {
		c.Conn.NetConn().Close() // without TLS's farewell: the other end may not be reading
		c.Close()
	}
}

// TakeStream takes in a raw stream that a relay joined to one of ours.
func (n *Net) TakeStream(c net.Conn, _ identity.ID) {
	n.wg.Go(func() { n.serve(c, "relay", func() {}) })
}

func (n *Net) accept(l net.Listener) {
	defer n.wg.Done()
	for {
		c, err := l.Accept()
		if err != nil {
			if n.ctx.Err() != nil {
				return
			}
			n.cfg.Log.Warn("control net: accept", "error", err)
			select { // out of file descriptors, most likely: give others time to close some
			case <-time.After(100 * time.Millisecond):
			case <-n.ctx.Done():
				return
			}
			continue
		}
		leave, err := n.enter(c)
		if err != nil {
			n.cfg.Log.Debug("control net: connection refused", "from", c.RemoteAddr().String(), "error", err)
			turnAway(c)
			continue
		}
		n.wg.Go(func() { n.serve(n.counted(c), "tunnel", leave) })
	}
}

// enter lets a connection by the tunnel in: its source is a member's, and has not too many handshakes under way.
func (n *Net) enter(c net.Conn) (leave func(), err error) {
	from, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return nil, ErrNotMember
	}
	source := from.AddrPort().Addr().Unmap()
	if _, ok := n.cfg.Roster.Owner(source); !ok {
		return nil, ErrNotMember
	}
	if n.cfg.Enter == nil {
		return func() {}, nil
	}
	return n.cfg.Enter(source)
}

// turnAway closes a connection at once: nothing of it shall stay in the kernel.
func turnAway(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}

func (n *Net) serve(c net.Conn, way string, leave func()) {
	ctx, cancel := context.WithTimeout(n.ctx, handshakeTimeout)
	defer cancel()
	t := tls.Server(c, n.server)
	err := t.HandshakeContext(ctx)
	leave()
	if err != nil {
		n.cfg.Log.Debug("control net: handshake refused", "from", c.RemoteAddr().String(), "way", way, "error", err)
		c.Close()
		return
	}
	state := t.ConnectionState()
	key, err := identity.PeerKey(state)
	l := n.streams[state.NegotiatedProtocol]
	if err != nil || l == nil {
		c.Close()
		return
	}
	if t, ok := c.(*countedConn); ok && !counts(l.alpn) {
		t.ends.Store(true)
	}
	conn := n.track(t, identity.IDOf(key), way)
	select {
	case l.conns <- conn:
	case <-ctx.Done():
		conn.Close()
	}
}

// SendPacket sends a packet to a node, by the tunnel when that is up and else by a relay. It is lost
// without notice when the network loses it.
func (n *Net) SendPacket(node identity.ID, channel byte, b []byte) error {
	if len(b) > MaxPacket {
		return fmt.Errorf("send %d bytes to node %s: %w (at most %d)", len(b), node, ErrTooLarge, MaxPacket)
	}
	tunnel := n.cfg.Tunnel(node)
	if tunnel == Up && n.sendTunnel(node, channel, b) == nil {
		return nil
	}
	err := n.sendRelay(node, channel, b)
	if err == nil {
		return nil
	}
	if tunnel == Away || tunnel == Idle {
		return fmt.Errorf("send to node %s: %w: %w", node, ErrNoWay, err)
	}
	if e := n.sendTunnel(node, channel, b); e != nil {
		return fmt.Errorf("send to node %s: %w: %w", node, ErrNoWay, errors.Join(err, e))
	}
	return nil
}

// SendRelayed is SendPacket, but never by the tunnel: it is for what the tunnel would not carry.
func (n *Net) SendRelayed(node identity.ID, channel byte, b []byte) error {
	if len(b) > MaxPacket {
		return fmt.Errorf("send %d bytes to node %s: %w (at most %d)", len(b), node, ErrTooLarge, MaxPacket)
	}
	if err := n.sendRelay(node, channel, b); err != nil {
		return fmt.Errorf("send to node %s: %w: %w", node, ErrNoWay, err)
	}
	return nil
}

// SendTunnelled is SendPacket, but by the tunnel alone, whatever path that has.
func (n *Net) SendTunnelled(node identity.ID, channel byte, b []byte) error {
	if len(b) > MaxPacket {
		return fmt.Errorf("send %d bytes to node %s: %w (at most %d)", len(b), node, ErrTooLarge, MaxPacket)
	}
	if err := n.sendTunnel(node, channel, b); err != nil {
		return fmt.Errorf("send to node %s by the tunnel: %w", node, err)
	}
	return nil
}

func (n *Net) sendRelay(node identity.ID, channel byte, b []byte) error {
	key, ok := n.cfg.PacketKey(node)
	if !ok {
		return ErrNotMember
	}
	return n.cfg.Relay.Send(node, channel, append(packetCode(key, n.cfg.Key.ID(), channel, b), b...))
}

// TakePacket takes in a packet that a relay says is from a node, and drops it when it is not.
func (n *Net) TakePacket(from identity.ID, channel byte, b []byte) {
	if content, ok := n.proved(from, channel, b); ok {
		n.cfg.OnPacket(from, channel, bytes.Clone(content))
	}
}

// proved is what comes behind a packet's code, if a node has made that.
func (n *Net) proved(from identity.ID, channel byte, b []byte) ([]byte, bool) {
	key, ok := n.cfg.PacketKey(from)
	if !ok || len(b) < codeSize || len(b) > MaxPacket+codeSize ||
		!hmac.Equal(b[:codeSize], packetCode(key, from, channel, b[codeSize:])) {
		return nil, false
	}
	return b[codeSize:], true
}

// coded marks the channel of a packet by the tunnel that carries a code, as those by a relay do.
const coded = 0x80

// byTunnel is a packet as it goes by the tunnel.
func (n *Net) byTunnel(node identity.ID, channel byte, b []byte) ([]byte, error) {
	if n.cfg.Coded == nil || !n.cfg.Coded(node) {
		return append([]byte{channel}, b...), nil
	}
	key, ok := n.cfg.PacketKey(node)
	if !ok {
		return nil, ErrNotMember
	}
	return slices.Concat([]byte{channel | coded}, packetCode(key, n.cfg.Key.ID(), channel, b), b), nil
}

// fromTunnel is the content of a packet that came by the tunnel from a node's address. Without a code it is only taken
// from who may not know of codes yet.
func (n *Net) fromTunnel(from identity.ID, data []byte) (channel byte, b []byte, ok bool) {
	if len(data) < 1 {
		return 0, nil, false
	}
	channel, b = data[0]&^coded, data[1:]
	if data[0]&coded != 0 {
		b, ok = n.proved(from, channel, b)
		return channel, b, ok
	}
	return channel, b, len(b) <= MaxPacket && (n.cfg.Coded == nil || !n.cfg.Coded(from))
}

// SealEcho is a packet of ChannelEcho as it travels, whatever way it goes; false: the node is not a member.
func (n *Net) SealEcho(to identity.ID, b []byte) ([]byte, bool) {
	key, ok := n.cfg.PacketKey(to)
	if !ok {
		return nil, false
	}
	return slices.Concat([]byte{ChannelEcho | coded}, packetCode(key, n.cfg.Key.ID(), ChannelEcho, b), b), true
}

// OpenEcho is the content of a packet of ChannelEcho, if a node has made it for this one.
func (n *Net) OpenEcho(from identity.ID, data []byte) ([]byte, bool) {
	key, ok := n.cfg.PacketKey(from)
	const head = 1 + codeSize
	if !ok || len(data) < head || data[0] != ChannelEcho|coded ||
		!hmac.Equal(data[1:head], packetCode(key, from, ChannelEcho, data[head:])) {
		return nil, false
	}
	return data[head:], true
}

// CountEcho counts a packet of ChannelEcho that went to a peer by the tunnel, or came from it.
func (n *Net) CountEcho(peer identity.ID, sent bool, bytes int, address netip.Addr) {
	c := n.countAt(peer)
	if sent {
		c.sent.Add(inTunnel(bytes, address))
		return
	}
	c.received.Add(inTunnel(bytes, address))
}

// codeSize is the length of a packet's authentication code in bytes: HMAC-SHA256, truncated.
const codeSize = 16

// packetCode authenticates a packet's sender, channel and content. Both ends have the same key, so the
// sender is part of it: else a relay could send a packet back.
func packetCode(key [32]byte, sender identity.ID, channel byte, b []byte) []byte {
	m := hmac.New(sha256.New, key[:])
	m.Write(sender[:])
	m.Write([]byte{channel})
	m.Write(b)
	return m.Sum(nil)[:codeSize]
}

func (n *Net) sendTunnel(node identity.ID, channel byte, b []byte) error {
	v4, v6, ok := n.cfg.Roster.Overlay(node)
	if !ok {
		return ErrNotMember
	}
	n.mu.Lock()
	socks := n.udp
	n.mu.Unlock()
	for _, c := range socks {
		local := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
		to := v6
		if local.Is4() {
			to = v4
		}
		if !to.IsValid() || to.Is4() != local.Is4() {
			continue
		}
		by, err := byLink(c, n.cfg.Link, local)
		if err != nil {
			return err
		}
		packet, err := n.byTunnel(node, channel, b)
		if err != nil {
			return err
		}
		if _, _, err = c.WriteMsgUDPAddrPort(packet, by, netip.AddrPortFrom(to, n.cfg.Port)); err == nil {
			n.count(node).sent.Add(inTunnel(len(packet), local))
		}
		return err
	}
	return errors.New("the tunnel's side is not bound to port " + strconv.Itoa(int(n.cfg.Port)) + " yet")
}

func (n *Net) receive(c *net.UDPConn, r *mmsg.Reader) {
	defer n.wg.Done()
	for {
		if err := r.Read(); err != nil {
			if n.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // such as an ICMP error for an earlier packet
		}
		for d, ok := r.Next(); ok; d, ok = r.Next() {
			id, known := n.cfg.Roster.Owner(d.From.Addr())
			if known && len(d.Data) > 0 && d.Data[0] == ChannelEcho|coded {
				if b, ok := n.OpenEcho(id, d.Data); ok && n.cfg.OnEcho != nil {
					self := c.LocalAddr().(*net.UDPAddr).AddrPort()
					n.cfg.OnEcho(id, d.From, netip.AddrPortFrom(self.Addr().Unmap(), self.Port()), b)
				}
				continue
			}
			if !known || !cameBy(c, n.cfg.Link, d) {
				continue
			}
			n.count(id).received.Add(inTunnel(len(d.Data), d.From.Addr()))
			if channel, b, ok := n.fromTunnel(id, d.Data); ok {
				n.cfg.OnPacket(id, channel, bytes.Clone(b))
			}
		}
	}
}
