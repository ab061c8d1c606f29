package probe

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
)

const (
	maxOutstanding = 16384            // pings under way, over all peers
	pongWait       = 10 * time.Second // a pong that takes longer does not count
	pongsPerSecond = 100              // answered per peer
	pongBurst      = 256
)

// ErrUnknownPeer is returned for a peer whose key was not set.
var ErrUnknownPeer = errors.New("probe: no key for this peer")

// Sender is the half of Socket that Prober needs.
type Sender interface {
	SendFrom(local netip.Addr, to netip.AddrPort, payload []byte) error
}

// Ping is a peer's ping that proved its key and has been answered.
type Ping struct {
	Peer  identity.ID
	From  netip.AddrPort
	Local netip.Addr // the address of ours that it was sent to
	Size  int        // of the datagram
	At    time.Time
}

// Pong is the answer to one of our pings; each ping yields one at most.
type Pong struct {
	Peer     identity.ID
	From     netip.AddrPort // where the answer came from
	To       netip.AddrPort // where the ping was sent
	Tx       TxID
	RTT      time.Duration
	Observed netip.AddrPort // how the peer saw our address
	Size     int            // of our ping: the way there carries as much
	At       time.Time
}

// ProberConfig makes a Prober. The callbacks run on the socket's receiving goroutines and must not block.
type ProberConfig struct {
	Self   identity.ID
	Epoch  uint64 // grows by one at each start of the agent, see gossip.NextEpoch
	Socket Sender
	OnPing func(Ping)
	OnPong func(Pong)
	OnSTUN Handler // what is STUN, untouched
	// OnRelay gets, untouched, what has our magic and the version of relays' messages.
	OnRelay Handler
	Log     *slog.Logger
}

// ProberStats counts datagrams since the start.
type ProberStats struct {
	PingsSent, PongsSent, PingsReceived, PongsReceived uint64
	Strangers, BadMAC, Replayed, Limited, Unsolicited  uint64
}

// Prober pings peers, answers their pings and measures their pongs.
type Prober struct {
	c ProberConfig

	mu      sync.Mutex // guards what follows
	peers   map[identity.ID]*peer
	counted uint64 // the highest counter used towards any peer that was removed
	sent    outstanding
	detours map[netip.AddrPort]Sender
	buffer  []byte

	stats struct {
		pingsSent, pongsSent, pingsReceived, pongsReceived atomic.Uint64
		strangers, badMAC, replayed, limited, unsolicited  atomic.Uint64
	}
}

type peer struct {
	key     [32]byte
	codec   *Codec
	window  Window
	counter uint64
	pongs   *rate.Limiter
}

// NewProber makes a Prober; give its Handle to Socket.Serve.
func NewProber(c ProberConfig) *Prober {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Prober{c: c, peers: make(map[identity.ID]*peer), sent: outstanding{byTx: make(map[TxID]ping)}}
}

// SetPeer sets or changes the key shared with a peer: identity.PairKey with purpose "probe".
func (p *Prober) SetPeer(id identity.ID, key [32]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.peers[id]
	switch {
	case old == nil:
		pongs := rate.NewLimiter(pongsPerSecond, pongBurst)
		p.peers[id] = &peer{key: key, codec: NewCodec(key), counter: p.counted, pongs: pongs}
	case old.key != key:
		old.key, old.codec = key, NewCodec(key)
	}
}

// RemovePeer forgets a peer: it is neither pinged nor answered any more. The peer may have this node all the while, and
// takes a ping whose counter it has seen in this epoch for a replay; so nobody's counter begins anew.
func (p *Prober) RemovePeer(id identity.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.peers[id]; q != nil {
		p.counted = max(p.counted, q.counter)
		delete(p.peers, id)
	}
}

// SendPing pings a peer at an endpoint. The pong comes through OnPong with the same TxID.
func (p *Prober) SendPing(id identity.ID, to netip.AddrPort) (TxID, error) {
	return p.SendPingSize(id, to, Size)
}

// SendPingSize is SendPing with a datagram of a given size, at most MaxSize, to learn whether such datagrams pass there
// and back: the pong is as long.
func (p *Prober) SendPingSize(id identity.ID, to netip.AddrPort, size int) (TxID, error) {
	tx := NewTxID()
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.peers[id]
	if q == nil {
		return tx, fmt.Errorf("ping node %s: %w", id, ErrUnknownPeer)
	}
	q.counter++
	p.buffer = q.codec.EncodePing(p.buffer[:0], Message{Sender: p.c.Self, Tx: tx, Epoch: p.c.Epoch, Counter: q.counter,
		Length: size, Echo: size > Size})
	now := time.Now()
	if err := p.by(to).SendFrom(netip.Addr{}, to, p.buffer); err != nil {
		return tx, fmt.Errorf("ping node %s: %w", id, err)
	}
	p.sent.add(tx, ping{peer: id, to: to, size: len(p.buffer), at: now})
	p.stats.pingsSent.Add(1)
	return tx, nil
}

// Handle takes what the socket received. It splits what the kernel has joined.
func (p *Prober) Handle(from netip.AddrPort, local netip.Addr, payload []byte, at time.Time) {
	for len(payload) > 0 {
		m, err := Parse(payload)
		if err != nil {
			if isRelay(payload) && p.c.OnRelay != nil {
				p.c.OnRelay(from, local, payload, at)
				return
			}
			if payload[0]>>6 == 0 && p.c.OnSTUN != nil {
				p.c.OnSTUN(from, local, payload, at)
			}
			return
		}
		p.message(m, payload[:m.Length], from, local, at)
		payload = payload[m.Length:]
	}
}

func (p *Prober) message(m Message, b []byte, from netip.AddrPort, local netip.Addr, at time.Time) {
	p.mu.Lock()
	q := p.peers[m.Sender]
	if q == nil {
		p.mu.Unlock()
		p.stats.strangers.Add(1)
		return
	}
	if _, err := q.codec.Decode(b); err != nil {
		p.mu.Unlock()
		p.stats.badMAC.Add(1)
		return
	}
	if m.Type == TypePong {
		e, ok := p.sent.resolve(m.Tx, m.Sender, at)
		p.mu.Unlock()
		p.pong(m, e, ok, from, at)
		return
	}
	ok := p.answer(q, m, from, local, at)
	p.mu.Unlock()
	if ok && p.c.OnPing != nil {
		p.c.OnPing(Ping{Peer: m.Sender, From: from, Local: local, Size: m.Length, At: at})
	}
}

func (p *Prober) answer(q *peer, m Message, from netip.AddrPort, local netip.Addr, at time.Time) bool {
	if !q.window.Accept(m.Epoch, m.Counter) {
		p.stats.replayed.Add(1)
		return false
	}
	if !q.pongs.AllowN(at, 1) {
		p.stats.limited.Add(1)
		return false
	}
	p.stats.pingsReceived.Add(1)
	answer := Message{Sender: p.c.Self, Tx: m.Tx, Epoch: p.c.Epoch, Observed: from}
	if m.Echo {
		answer.Length = m.Length
	}
	p.buffer = q.codec.EncodePong(p.buffer[:0], answer)
	if err := p.by(from).SendFrom(local, from, p.buffer); err != nil {
		p.c.Log.Debug("a ping could not be answered", "peer", m.Sender, "from", from, "error", err)
	} else {
		p.stats.pongsSent.Add(1)
	}
	return true
}

func (p *Prober) pong(m Message, e ping, ok bool, from netip.AddrPort, at time.Time) {
	if !ok {
		p.stats.unsolicited.Add(1)
		return
	}
	p.stats.pongsReceived.Add(1)
	if p.c.OnPong != nil {
		p.c.OnPong(Pong{Peer: m.Sender, From: from, To: e.to, Tx: m.Tx, RTT: at.Sub(e.at), Observed: m.Observed,
			Size: e.size, At: at})
	}
}

// Stats reads the counters.
func (p *Prober) Stats() ProberStats {
	s := &p.stats
	return ProberStats{
		PingsSent: s.pingsSent.Load(), PongsSent: s.pongsSent.Load(),
		PingsReceived: s.pingsReceived.Load(), PongsReceived: s.pongsReceived.Load(),
		Strangers: s.strangers.Load(), BadMAC: s.badMAC.Load(), Replayed: s.replayed.Load(),
		Limited: s.limited.Load(), Unsolicited: s.unsolicited.Load(),
	}
}
