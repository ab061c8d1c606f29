package gossip

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/skeinmesh/skein/identity"
)

// Transport is the control net.
type Transport interface {
	// SendPacket sends a packet, best effort. The buffer is not used again by the caller.
	SendPacket(node identity.ID, b []byte) error
	Dial(ctx context.Context, node identity.ID, alpn string) (net.Conn, error)
}

// Packet came in over the control net; From is the sender that the net has proved.
type Packet struct {
	From identity.ID
	Data []byte
	At   time.Time
}

// peerConn is what the control net's connections are.
type peerConn interface{ Peer() identity.ID }

const (
	// memberlistPort is part of the address that memberlist requires; nothing listens on it.
	memberlistPort = 7946
	// peekTimeout is how long an accepted stream may take to say which protocol it speaks.
	peekTimeout = 5 * time.Second
	// maxStreams bounds the streams that are served at once.
	maxStreams = 128
	// maxPeerStreams is one member's share of them: a member opens one at a time, but a lost one may go unnoticed for a
	// while.
	maxPeerStreams = 16

	// What memberlist's encrypted messages look like (security.go and net.go there, protocol 2 and later).
	labelled          = 244 // first byte of a packet or a stream that names its pool; the length of the name follows
	encryptedMessage  = 10  // type byte of an encrypted message on a stream
	encryptionVersion = 1   // AES-GCM without padding
	encryptedOverhead = 29  // version, nonce, tag
	maxStreamMessage  = 16 << 20
)

var (
	errShortPacket  = errors.New("packet is too short to be encrypted gossip")
	errPacketFormat = errors.New("packet is not encrypted gossip")
	errNotMember    = errors.New("not a member of the cluster")
	errElsewhere    = errors.New("not known to be in this pool")
)

// checkPacket refuses a packet that memberlist could not use: here it accepts only encrypted ones, in one format.
func checkPacket(b []byte) error {
	if len(b) <= encryptedOverhead {
		return errShortPacket
	}
	if b[0] != encryptionVersion {
		return errPacketFormat
	}
	return nil
}

// checkStreamHead refuses a memberlist stream by its first bytes: type, length, format. An empty
// message would make memberlist read past the end of what it decrypted.
func checkStreamHead(b []byte) error {
	if len(b) < 6 || b[0] != encryptedMessage || b[5] != encryptionVersion {
		return errors.New("stream is not encrypted gossip")
	}
	if n := binary.BigEndian.Uint32(b[1:]); n <= encryptedOverhead || n > maxStreamMessage {
		return fmt.Errorf("stream message of %d bytes, the limits are %d and %d", n, encryptedOverhead, maxStreamMessage)
	}
	return nil
}

// syntheticAddr is the address that memberlist shows for a node. Nothing is ever sent to it: names are node IDs, and
// messages go by name.
func syntheticAddr(id identity.ID) netip.AddrPort {
	var a [16]byte
	a[0] = 0xfd
	copy(a[8:], id[:])
	return netip.AddrPortFrom(netip.AddrFrom16(a), memberlistPort)
}

// mlTransport connects a pool's memberlist to the control net, for members only.
type mlTransport struct {
	self    identity.ID
	net     Transport
	member  func(identity.ID) bool
	stats   *stats
	late    func() time.Duration // how late this process woke recently
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	stop    sync.Once

	mu    sync.Mutex
	conns map[*mlConn]struct{} // that memberlist uses; Shutdown closes them, since memberlist would wait for them
}

// mlConn is a stream that memberlist uses.
type mlConn struct {
	net.Conn
	t *mlTransport
}

func (c *mlConn) Close() error {
	c.t.mu.Lock()
	delete(c.t.conns, c)
	c.t.mu.Unlock()
	return c.Conn.Close()
}

func (t *mlTransport) track(conn net.Conn) *mlConn {
	c := &mlConn{conn, t}
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.done:
		_ = conn.Close()
	default:
		t.conns[c] = struct{}{}
	}
	return c
}

func newTransport(
	self identity.ID, n Transport, member func(identity.ID) bool, s *stats, late func() time.Duration,
) *mlTransport {
	return &mlTransport{
		self: self, net: n, member: member, stats: s, late: late,
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), done: make(chan struct{}),
		conns: make(map[*mlConn]struct{}),
	}
}

var _ memberlist.NodeAwareTransport = (*mlTransport)(nil)

func (t *mlTransport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	a := syntheticAddr(t.self)
	return net.IP(a.Addr().AsSlice()), int(a.Port()), nil
}

// WriteToAddress never fails: memberlist would take an error as its own fault and not suspect the other node. For it, a
// packet that cannot be sent is the same as one that is lost later.
func (t *mlTransport) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	now := time.Now()
	id, err := parseID(a.Name)
	if err != nil || !t.member(id) {
		t.stats.add(&t.stats.Strangers)
		return now, nil
	}
	if err := t.net.SendPacket(id, b); err != nil {
		t.stats.add(&t.stats.SendErrors)
	}
	return now, nil
}

func (t *mlTransport) WriteTo([]byte, string) (time.Time, error) {
	return time.Time{}, errors.New("gossip sends by node name only")
}

func (t *mlTransport) DialTimeout(string, time.Duration) (net.Conn, error) {
	return nil, errors.New("gossip dials by node name only")
}

func (t *mlTransport) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	id, err := parseID(a.Name)
	if err != nil {
		return nil, err
	}
	if !t.member(id) {
		t.stats.add(&t.stats.Strangers)
		return nil, fmt.Errorf("dial node %s: %w", id, errNotMember)
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(timeout, patience(t.late())))
	defer cancel()
	go func() {
		select {
		case <-t.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	conn, err := t.net.Dial(ctx, id, identity.ALPNGossip)
	if err != nil {
		return nil, err
	}
	// memberlist writes the pool's name before it sets a deadline.
	_ = conn.SetDeadline(time.Now().Add(streamTimeout))
	return t.track(conn), nil
}

// patience returns how long a dial may take. A dial that is given up has cost its handshakes all the same.
func patience(late time.Duration) time.Duration { return dialTimeout + dialPerLate*late }

func (g *Gossip) patience() time.Duration { return patience(g.late()) }

// dial opens a stream to a member.
func (g *Gossip) dial(ctx context.Context, id identity.ID) (net.Conn, error) {
	if !g.roster.member(id) {
		g.stats.add(&g.stats.Strangers)
		return nil, fmt.Errorf("dial node %s: %w", id, errNotMember)
	}
	return g.cfg.Transport.Dial(ctx, id, identity.ALPNGossip)
}

func (t *mlTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *mlTransport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *mlTransport) Shutdown() error {
	t.stop.Do(func() {
		t.mu.Lock()
		close(t.done)
		conns := slices.Collect(maps.Keys(t.conns))
		t.mu.Unlock()
		for _, c := range conns {
			_ = c.Conn.Close()
		}
	})
	return nil
}

// poolOf returns the pool of a packet or of a stream's first bytes, and what follows the pool's name. The pool is nil
// if this node is not in it.
func (g *Gossip) poolOf(b []byte) (*pool, []byte) {
	if len(b) == 0 || b[0] != labelled {
		return g.wide.Load(), b
	}
	near := g.near.Load()
	if near == nil || len(b) < 2+labelSize || b[1] != labelSize || string(b[2:2+labelSize]) != near.label {
		return nil, nil
	}
	return near, b[2+labelSize:]
}

// forward delivers members' packets to their pools until in is closed or gossip stops.
func (g *Gossip) forward(in <-chan Packet) {
	for {
		select {
		case <-g.done:
			return
		case p, ok := <-in:
			if !ok {
				return
			}
			g.deliver(p)
		}
	}
}

// deliver gives a packet to the pool that it names.
func (g *Gossip) deliver(p Packet) {
	if !g.roster.member(p.From) {
		g.stats.add(&g.stats.Strangers)
		return
	}
	to, inner := g.poolOf(p.Data)
	if to == nil || to.near && !to.speaksTo(p.From) {
		g.stats.add(&g.stats.Elsewhere)
		return
	}
	if checkPacket(inner) != nil {
		g.stats.add(&g.stats.BadFrames)
		return
	}
	to.rejoin.heard(p.From)
	at := p.At
	if at.IsZero() {
		at = time.Now()
	}
	from := net.UDPAddrFromAddrPort(syntheticAddr(p.From))
	select {
	case to.net.packets <- &memberlist.Packet{Buf: p.Data, From: from, Timestamp: at}:
	case <-to.net.done:
	}
}

// acceptStreams accepts streams until the listener is closed. Those of the record protocol go to serve, the others to
// memberlist.
func (g *Gossip) acceptStreams(l net.Listener, serve func(net.Conn, identity.ID)) {
	slots := make(chan struct{}, maxStreams)
	var each peerStreams
	for {
		conn, err := l.Accept()
		if err != nil {
			select {
			case <-g.done:
				return
			default:
			}
			if errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case <-g.done:
				return
			case <-time.After(100 * time.Millisecond): // the process is out of file descriptors, most likely
			}
			continue
		}
		p, ok := conn.(peerConn)
		if !ok || !g.roster.member(p.Peer()) {
			g.stats.add(&g.stats.Strangers)
			_ = conn.Close()
			continue
		}
		leave, ok := each.enter(p.Peer())
		if !ok {
			g.stats.add(&g.stats.Busy)
			_ = conn.Close()
			continue
		}
		select {
		case slots <- struct{}{}:
		default:
			leave()
			g.stats.add(&g.stats.Busy)
			_ = conn.Close()
			continue
		}
		go func() {
			defer func() { leave(); <-slots }()
			g.dispatch(conn, p.Peer(), serve)
		}()
	}
}

// peerStreams counts the open streams of each member, so that no member uses up all. It is safe for concurrent use.
type peerStreams struct {
	mu   sync.Mutex
	open map[identity.ID]int
}

// enter returns false when a member has its share of streams. Otherwise leave must be called at the stream's end.
func (s *peerStreams) enter(id identity.ID) (leave func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[id] >= maxPeerStreams {
		return nil, false
	}
	if s.open == nil {
		s.open = map[identity.ID]int{}
	}
	s.open[id]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.open[id]--; s.open[id] == 0 {
			delete(s.open, id)
		}
	}, true
}

// dispatch reads a stream's first bytes, and gives it to serve or to the pool that it names.
func (g *Gossip) dispatch(conn net.Conn, peer identity.ID, serve func(net.Conn, identity.ID)) {
	_ = conn.SetDeadline(time.Now().Add(peekTimeout))
	r := bufio.NewReaderSize(conn, 4096)
	head, err := r.Peek(1)
	if err != nil {
		_ = conn.Close()
		return
	}
	c := &peeked{Conn: conn, r: r}
	if head[0] == streamMagic {
		serve(c, peer)
		return
	}
	size := 6
	if head[0] == labelled {
		size += 2 + labelSize
	}
	head, _ = r.Peek(size)
	to, inner := g.poolOf(head)
	if to == nil || to.near && !to.speaksTo(peer) {
		g.stats.add(&g.stats.Elsewhere)
		_ = conn.Close()
		return
	}
	if checkStreamHead(inner) != nil {
		g.stats.add(&g.stats.BadFrames)
		_ = conn.Close()
		return
	}
	tracked := to.net.track(c)
	select {
	case to.net.streams <- tracked:
	case <-to.net.done:
		_ = tracked.Close()
	}
}

// peeked is a connection whose first bytes are still in a buffer.
type peeked struct {
	net.Conn
	r *bufio.Reader
}

func (p *peeked) Read(b []byte) (int, error) { return p.r.Read(b) }
