package client_test

import (
	"sync"
	"time"
)

// silence measures the longest time without a packet.
type silence struct {
	mu    sync.Mutex
	n     int
	last  time.Time
	worst time.Duration
}

func (s *silence) heard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if !s.last.IsZero() {
		s.worst = max(s.worst, now.Sub(s.last))
	}
	s.last = now
	s.n++
}

func (s *silence) reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last, s.worst = time.Now(), 0
}

func (s *silence) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

func (s *silence) since() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Since(s.last)
}

func (s *silence) longest() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.worst, time.Since(s.last))
}
