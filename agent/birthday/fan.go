package birthday

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// fan is many UDP sockets, each with its own port, and one goroutine that reads them all.
type fan struct {
	mark   uint32
	poll   int
	wake   int // eventfd that ends the goroutine
	handle func(i int, from netip.AddrPort, b []byte, at time.Time)
	done   chan struct{}

	mu    sync.Mutex // guards what follows, so that no closed descriptor is used
	fds   []int      // -1: closed
	ports []uint16
	shut  bool
}

const (
	receiveBuffer = 4 << 10 // bytes; a socket receives only a packet or two
	datagramMax   = 1500
	closing       = -1 // in an epoll event: the wake-up
)

// openFan opens no socket yet. handle runs on the fan's goroutine and must not block; b is valid until it returns.
func openFan(mark uint32, handle func(i int, from netip.AddrPort, b []byte, at time.Time)) (*fan, error) {
	f := &fan{mark: mark, poll: -1, wake: -1, handle: handle, done: make(chan struct{})}
	var err error
	if f.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err == nil {
		if f.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
			err = unix.EpollCtl(f.poll, unix.EPOLL_CTL_ADD, f.wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: closing})
		}
	}
	if err != nil {
		f.release()
		return nil, fmt.Errorf("open sockets to predict ports with: %w", err)
	}
	go f.read()
	return f, nil
}

// grow opens sockets until there are n.
func (f *fan) grow(n int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.fds) < n && !f.shut {
		fd, port, err := f.socket()
		if err != nil {
			return fmt.Errorf("open socket %d of %d to predict ports with: %w", len(f.fds)+1, n, err)
		}
		if err := unix.EpollCtl(f.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN,
			Fd: int32(len(f.fds))}); err != nil {
			unix.Close(fd)
			return fmt.Errorf("watch socket %d of %d to predict ports with: %w", len(f.fds)+1, n, err)
		}
		f.fds, f.ports = append(f.fds, fd), append(f.ports, port)
	}
	return nil
}

func (f *fan) socket() (fd int, port uint16, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, 0, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if f.mark != 0 {
		if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(f.mark)); err != nil {
			return -1, 0, fmt.Errorf("set mark: %w", err)
		}
	}
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer); err != nil {
		return -1, 0, fmt.Errorf("set receive buffer: %w", err)
	}
	if err = unix.Bind(fd, &unix.SockaddrInet4{}); err != nil {
		return -1, 0, err
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return -1, 0, err
	}
	return fd, uint16(name.(*unix.SockaddrInet4).Port), nil
}

// size is how many sockets were opened.
func (f *fan) size() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.fds)
}

// port is the local port of a socket.
func (f *fan) port(i int) uint16 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ports[i]
}

// errClosed is returned for a socket that is not open any more.
var errClosed = errors.New("the socket is closed")

// send sends from a socket; it never blocks.
func (f *fan) send(i int, to netip.AddrPort, b []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i >= len(f.fds) || f.fds[i] < 0 {
		return errClosed
	}
	return unix.Sendto(f.fds[i], b, unix.MSG_DONTWAIT, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
}

// socketOf is one of the sockets as probe.Sender.
type socketOf struct {
	f *fan
	i int
}

// SendFrom sends from the socket; the kernel chooses the source address.
func (s socketOf) SendFrom(_ netip.Addr, to netip.AddrPort, b []byte) error {
	return s.f.send(s.i, to, b)
}

// keep closes all sockets but one.
func (f *fan) keep(i int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k := range f.fds {
		if k != i {
			f.drop(k)
		}
	}
}

func (f *fan) drop(i int) {
	if f.fds[i] >= 0 {
		unix.Close(f.fds[i])
		f.fds[i] = -1
	}
}

// close closes everything and waits for the goroutine. It may be called twice.
func (f *fan) close() {
	f.mu.Lock()
	if !f.shut {
		f.shut = true
		for i := range f.fds {
			f.drop(i)
		}
		_, _ = unix.Write(f.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	f.mu.Unlock()
	<-f.done
}

func (f *fan) release() {
	for _, fd := range []int{f.poll, f.wake} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (f *fan) read() {
	defer close(f.done)
	defer f.release()
	events := make([]unix.EpollEvent, 64)
	b := make([]byte, datagramMax)
	for {
		n, err := unix.EpollWait(f.poll, events, -1)
		if err != nil && err != unix.EINTR {
			return
		}
		at := time.Now()
		for _, e := range events[:max(n, 0)] {
			if e.Fd == closing {
				return
			}
			f.drain(int(e.Fd), b, at)
		}
	}
}

// drain reads a socket's packets, and discards the errors that earlier packets caused.
func (f *fan) drain(i int, b []byte, at time.Time) {
	for {
		f.mu.Lock()
		if f.fds[i] < 0 {
			f.mu.Unlock()
			return
		}
		n, from, err := unix.Recvfrom(f.fds[i], b, unix.MSG_DONTWAIT)
		f.mu.Unlock()
		if err == unix.EAGAIN {
			return
		}
		a, ok := from.(*unix.SockaddrInet4)
		if err != nil || !ok {
			return // the socket stays readable if there is more
		}
		f.handle(i, netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), b[:n], at)
	}
}
