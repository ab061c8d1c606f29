package wire

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
	// AcceptTimeout is how long an offered stream waits for its other end.
	AcceptTimeout = 10 * time.Second
	// TurnBytes are what a reader takes before others have their turn. Go's scheduler would let it go on for 10 ms, which
	// makes packets late and shares uneven where processors are scarce; with less, writers would write scraps.
	TurnBytes = 64 << 10
	// StuckWrite ends a session whose other side has stopped reading.
	StuckWrite = 10 * time.Second
)

// Conn is one end of a session: a queue and the goroutine that writes it out.
type Conn struct {
	TLS   *tls.Conn
	Queue *Queue // what is to be sent

	now     func() time.Duration
	heard   atomic.Int64 // when bytes last came
	writing atomic.Int64 // since when a Write lasts; 0: none does

	rx     meter // of the reader, as is window
	window window
	load   *Load
	tx     meter // of the writer, as is unsent
	unsent int

	once sync.Once
	done chan struct{}
	why  error // set before done is closed
}

// NewConn makes this end of a session over a TLS connection whose handshake is complete. l is shared by all sessions
// of a process, and now is their clock. The caller runs WriteLoop.
func NewConn(conn *tls.Conn, q *Queue, l *Load, now func() time.Duration) *Conn {
	c := &Conn{TLS: conn, Queue: q, load: l, now: now, unsent: maxUnsent, done: make(chan struct{})}
	c.heard.Store(int64(now()))
	tune(conn.NetConn(), sessionUserTimeout, maxUnsent)
	return c
}

// RoundTrip is the least round trip of the last minutes as the kernel has seen it. Unlike an answer's it says nothing
// of how busy the processes at both ends are: a relay that has much to do for a moment is as near as before. False: the
// kernel does not tell.
func (c *Conn) RoundTrip() (time.Duration, bool) {
	t, ok := TCP(c.TLS.NetConn())
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

// WriteLoop writes batches until the session ends.
func (c *Conn) WriteLoop() {
	for {
		b := c.Queue.next(batchBytes, c.now)
		if b == nil {
			return
		}
		c.writing.Store(int64(max(c.now(), 1)))
		records := c.Queue.pool.batch()
		n, err := together(c.TLS.NetConn(), records, func() (int, error) { return c.TLS.Write(*b) })
		c.Queue.pool.done(records)
		c.writing.Store(0)
		c.Queue.pool.done(b)
		if err != nil {
			c.End(fmt.Errorf("write: %w", err))
			return
		}
		c.wrote(c.now(), n)
		runtime.Gosched()
	}
}

// Done is closed when the session ends.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Why is the reason of the end, once Done is closed.
func (c *Conn) Why() error { return c.why }

// Stuck tells how long the present Write has lasted.
func (c *Conn) Stuck(now time.Duration) time.Duration {
	if t := c.writing.Load(); t != 0 {
		return now - time.Duration(t)
	}
	return 0
}

// Silent tells how long nothing has come.
func (c *Conn) Silent(now time.Duration) time.Duration {
	return now - time.Duration(c.heard.Load())
}

// End closes the session at once, without waiting for a Write that hangs. The first reason stays.
func (c *Conn) End(why error) {
	c.once.Do(func() {
		c.why = why
		close(c.done)
		c.Queue.close()
		c.TLS.NetConn().Close()
	})
}

// TuneStream sets the options of a TCP connection that carries one end of a stream.
func TuneStream(c net.Conn) { tune(c, streamUserTimeout, 0) }

// tune sets a TCP connection's options; other connections (tests' pipes) have none.
func tune(c net.Conn, userTimeout time.Duration, unsent int) {
	t, ok := TCP(c)
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
	// ErrClosed is why a session, a pool or a server that was closed does nothing more.
	ErrClosed = errors.New("closed")
	// ErrNotHere is why a relay does not join a stream.
	ErrNotHere = errors.New("the peer has no session with this relay")
)
