package client

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// Reservation is a relay's report about the port that it has reserved for this node's packets to a peer.
type Reservation struct {
	Relay, Peer identity.ID
	Endpoint    netip.AddrPort // the relay's port; invalid: there is none, or it has ended
	Ready       bool           // both ends have proven their mappings: pings to the port reach the peer
	Refused     string         // why there is none
}

// bindGap is the least time between two binds to one port: several pings in quick succession need only one.
const bindGap = 25 * time.Millisecond

// reservations holds this node's ends of pairs.
type reservations struct {
	mu   sync.Mutex
	byTo map[netip.AddrPort]*reservation
	byOf map[link]*reservation
	wish map[link]bool // what this node has asked for, in any session
}

type link struct{ relay, peer identity.ID }

type reservation struct {
	link
	pair     wire.PairID
	key      [wire.PairKeySize]byte
	endpoint netip.AddrPort
	ready    bool
	counter  uint64
	bound    time.Time
}

func newReservations() *reservations {
	return &reservations{byTo: map[netip.AddrPort]*reservation{}, byOf: map[link]*reservation{}, wish: map[link]bool{}}
}

// Reserve asks a relay for a pair of UDP ports with a peer. The answer comes through PoolConfig.OnReserved, at both
// ends; for a pair that exists, the relay repeats it.
func (p *Pool) Reserve(relay, peer identity.ID) error {
	c := p.client(relay)
	switch {
	case c.queue() == nil:
		return fmt.Errorf("reserve a port for node %s: no session with relay %s", peer, relay)
	case !c.udp.Load():
		return fmt.Errorf("reserve a port for node %s: relay %s forwards no UDP", peer, relay)
	}
	r := p.reserved
	r.mu.Lock()
	r.wish[link{relay, peer}] = true
	r.mu.Unlock()
	c.control(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameReserve, peer) })
	return nil
}

// ReservationFailed reports to the relay that a reserved port is ready but no packets pass.
func (p *Pool) ReservationFailed(relay, peer identity.ID) {
	if r := p.reservation(relay, peer); r != nil {
		p.client(relay).control(func(b []byte) []byte { return wire.AppendPairID(b, wire.FrameFailed, r.pair) })
	}
}

// GiveUpReservation gives a pair's ports back to the relay, and does not ask for them again in a new session.
func (p *Pool) GiveUpReservation(relay, peer identity.ID) {
	r := p.reserved
	r.mu.Lock()
	delete(r.wish, link{relay, peer})
	x := r.byOf[link{relay, peer}]
	r.drop(x)
	r.mu.Unlock()
	if x != nil {
		p.client(relay).control(func(b []byte) []byte { return wire.AppendPairID(b, wire.FrameGiveUp, x.pair) })
	}
}

// Bind returns the datagram that must precede a ping to a reserved port, from the same port: it shows the relay where
// this node's packets come from, even after a NAT has changed the mapping. ok is false if to is no such port, or if a
// bind was made within bindGap.
func (p *Pool) Bind(to netip.AddrPort) (b []byte, ok bool) {
	r := p.reserved
	r.mu.Lock()
	defer r.mu.Unlock()
	x := r.byTo[to]
	now := time.Now()
	if x == nil || now.Sub(x.bound) < bindGap {
		return nil, false
	}
	x.bound = now
	return x.bind([wire.NonceSize]byte{}), true
}

func (x *reservation) bind(nonce [wire.NonceSize]byte) []byte {
	x.counter++
	m := wire.BindMessage{Kind: wire.TypeBind, Pair: x.pair, Counter: x.counter, Nonce: nonce}
	return wire.AppendBind(nil, m, &x.key)
}

// TakeChallenge takes a relay's challenge that came to WireGuard's port, and returns the answer to send back to its
// source. ok is false for anything else, which gets no answer.
func (p *Pool) TakeChallenge(from netip.AddrPort, b []byte) (answer []byte, ok bool) {
	r := p.reserved
	r.mu.Lock()
	defer r.mu.Unlock()
	x := r.byTo[from]
	if x == nil {
		return nil, false
	}
	for len(b) > 0 {
		m, rest, err := wire.ParseBind(b)
		if err != nil {
			return nil, false
		}
		if m.Kind == wire.TypeChallenge && m.Pair == x.pair && m.Counter <= x.counter && wire.ProveBind(b, &x.key) == nil {
			return x.bind(m.Nonce), true
		}
		b = rest
	}
	return nil, false
}

func (p *Pool) client(relay identity.ID) *client {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.relays[relay]
}

// control queues a control frame; c may be nil.
func (c *client) control(f func([]byte) []byte) {
	if q := c.queue(); q != nil {
		q.PushControl(f)
	}
}

func (p *Pool) reservation(relay, peer identity.ID) *reservation {
	r := p.reserved
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.byOf[link{relay, peer}]
}

// drop forgets a reservation, which may be nil. The caller holds mu.
func (r *reservations) drop(x *reservation) {
	if x == nil {
		return
	}
	if r.byTo[x.endpoint] == x {
		delete(r.byTo, x.endpoint)
	}
	if r.byOf[x.link] == x {
		delete(r.byOf, x.link)
	}
}

// forget drops all reservations that concern a peer or a relay.
func (r *reservations) forget(id identity.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for l, x := range r.byOf {
		if l.relay == id || l.peer == id {
			r.drop(x)
		}
	}
	for l := range r.wish {
		if l.relay == id || l.peer == id {
			delete(r.wish, l)
		}
	}
}

// granted notes this node's half of a pair. The port is at the address at which the session reaches the relay.
func (c *client) granted(w *wire.Conn, g wire.Grant) {
	at, ok := remoteAddr(w.TLS.NetConn())
	if !ok || g.Port == 0 || !c.pool.cfg.Known(g.Peer) {
		return
	}
	l := link{c.relay.ID, g.Peer}
	x := &reservation{link: l, pair: g.Pair, key: g.Key, endpoint: netip.AddrPortFrom(at, g.Port)}
	r := c.pool.reserved
	r.mu.Lock()
	if old := r.byOf[l]; old != nil {
		if old.pair == g.Pair && old.key == g.Key && old.endpoint == x.endpoint {
			x = old
		} else {
			r.drop(old)
		}
	}
	if len(r.byOf) >= maxReservations {
		r.mu.Unlock()
		return
	}
	r.byOf[l], r.byTo[x.endpoint] = x, x
	said := Reservation{Relay: l.relay, Peer: l.peer, Endpoint: x.endpoint, Ready: x.ready}
	r.mu.Unlock()
	c.pool.cfg.OnReserved(said)
}

// maxReservations bounds the reservations that relays can make this node remember.
const maxReservations = 16384

// pairTold handles a later change of a pair's state.
func (c *client) pairTold(id wire.PairID, s wire.PairState) {
	r := c.pool.reserved
	r.mu.Lock()
	var x *reservation
	for _, y := range r.byOf {
		if y.pair == id && y.relay == c.relay.ID {
			x = y
			break
		}
	}
	if x == nil {
		r.mu.Unlock()
		return
	}
	said := Reservation{Relay: x.relay, Peer: x.peer}
	switch s {
	case wire.PairReady:
		x.ready = true
		said.Endpoint, said.Ready = x.endpoint, true
	case wire.PairEnded:
		r.drop(x)
		delete(r.wish, x.link)
		said.Refused = "the relay ended it"
	default:
		r.mu.Unlock()
		return // a state of a later version
	}
	r.mu.Unlock()
	c.pool.cfg.OnReserved(said)
}

func (c *client) denied(peer identity.ID, d wire.Denial) {
	r := c.pool.reserved
	r.mu.Lock()
	delete(r.wish, link{c.relay.ID, peer})
	r.mu.Unlock()
	c.pool.cfg.OnReserved(Reservation{Relay: c.relay.ID, Peer: peer, Refused: d.String()})
}

// offersUDP notes whether the relay's hello offers UDP ports. It also asks again for what was reserved in an earlier
// session, since the relay may have restarted and forgotten it.
func (c *client) offersUDP(w *wire.Conn, on bool) {
	c.udp.Store(on)
	if !on {
		return
	}
	r := c.pool.reserved
	r.mu.Lock()
	var again []identity.ID
	for l := range r.wish {
		if l.relay == c.relay.ID {
			again = append(again, l.peer)
		}
	}
	r.mu.Unlock()
	for _, peer := range again {
		w.Queue.PushControl(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameReserve, peer) })
	}
}

// remoteAddr returns the address of a connection's other end, if UDP can be sent there too.
func remoteAddr(c net.Conn) (netip.Addr, bool) {
	t, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	a := t.AddrPort().Addr().Unmap()
	return a, a.IsValid() && !a.IsLinkLocalUnicast()
}
