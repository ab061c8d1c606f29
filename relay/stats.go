package relay

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// ServerStats is a snapshot of a relay's counters.
type ServerStats struct {
	Sessions, Streams   int
	Packets, Bytes      uint64 // forwarded
	Dropped             uint64 // by full or slow destinations
	Unroutable          uint64 // for nodes with no session here
	Replaced, Refused   uint64 // sessions
	Limited             uint64 // times that a client had to wait for its rate
	Rate                uint64 // bytes per second forwarded lately
	Memory, MaxMemory   int64  // bytes of queues and sessions
	StreamsTotal        uint64
	StreamBytes         uint64
	PendingStreamOffers int
}

// ClientStats tells how one client of a relay does.
type ClientStats struct {
	ID                  identity.ID
	Address             string // where it comes from
	Since               time.Time
	RxPackets, RxBytes  uint64 // from it, forwarded
	TxPackets, TxBytes  uint64 // to it
	Rate                uint64 // bytes per second both ways lately
	Dropped             uint64 // packets to it: it reads too slowly, or others send too much
	QueueBytes, Packets int    // that wait for it
	Limited             uint64 // times that it had to wait for its rate
	Window              uint64 // bytes that it lets be under way to it; 0: as many as TCP takes
}

// rateMeter tells a counter's rate, per second, over the last period of whoever updates it.
type rateMeter struct {
	at   time.Duration
	last uint64
	now  atomic.Uint64
}

func (m *rateMeter) update(now time.Duration, count uint64) {
	if d := now - m.at; d > 0 {
		m.now.Store(uint64(float64(count-m.last) / d.Seconds()))
	}
	m.at, m.last = now, count
}

// Stats returns the counters.
func (s *Server) Stats() ServerStats {
	s.mu.RLock()
	sessions, dropped := len(s.sessions), s.counters.dropped.Load()
	for _, x := range s.sessions {
		dropped += x.q.dropped.Load()
	}
	s.mu.RUnlock()
	st := ServerStats{
		Sessions:   sessions,
		Packets:    s.counters.packets.Load(),
		Bytes:      s.counters.bytes.Load(),
		Dropped:    dropped,
		Unroutable: s.counters.unroutable.Load(),
		Replaced:   s.counters.replaced.Load(),
		Refused:    s.counters.refused.Load(),
		Rate:       s.rate.now.Load(),
		Limited:    s.counters.limited.Load(),
		Memory:     s.pool.used.Load(), MaxMemory: s.pool.limit.Load(),
	}
	s.streams.stats(&st)
	return st
}

// Clients lists the sessions, by node.
func (s *Server) Clients() []ClientStats {
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := make([]ClientStats, 0, len(s.sessions))
	for _, x := range s.sessions {
		c := ClientStats{
			ID: x.id, Address: x.conn.RemoteAddr().String(), Since: x.began, RxPackets: x.rxPackets.Load(),
			RxBytes:   x.rxBytes.Load(),
			TxPackets: x.q.sent.Load(), TxBytes: x.q.sentBytes.Load(), Rate: x.rate.now.Load(), Dropped: x.q.dropped.Load(),
			Limited: x.limited.Load(),
		}
		c.QueueBytes, c.Packets, c.Window = x.q.held()
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b ClientStats) int { return a.ID.Compare(b.ID) })
	return all
}

// held tells what waits, and the window that limits what is taken.
func (q *queue) held() (bytes, packets int, window uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	bytes = len(q.control)
	for i := range q.lanes {
		bytes += q.lanes[i].bytes
		packets += q.lanes[i].packets
	}
	if q.granted != unlimited {
		window = q.granted - min(q.taken, q.granted)
	}
	return bytes, packets, window
}

// Limits are the bounds that a relay runs with.
func (s *Server) Limits() ServerConfig { return s.cfg }

// State is a word for how a relay's session does: connected, suspect, failing, dialing or standby.
func (s RelayStats) State() string {
	switch {
	case s.Suspect:
		return "suspect"
	case s.Connected:
		return "connected"
	case s.LastError != "":
		return "failing"
	case s.Need != string(needNone):
		return "dialing"
	}
	return string(needNone)
}

// users counts the peers that each relay carries to.
func (p *Pool) users() map[identity.ID]int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	users := map[identity.ID]int{}
	for _, s := range p.peers {
		if c := s.current.Load(); c != nil {
			users[c.relay.ID]++
		}
	}
	return users
}

// byNeed puts the sessions in use first, and of these the nearest.
func byNeed(a, b RelayStats) int {
	rank := map[string]int{string(needWarm): 1, string(needDemand): 2, string(needTrial): 3, string(needNone): 4}
	return cmp.Or(cmp.Compare(rank[a.Need], rank[b.Need]), cmp.Compare(a.RTT, b.RTT),
		slices.Compare(a.Relay[:], b.Relay[:]))
}
