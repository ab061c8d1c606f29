package relay

import (
	"sync/atomic"
	"time"
)

const (
	// sessionCost is what a session holds beside its queue: buffers of TLS and of its reader, goroutines, the kernel's sockets not
	// counted.
	sessionCost = 96 << 10
	// leastQueue may be held by every queue, however little memory is left.
	leastQueue = 64 << 10
	// shareOfFree is the part of the free memory that one queue may hold, so that many slow readers share what there is, and
	// those who come later still find some.
	shareOfFree = 8
)

// budget counts the memory of all queues of a process.
type budget struct {
	limit int64 // 0: none
	used  atomic.Int64
}

// allow is how many bytes one queue may hold now.
func (b *budget) allow() int {
	if b.limit == 0 {
		return 1 << 62
	}
	return max(int(b.limit-b.used.Load())/shareOfFree, leastQueue)
}

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

// quota is what one client may send.
type quota struct{ bytes, packets bucket }

func (q *quota) take(now time.Duration, bytes, packets int) time.Duration {
	return max(q.bytes.take(now, float64(bytes)), q.packets.take(now, float64(packets)))
}

// pause makes a session's reader wait. The rest of what its client sends waits unread, and then at the client.
func (x *session) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-x.done:
	}
}
