package client

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// ProxyOptions are the optional arguments of NewProxies.
type ProxyOptions struct {
	// Known reports whether a packet from a node may open a proxy; nil: every node that the relays vouch for.
	Known func(identity.ID) bool
	// OnNew is called when a peer's packet has opened a proxy, before that packet is delivered. It must not block.
	OnNew func(peer identity.ID, endpoint netip.AddrPort)
	// Avoid are ports that other programs need later, such as WireGuard's own when it comes up. The kernel may choose any
	// of them for a proxy's socket, and would then keep it from them as long as the peer stays.
	Avoid []uint16
	Log   *slog.Logger
}

// maxProxies bounds the sockets and goroutines of Proxies.
const maxProxies = 8192

// Proxies are local UDP sockets, one for each relayed peer. WireGuard uses a socket's address as the peer's endpoint,
// and the relays carry its packets. An address stays as long as the peer does, whichever relay serves it.
type Proxies struct {
	pool    *Pool
	wg      func() netip.AddrPort
	opt     ProxyOptions
	batches chan *receiveBatch // borrowed only while a socket is readable, so that a few serve all proxies

	mu     sync.RWMutex
	byPeer map[identity.ID]*proxy
	closed bool
	done   sync.WaitGroup

	plain                    atomic.Bool // the kernel refuses UDP_SEGMENT
	toPeers, fromPeers, lost atomic.Uint64
}

// proxy is one peer's socket. It is connected to WireGuard's port, so that the kernel refuses datagrams from any other
// source.
type proxy struct {
	peer     identity.ID
	conn     *net.UDPConn
	raw      syscall.RawConn
	endpoint netip.AddrPort
	target   atomic.Pointer[netip.AddrPort] // what the socket is connected to; invalid: WireGuard is not up
	brought  atomic.Uint64                  // packets from the peer that WireGuard's socket took
}

// NewProxies makes the pool deliver WireGuard's packets to local sockets. wg returns WireGuard's own address, such as
// 127.0.0.1:51820; it may change, and is invalid while WireGuard is not up.
func NewProxies(p *Pool, wg func() netip.AddrPort, opt ProxyOptions) *Proxies {
	if opt.Known == nil {
		opt.Known = func(identity.ID) bool { return true }
	}
	if opt.OnNew == nil {
		opt.OnNew = func(identity.ID, netip.AddrPort) {}
	}
	if opt.Log == nil {
		opt.Log = slog.New(slog.DiscardHandler)
	}
	x := &Proxies{
		pool: p, wg: wg, opt: opt,
		byPeer:  map[identity.ID]*proxy{},
		batches: make(chan *receiveBatch, runtime.NumCPU()),
	}
	p.proxies.Store(x)
	return x
}

// Endpoint returns the address that WireGuard uses for a peer, and opens its socket at the first call. The address is
// invalid if no socket can be opened; the reason is logged, and the next call tries again.
func (x *Proxies) Endpoint(peer identity.ID) netip.AddrPort {
	y, _, err := x.open(peer)
	if err != nil {
		x.opt.Log.Error("no local UDP proxy for a relayed peer", "peer", peer, "error", err)
		return netip.AddrPort{}
	}
	return y.endpoint
}

func (x *Proxies) get(peer identity.ID) *proxy {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.byPeer[peer]
}

func (x *Proxies) open(peer identity.ID) (y *proxy, made bool, err error) {
	if y := x.get(peer); y != nil {
		return y, false, nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if y := x.byPeer[peer]; y != nil {
		return y, false, nil
	}
	if x.closed {
		return nil, false, fmt.Errorf("relay proxies: %w", wire.ErrClosed)
	}
	if len(x.byPeer) >= maxProxies {
		return nil, false, fmt.Errorf("the limit of %d proxies is reached: remove peers that are gone", maxProxies)
	}
	conn, err := x.listen()
	if err != nil {
		return nil, false, fmt.Errorf("open a UDP socket on 127.0.0.1 (raise the limit of open files?): %w", err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, false, fmt.Errorf("open a UDP socket on 127.0.0.1: %w", err)
	}
	y = &proxy{peer: peer, conn: conn, raw: raw, endpoint: conn.LocalAddr().(*net.UDPAddr).AddrPort()}
	_ = raw.Control(wire.PrepareUDP) // best effort: without it only bursts suffer
	if err := x.aim(y); err != nil {
		conn.Close()
		return nil, false, err
	}
	x.byPeer[peer] = y
	x.done.Go(func() { x.read(y) })
	return y, true, nil
}

// listen opens a socket on a port that is not in Avoid.
func (x *Proxies) listen() (*net.UDPConn, error) {
	for {
		conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
		if err != nil || !slices.Contains(x.opt.Avoid, uint16(conn.LocalAddr().(*net.UDPAddr).Port)) {
			return conn, err
		}
		defer conn.Close() // held until another port is found, since the kernel might choose this one again
	}
}

// aim connects a proxy's socket to WireGuard's present address.
func (x *Proxies) aim(y *proxy) error {
	to := x.wg()
	if old := y.target.Load(); old != nil && *old == to {
		return nil
	}
	at := to
	if !at.IsValid() {
		at = y.endpoint // to itself, so that no other source is accepted until WireGuard is up
	}
	var err error
	if e := y.raw.Control(func(fd uintptr) { err = connectUDP(fd, at) }); e != nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("connect a proxy to WireGuard at %s: %w", at, err)
	}
	y.target.Store(&to)
	return nil
}

// Refresh connects all proxies to WireGuard's present address. Packets from a peer do the same for its proxy; without
// them, only Refresh notices a change of WireGuard's port.
func (x *Proxies) Refresh() error {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var errs []error
	for _, y := range x.byPeer {
		errs = append(errs, x.aim(y))
	}
	return errors.Join(errs...)
}

// Remove closes a peer's proxy.
func (x *Proxies) Remove(peer identity.ID) {
	x.mu.Lock()
	y := x.byPeer[peer]
	delete(x.byPeer, peer)
	x.mu.Unlock()
	if y != nil {
		y.conn.Close()
	}
}

// Brought counts the packets of a peer that came by a relay's session. It starts at zero with the peer's proxy.
func (x *Proxies) Brought(peer identity.ID) uint64 {
	if y := x.get(peer); y != nil {
		return y.brought.Load()
	}
	return 0
}

// ProxyStats counts what passes the proxies.
type ProxyStats struct {
	Proxies            int
	ToPeers, FromPeers uint64 // packets
	Lost               uint64 // packets from peers that WireGuard's socket did not take
}

// Stats returns the counters.
func (x *Proxies) Stats() ProxyStats {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return ProxyStats{len(x.byPeer), x.toPeers.Load(), x.fromPeers.Load(), x.lost.Load()}
}

// Close closes all proxies.
func (x *Proxies) Close() error {
	x.pool.proxies.CompareAndSwap(x, nil)
	x.mu.Lock()
	x.closed = true
	for id, y := range x.byPeer {
		delete(x.byPeer, id)
		y.conn.Close()
	}
	x.mu.Unlock()
	x.done.Wait()
	return nil
}

// read sends WireGuard's datagrams to the relay. It holds no buffer while the socket is empty.
func (x *Proxies) read(y *proxy) {
	burst := func(fd uintptr) (done bool) {
		b := x.borrow()
		n := b.receive(fd)
		if n > 0 {
			x.forward(y, b, n)
		}
		x.giveBack(b)
		return n != 0
	}
	for y.raw.Read(burst) == nil {
	}
}

func (x *Proxies) borrow() *receiveBatch {
	select {
	case b := <-x.batches:
		return b
	default:
		return newReceiveBatch()
	}
}

func (x *Proxies) giveBack(b *receiveBatch) {
	select {
	case x.batches <- b:
	default:
	}
}

// forward queues a burst for the peer's relay and wakes the session once.
func (x *Proxies) forward(y *proxy, b *receiveBatch, n int) {
	if t := y.target.Load(); t == nil || !t.IsValid() {
		return
	}
	p := x.pool
	now := p.now()
	if h := p.nextHop(p.peer(y.peer), now, wire.ChannelWireGuard); h.q != nil {
		h.q.Lock()
		open, packets := !h.q.Sealed(), uint64(0)
		if open {
			packets = b.each(n, func(one []byte) bool { return h.add(now, y.peer, wire.ChannelWireGuard, one) })
		}
		h.q.Unlock()
		if open {
			x.toPeers.Add(packets)
			h.q.Kick()
			h.c.stir()
			return
		}
	}
	// Without a session, Send keeps the packets for a moment. WireGuard repeats those that are lost.
	b.each(n, func(one []byte) bool { return p.Send(y.peer, wire.ChannelWireGuard, one) == nil })
}

// each calls f with every datagram of a burst, and counts those for which f returns true.
func (b *receiveBatch) each(n int, f func([]byte) bool) (taken uint64) {
	for i := range n {
		rest, segment := b.message(i)
		for len(rest) > 0 {
			one := rest[:min(segment, len(rest))]
			rest = rest[len(one):]
			if f(one) {
				taken++
			}
		}
	}
	return taken
}

// deliver collects a peer's packets for WireGuard; they must stay in memory until flush.
func (x *Proxies) deliver(b *sendBatch, from identity.ID, payload []byte) {
	if len(payload) == 0 {
		return
	}
	if b.to == nil || b.to.peer != from {
		x.flush(b)
		y := x.get(from)
		if y == nil {
			if !x.opt.Known(from) {
				return
			}
			var made bool
			var err error
			if y, made, err = x.open(from); err != nil {
				x.lost.Add(1)
				x.opt.Log.Debug("packet of a relayed peer lost", "peer", from, "error", err)
				return
			}
			if made {
				x.opt.OnNew(from, y.endpoint)
			}
		}
		b.to, b.plain = y, &x.plain
	}
	if !b.add(payload) {
		y := b.to
		x.flush(b)
		b.to = y
		b.add(payload)
	}
}

// flush sends to WireGuard what deliver has collected.
func (x *Proxies) flush(b *sendBatch) {
	if b.to == nil {
		return
	}
	n := b.packets
	sent := 0
	if x.aim(b.to) == nil && b.to.target.Load().IsValid() {
		sent = b.send(b.to.raw)
	}
	x.fromPeers.Add(uint64(sent))
	b.to.brought.Add(uint64(sent))
	x.lost.Add(uint64(n - sent))
	b.clear()
}
