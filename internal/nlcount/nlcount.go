package nlcount

import (
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// Counts are what the process has sent and heard since its start.
type Counts struct {
	Requests      uint64
	Notifications uint64
}

var (
	sent, heard atomic.Uint64
	library     sequence
)

// Sent counts requests.
func Sent(n int) { sent.Add(uint64(n)) }

// Heard counts notifications.
func Heard(n int) { heard.Add(uint64(n)) }

// One counts the request that the caller makes with h.
func One(h *netlink.Handle) *netlink.Handle {
	Sent(1)
	return h
}

// Read reads the counters.
func Read() Counts {
	return Counts{Requests: sent.Load() + library.read(), Notifications: heard.Load()}
}

// sequence follows the number that vishvananda/netlink gives to each request of its package's functions. Only a new
// request shows it, which takes a number and is never sent.
type sequence struct {
	mu    sync.Mutex
	last  uint32
	total uint64
}

func (s *sequence) read() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := nl.NewNetlinkRequest(0, 0).Seq
	s.total += uint64(now - s.last - 1) // without the number just taken; wraps as the number does
	s.last = now
	return s.total
}
