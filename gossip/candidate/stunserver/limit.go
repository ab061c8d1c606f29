package stunserver

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"time"
)

// limiter gives every source a budget of requests. Sources share a fixed number of buckets by hash, so that no flood of
// invented sources can make it grow. IPv6 sources count by their /64, which is the least that one host holds.
type limiter struct {
	rate, burst float64 // requests per second, and at once

	mu      sync.Mutex
	seed    maphash.Seed
	buckets [4096]bucket
}

type bucket struct {
	used float64
	at   time.Time
}

func newLimiter(rate, burst float64) *limiter {
	return &limiter{rate: rate, burst: burst, seed: maphash.MakeSeed()}
}

func (l *limiter) allow(source netip.Addr, now time.Time) bool {
	source = source.Unmap()
	if source.Is6() {
		if p, err := source.WithZone("").Prefix(64); err == nil {
			source = p.Addr()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	b := &l.buckets[maphash.Comparable(l.seed, source)%uint64(len(l.buckets))]
	if elapsed := now.Sub(b.at); elapsed > 0 {
		b.used = max(0, b.used-elapsed.Seconds()*l.rate)
		b.at = now
	}
	if b.used+1 > l.burst {
		return false
	}
	b.used++
	return true
}
