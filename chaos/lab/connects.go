package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// ConnectStream opens TCP connections at a steady rate, each of which is closed as soon as it stands. Its methods may
// be called concurrently.
type ConnectStream struct {
	at      unix.Sockaddr
	domain  int
	pending []attempt // of the thread that runs

	mu    sync.Mutex
	tally ping.Tally
	got   int

	stop context.CancelFunc
	done chan struct{}
}

// attempt is a connection that does not stand yet.
type attempt struct {
	fd, number int
	began      time.Time
}

// Connect starts to open a connection each time from a place to a port that is served. One that does not stand within
// ping.Patience is lost.
func (l *Lab) Connect(from string, at netip.AddrPort, every time.Duration) (*ConnectStream, error) {
	_, ns, err := l.place(from)
	if err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.Background())
	c := &ConnectStream{stop: cancel, done: make(chan struct{})}
	c.at, c.domain = socketAddress(at)
	entered := make(chan error, 1)
	go func() {
		defer close(c.done)
		// A socket belongs to the namespace in which it is made: one thread makes them all, and waits for them.
		err := fabric.In(ns, func() error { entered <- nil; c.run(run, every); return nil })
		if err != nil {
			entered <- err
		}
	}()
	if err := <-entered; err != nil {
		cancel()
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return c, nil
}

func socketAddress(at netip.AddrPort) (unix.Sockaddr, int) {
	if a := at.Addr().Unmap(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: a.As4()}, unix.AF_INET
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}, unix.AF_INET6
}

// run opens connections until ctx ends, and then waits for those that are under way.
func (c *ConnectStream) run(ctx context.Context, every time.Duration) {
	const most = 10 * time.Millisecond // between two looks at ctx
	for due := time.Now(); ; {
		now := time.Now()
		ended := ctx.Err() != nil
		if ended && len(c.pending) == 0 {
			return
		}
		if !ended && !now.Before(due) {
			c.open(now)
			if due = due.Add(every); due.Before(now) {
				due = now.Add(every) // this thread did not run for a while: what was missed is not made up for
			}
		}
		wait := most
		if !ended {
			wait = min(wait, max(0, time.Until(due)))
		}
		c.poll(wait)
	}
}

// open begins a connection. What the kernel refuses at once is lost, and the tally says so.
func (c *ConnectStream) open(now time.Time) {
	c.mu.Lock()
	number := c.tally.Sent(now)
	c.mu.Unlock()
	fd, err := unix.Socket(c.domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return
	}
	// It ends with a reset, so that nothing of it stays at either end.
	err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	if err == nil {
		err = unix.Connect(fd, c.at)
	}
	if err == nil || errors.Is(err, unix.EINPROGRESS) {
		c.pending = append(c.pending, attempt{fd, number, now})
		return
	}
	_ = unix.Close(fd)
}

// poll waits so long for a connection to stand or to fail, and takes down all that have.
func (c *ConnectStream) poll(wait time.Duration) {
	fds := make([]unix.PollFd, len(c.pending))
	for i, a := range c.pending {
		fds[i] = unix.PollFd{Fd: int32(a.fd), Events: unix.POLLOUT}
	}
	timeout := unix.NsecToTimespec(int64(wait))
	if _, err := unix.Ppoll(fds, &timeout, nil); err != nil {
		return // a signal to this thread; the next look is soon
	}
	now := time.Now()
	left := c.pending[:0]
	for i, a := range c.pending {
		ready := fds[i].Revents != 0
		if !ready && now.Sub(a.began) < ping.Patience {
			left = append(left, a)
			continue
		}
		if code, err := unix.GetsockoptInt(a.fd, unix.SOL_SOCKET, unix.SO_ERROR); ready && err == nil && code == 0 {
			c.mu.Lock()
			c.tally.Received(a.number, now)
			c.got++
			c.mu.Unlock()
		}
		_ = unix.Close(a.fd)
	}
	c.pending = left
}

// Count is how many connections stood.
func (c *ConnectStream) Count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.got
}

// Answered waits until n connections have stood since the stream began.
func (c *ConnectStream) Answered(ctx context.Context, n int) error {
	for {
		got := c.Count()
		if got >= n {
			return nil
		}
		select {
		case <-time.After(lookAtConnects):
		case <-c.done:
			return fmt.Errorf("%d of %d connections stood when the stream ended", got, n)
		case <-ctx.Done():
			return fmt.Errorf("%d of %d connections stood: %w", got, n, ctx.Err())
		}
	}
}

// lookAtConnects is how often Answered counts.
const lookAtConnects = 20 * time.Millisecond

// Broken is nil: each connection is for itself.
func (c *ConnectStream) Broken() error { return nil }

// Stop opens no more connections, waits for those that are under way, and returns the account.
func (c *ConnectStream) Stop() ping.Report {
	c.stop()
	<-c.done
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.tally.Report(time.Now().Add(ping.Patience), ping.Patience)
}
