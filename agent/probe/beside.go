package probe

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// PingBy pings a peer from another socket than WireGuard's. What comes back to that socket goes to Authenticate.
func (p *Prober) PingBy(s Sender, id identity.ID, to netip.AddrPort) (TxID, error) {
	tx := NewTxID()
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.peers[id]
	if q == nil {
		return tx, fmt.Errorf("ping node %s: %w", id, ErrUnknownPeer)
	}
	q.counter++
	p.buffer = q.codec.EncodePing(p.buffer[:0], Message{Sender: p.c.Self, Tx: tx, Epoch: p.c.Epoch, Counter: q.counter})
	now := time.Now()
	if err := s.SendFrom(netip.Addr{}, to, p.buffer); err != nil {
		return tx, fmt.Errorf("ping node %s at %s: %w", id, to, err)
	}
	p.sent.add(tx, ping{peer: id, to: to, size: len(p.buffer), at: now})
	p.stats.pingsSent.Add(1)
	return tx, nil
}

// SetDetour has pings and pongs to an address leave by another socket than WireGuard's; nil ends that. What comes back
// to that socket goes to Handle.
func (p *Prober) SetDetour(to netip.AddrPort, s Sender) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s == nil {
		delete(p.detours, to)
		return
	}
	if p.detours == nil {
		p.detours = map[netip.AddrPort]Sender{}
	}
	p.detours[to] = s
}

// by is the socket that leads to an address.
func (p *Prober) by(to netip.AddrPort) Sender {
	if s := p.detours[to]; s != nil {
		return s
	}
	return p.c.Socket
}

// Authenticate proves that a peer wrote the ping or pong at the start of b, which came to another socket than
// WireGuard's. A copy of a ping counts no more than an answer that nobody waits for. Nothing is answered: that is the
// caller's.
func (p *Prober) Authenticate(b []byte, at time.Time) (Message, bool) {
	m, err := Parse(b)
	if err != nil {
		return m, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	q := p.peers[m.Sender]
	if q == nil {
		p.stats.strangers.Add(1)
		return m, false
	}
	if _, err := q.codec.Decode(b[:m.Length]); err != nil {
		p.stats.badMAC.Add(1)
		return m, false
	}
	if m.Type == TypePong {
		if _, ok := p.sent.resolve(m.Tx, m.Sender, at); !ok {
			p.stats.unsolicited.Add(1)
			return m, false
		}
		p.stats.pongsReceived.Add(1)
		return m, true
	}
	if !q.window.Accept(m.Epoch, m.Counter) {
		p.stats.replayed.Add(1)
		return m, false
	}
	p.stats.pingsReceived.Add(1)
	return m, true
}
