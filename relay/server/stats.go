package server

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Stats is a snapshot of a relay's counters.
type Stats struct {
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
func (s *Server) Stats() Stats {
	s.mu.RLock()
	sessions, dropped := len(s.sessions), s.counters.dropped.Load()
	for _, x := range s.sessions {
		dropped += x.Queue.Dropped()
	}
	s.mu.RUnlock()
	st := Stats{
		Sessions:   sessions,
		Packets:    s.counters.packets.Load(),
		Bytes:      s.counters.bytes.Load(),
		Dropped:    dropped,
		Unroutable: s.counters.unroutable.Load(),
		Replaced:   s.counters.replaced.Load(),
		Refused:    s.counters.refused.Load(),
		Rate:       s.rate.now.Load(),
		Limited:    s.counters.limited.Load(),
		Memory:     s.pool.Used.Load(), MaxMemory: s.pool.Limit.Load(),
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
			ID: x.id, Address: x.TLS.RemoteAddr().String(), Since: x.began, RxPackets: x.rxPackets.Load(),
			RxBytes:   x.rxBytes.Load(),
			TxPackets: x.Queue.Sent(), TxBytes: x.Queue.SentBytes(), Rate: x.rate.now.Load(), Dropped: x.Queue.Dropped(),
			Limited: x.limited.Load(),
		}
		c.QueueBytes, c.Packets, c.Window = x.Queue.Held()
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b ClientStats) int { return a.ID.Compare(b.ID) })
	return all
}

// Limits are the bounds that a relay runs with.
func (s *Server) Limits() Config { return s.cfg }
