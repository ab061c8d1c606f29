package relay

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// sessionUserTimeout ends a session whose bytes nobody acknowledges.
	sessionUserTimeout = 8 * time.Second
	// streamUserTimeout is longer: whoever reads a stream may well stop for a while.
	streamUserTimeout = 60 * time.Second
	// turnBytes are what a reader takes before others have their turn. Go's scheduler would let it go on for 10 ms, which
	// makes packets late and shares uneven where processors are scarce; with less, writers would write scraps.
	turnBytes = 64 << 10
	// A reader that has brought a destination more than aheadPackets, some three batches, gives up to aheadTurns more
	// turns to its writer. One that has been at the same write for aheadStuck waits for the network, and no turn helps it.
	aheadPackets = 128
	aheadTurns   = 32
	aheadStuck   = 20 * time.Millisecond
	// stuckWrite ends a session whose other side has stopped reading.
	stuckWrite = 10 * time.Second
)

// wire is one end of a session: a queue and the goroutine that writes it out.
type wire struct {
	conn    *tls.Conn
	q       *queue
	now     func() time.Duration
	heard   atomic.Int64 // when bytes last came
	writing atomic.Int64 // since when a Write lasts; 0: none does

	rx     meter // of the reader, as is window
	window window
	load   *load
	tx     meter // of the writer, as is unsent
	unsent int

	once sync.Once
	done chan struct{}
	why  error // set before done is closed
}

func newWire(conn *tls.Conn, q *queue, l *load, now func() time.Duration) *wire {
	w := &wire{conn: conn, q: q, load: l, now: now, unsent: maxUnsent, done: make(chan struct{})}
	w.heard.Store(int64(now()))
	tune(conn.NetConn(), sessionUserTimeout, maxUnsent)
	return w
}

// roundTrip is the least round trip of the last minutes as the kernel has seen it. Unlike an answer's it says nothing
// of how busy the processes at both ends are: a relay that has much to do for a moment is as near as before. False: the
// kernel does not tell.
func (w *wire) roundTrip() (time.Duration, bool) {
	t, ok := tcp(w.conn.NetConn())
	if !ok {
		return 0, false
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return 0, false
	}
	var info *unix.TCPInfo
	e := raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if e != nil || err != nil || info.Min_rtt == 0 || info.Min_rtt == ^uint32(0) {
		return 0, false
	}
	return time.Duration(info.Min_rtt) * time.Microsecond, true
}

// writeLoop writes batches until the wire ends.
func (w *wire) writeLoop() {
	for {
		b := w.q.take(batchBytes, w.now)
		if b == nil {
			return
		}
		w.writing.Store(int64(max(w.now(), 1)))
		records := w.q.pool.batch()
		n, err := together(w.conn.NetConn(), records, func() (int, error) { return w.conn.Write(*b) })
		w.q.pool.done(records)
		w.writing.Store(0)
		w.q.pool.done(b)
		if err != nil {
			w.end(fmt.Errorf("write: %w", err))
			return
		}
		w.wrote(w.now(), n)
		runtime.Gosched()
	}
}

// stuck tells how long the present Write has lasted.
func (w *wire) stuck(now time.Duration) time.Duration {
	if t := w.writing.Load(); t != 0 {
		return now - time.Duration(t)
	}
	return 0
}

// silent tells how long nothing has come.
func (w *wire) silent(now time.Duration) time.Duration {
	return now - time.Duration(w.heard.Load())
}

// end closes the wire at once, without waiting for a Write that hangs. The first reason stays.
func (w *wire) end(why error) {
	w.once.Do(func() {
		w.why = why
		close(w.done)
		w.q.close()
		w.conn.NetConn().Close()
	})
}

// tune sets a TCP connection's options; other connections (tests' pipes) have none.
func tune(c net.Conn, userTimeout time.Duration, unsent int) {
	t, ok := tcp(c)
	if !ok {
		return
	}
	// Best effort: a kernel that refuses an option only notices later what keepalives notice anyway.
	_ = t.SetNoDelay(true)
	_ = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second,
		Interval: 5 * time.Second, Count: 3})
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		if unsent > 0 {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsent)
		}
	})
}

var (
	errReplaced  = errors.New("replaced by a newer session of the same node")
	errKicked    = errors.New("the node is no longer a member")
	errSilent    = errors.New("nothing heard any more")
	errStuck     = errors.New("the other side stopped reading")
	errNotNeeded = errors.New("nobody needs this relay now")
	errClosed    = errors.New("closed")
)
