package wire

import (
	"math"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// What is read slowly piles up in the kernel's buffers, megabytes that nobody drops from and that no control frame
// overtakes. Then pings are answered late, and an overloaded relay would lose its sessions all at once. So a reader
// that does not keep up grants its sender a window: how many bytes may be under way. The rest waits in the sender's own
// queue.

const (
	// meterPeriod is how often a busy session's rate is looked at.
	meterPeriod = 50 * time.Millisecond
	// unreadDelay is how long bytes may wait in the kernel for their reader.
	unreadDelay = 100 * time.Millisecond
	// unsentDelay is how long bytes may wait in the kernel for their network.
	unsentDelay = 20 * time.Millisecond

	minWindow = 64 << 10
	maxWindow = 16 << 20
	minUnsent = 32 << 10
	// maxUnsent keeps the kernel from hoarding bytes not sent yet: what waits, waits in our queue,
	// where control frames overtake and the oldest is dropped.
	maxUnsent = 128 << 10
	// unlimited is the grant of a reader that keeps up.
	unlimited = math.MaxUint64
)

// meter measures the rate of a busy session.
type meter struct {
	since time.Duration
	bytes int
}

// add counts bytes. When a period has ended it returns its rate in bytes per second; what lasted longer than
// ten periods was idle in between and tells no rate.
func (m *meter) add(now time.Duration, n int) (rate float64, ok bool) {
	m.bytes += n
	d := now - m.since
	if d < meterPeriod {
		return 0, false
	}
	rate, ok = float64(m.bytes)/d.Seconds(), d <= 10*meterPeriod
	m.since, m.bytes = now, 0
	return rate, ok
}

// window decides what a reader lets its sender have under way.
type window struct {
	size    int    // bytes; 0: as many as TCP takes
	behind  int    // periods in a row in which the reader did not keep up
	total   uint64 // bytes read
	told    uint64 // total when the sender was last told
	granted int    // the size that it was told
}

// step takes a period's rate, what all busy readers of this process had on average, the bytes that wait unread, and the
// connection's round-trip time. A reader is behind when more waits than it reads in unreadDelay, twice in a row, which
// a burst is not. All that are behind get the same window: by their own rates the slow would become slower.
func (w *window) step(rate, share float64, unread int, rtt time.Duration) {
	most := rate * unreadDelay.Seconds()
	late := unread > minWindow && float64(unread) > most
	switch {
	case !late:
		w.behind = 0
		if w.size > 0 && float64(unread) < most/4 {
			w.size += w.size / 4
		}
		if w.size > maxWindow || float64(w.size) > 8*(most+rate*rtt.Seconds()) {
			w.size = 0 // it limits nothing any more
		}
	case w.behind == 0:
		w.behind = 1
	default:
		w.size = min(max(int(share*unreadDelay.Seconds()+rate*rtt.Seconds()), minWindow), maxWindow)
	}
}

// due tells whether the sender must hear of what was read.
func (w *window) due() bool {
	if w.size == 0 {
		return w.granted != 0
	}
	return w.total-w.told >= uint64(min(w.size, w.granted)/2)
}

// Load is what a process's readers do together.
type Load struct {
	mu       sync.Mutex
	since    time.Duration
	rate     float64
	sessions int
	share    float64
}

// add takes a session's rate of a period, and returns the average of all that were busy in the last period.
func (l *Load) add(now time.Duration, rate float64) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := now - l.since; d >= 2*meterPeriod {
		l.share = 0
		if l.sessions > 0 && d < 10*meterPeriod {
			l.share = l.rate / float64(l.sessions)
		}
		l.since, l.rate, l.sessions = now, 0, 0
	}
	l.rate += rate
	l.sessions++
	return l.share
}

// unsentLimit is how many bytes the kernel may hold unsent at a rate.
func unsentLimit(rate float64) int {
	return min(max(int(rate*unsentDelay.Seconds()), minUnsent), maxUnsent)
}

// Read notes that bytes came.
func (c *Conn) Read(now time.Duration, n int) {
	c.heard.Store(int64(now))
	c.window.total += uint64(n)
	if rate, ok := c.rx.add(now, n); ok {
		if unread, rtt, ok := c.unread(); ok {
			c.window.step(rate, c.load.add(now, rate), unread, rtt)
		}
	}
	if c.window.due() {
		tell := func(b []byte) []byte { return appendWindow(b, c.window.total, uint32(c.window.size)) }
		if c.Queue.PushControl(tell) {
			c.window.told, c.window.granted = c.window.total, c.window.size
		}
	}
}

// unread asks the kernel what waits in the socket.
func (c *Conn) unread() (n int, rtt time.Duration, ok bool) {
	t, isTCP := TCP(c.TLS.NetConn())
	if !isTCP {
		return 0, 0, false
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return 0, 0, false
	}
	err = raw.Control(func(fd uintptr) {
		if n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ); err != nil || n <= minWindow && c.window.size == 0 {
			return
		}
		if info, e := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); e == nil {
			rtt = time.Duration(info.Min_rtt) * time.Microsecond
		}
	})
	return n, rtt, err == nil
}

// wrote notes that a batch was written.
func (c *Conn) wrote(now time.Duration, n int) {
	rate, ok := c.tx.add(now, n)
	if !ok {
		return
	}
	limit := unsentLimit(rate)
	if limit < c.unsent+c.unsent/4 && limit > c.unsent-c.unsent/4 {
		return
	}
	c.unsent = limit
	t, isTCP := TCP(c.TLS.NetConn())
	if !isTCP {
		return
	}
	if raw, err := t.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { // best effort: only latency would suffer
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, limit)
		})
	}
}
