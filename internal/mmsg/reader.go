package mmsg

import (
	"fmt"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// messageBytes takes the largest datagram, or the longest train. Pages that no datagram reaches are never
// touched.
const messageBytes = 64 << 10

// Datagram is one that was received.
type Datagram struct {
	Data []byte // until the next Read
	From netip.AddrPort
	To   Source
}

// Reader receives from one socket.
type Reader struct {
	raw     syscall.RawConn
	headers []unix.Mmsghdr
	iovecs  []unix.Iovec
	names   []unix.RawSockaddrInet6
	control []byte
	data    []byte
	attempt func(fd uintptr) bool
	errno   syscall.Errno

	got  int // messages that are there
	next int // the one to look at after the train
	// What is left of a train, or of a message that is none.
	train   []byte
	segment int
	current Datagram
}

// NewReader makes a Reader of a UDP socket, or of a raw one, that takes up to so many messages per system call; each may be a train.
func NewReader(c syscall.Conn, messages int) (*Reader, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("reading from a socket: %w", err)
	}
	r := &Reader{raw: raw, headers: make([]unix.Mmsghdr, messages), iovecs: make([]unix.Iovec, messages), names: make([]unix.RawSockaddrInet6, messages),
		control: make([]byte, messages*controlBytes), data: make([]byte, messages*messageBytes)}
	for i := range r.headers {
		r.iovecs[i].Base = &r.data[i*messageBytes]
		r.iovecs[i].SetLen(messageBytes)
		h := &r.headers[i].Hdr
		h.Iov = &r.iovecs[i]
		h.SetIovlen(1)
		h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		h.Control = &r.control[i*controlBytes]
	}
	r.attempt = r.receive
	return r, nil
}

// Read waits until at least one message has come. Datagrams of the former Read that Next has not returned
// are lost.
func (r *Reader) Read() error {
	r.got, r.next, r.train = 0, 0, nil
	if err := r.raw.Read(r.attempt); err != nil {
		return err
	}
	if r.errno != 0 {
		return fmt.Errorf("receiving UDP datagrams: %w", r.errno)
	}
	return nil
}

func (r *Reader) receive(fd uintptr) bool {
	for i := range r.headers {
		h := &r.headers[i].Hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(controlBytes)
	}
	// Only what is empty is waited for: the poller tells of what comes, not of what was there when a signal came between.
	n, errno := uintptr(0), unix.EINTR
	for errno == unix.EINTR {
		n, _, errno = unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&r.headers[0])), uintptr(len(r.headers)), unix.MSG_DONTWAIT, 0, 0)
	}
	if errno == unix.EAGAIN {
		return false
	}
	r.got, r.errno = int(n), errno
	if errno != 0 {
		r.got = 0
	}
	return true
}

// Next returns the next datagram that has been read, false when there is none left.
func (r *Reader) Next() (Datagram, bool) {
	for len(r.train) == 0 {
		if r.next == r.got {
			return Datagram{}, false
		}
		r.open(r.next)
		r.next++
	}
	n := min(r.segment, len(r.train))
	r.current.Data, r.train = r.train[:n:n], r.train[n:]
	return r.current, true
}

// open makes a message the train. One that was cut, or that is empty, is none.
func (r *Reader) open(i int) {
	h := &r.headers[i]
	if h.Hdr.Flags&unix.MSG_TRUNC != 0 {
		return
	}
	segment, to := parseControl(r.control[i*controlBytes:][:h.Hdr.Controllen])
	r.train = r.data[i*messageBytes:][:h.Len]
	r.segment = segment
	if segment <= 0 {
		r.segment = len(r.train)
	}
	r.current = Datagram{From: fromName(&r.names[i]), To: to}
}
