package server

import "time"

// sessionCost is what a session holds beside its queue: buffers of TLS and of its reader, goroutines, the kernel's
// sockets not counted.
const sessionCost = 96 << 10

// bucket limits a rate (a token bucket). Its burst is a tenth of a second, so that what waits stays little.
type bucket struct {
	rate   float64 // per second; 0: no limit
	tokens float64
	at     time.Duration
}

// take counts n and returns how long to wait before the next.
func (b *bucket) take(now time.Duration, n float64) time.Duration {
	if b.rate <= 0 {
		return 0
	}
	burst := b.rate / 10
	b.tokens = min(b.tokens+(now-b.at).Seconds()*b.rate, burst) - n
	b.at = now
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / b.rate * float64(time.Second))
}

// Limits bound what a relay does for its clients. Zero values mean the defaults.
type Limits struct {
	MaxSessions         int // 4096
	MaxStreamsPerClient int // 128
	MaxMemory           int // bytes of queues and sessions: 256 MiB
	ClientBytes         int // bytes per second that one client may send; 0: no limit
	ClientPackets       int // packets per second that one client may send; 0: no limit
}

func (l *Limits) defaults() {
	for _, v := range []struct {
		have *int
		def  int
	}{{&l.MaxSessions, 4096}, {&l.MaxStreamsPerClient, 128}, {&l.MaxMemory, 256 << 20}} {
		if *v.have <= 0 {
			*v.have = v.def
		}
	}
}

// SetLimits changes the limits while the relay works. Sessions and streams that are open stay, also where they are more
// than the new limits let in; the queues get shorter as they are filled next, and the rates of clients change at once.
func (s *Server) SetLimits(l Limits) {
	l.defaults()
	s.pool.Limit.Store(int64(l.MaxMemory))
	s.limits.Store(&l)
}

// quota is what one client may send.
type quota struct{ bytes, packets bucket }

// follow takes the rates of limits. Only the session's reader calls it.
func (q *quota) follow(l *Limits) {
	q.bytes.rate, q.packets.rate = float64(l.ClientBytes), float64(l.ClientPackets)
}

func (q *quota) take(now time.Duration, bytes, packets int) time.Duration {
	return max(q.bytes.take(now, float64(bytes)), q.packets.take(now, float64(packets)))
}

// pause makes a session's reader wait. The rest of what its client sends waits unread, and then at the client.
func (x *session) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-x.Done():
	}
}
