package mmsg

import (
	"fmt"
	"net/netip"
	"sync"
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
	memory  *Memory // nil: *space is always there
	*space          // of a Memory: nil while nothing is there
	attempt func(fd uintptr) bool
	errno   syscall.Errno

	got  int // messages that are there
	next int // the one to look at after the train
	// What is left of a train, or of a message that is none.
	train   []byte
	segment int
	current Datagram
}

// space is what messages are received into.
type space struct {
	headers []unix.Mmsghdr
	iovecs  []unix.Iovec
	names   []unix.RawSockaddrInet6
	control []byte
	data    []byte
}

func newSpace(messages int) *space {
	s := &space{headers: make([]unix.Mmsghdr, messages), iovecs: make([]unix.Iovec, messages),
		names:   make([]unix.RawSockaddrInet6, messages),
		control: make([]byte, messages*controlBytes), data: make([]byte, messages*messageBytes)}
	for i := range s.headers {
		s.iovecs[i].Base = &s.data[i*messageBytes]
		s.iovecs[i].SetLen(messageBytes)
		h := &s.headers[i].Hdr
		h.Iov = &s.iovecs[i]
		h.SetIovlen(1)
		h.Name = (*byte)(unsafe.Pointer(&s.names[i]))
		h.Control = &s.control[i*controlBytes]
	}
	return s
}

// Memory lends many Readers what they receive into, for as long as something is there: one that waits has none. It may
// be used by several goroutines.
type Memory struct{ pool sync.Pool }

// NewMemory makes a Memory for Readers that take up to so many messages per system call.
func NewMemory(messages int) *Memory {
	m := &Memory{}
	m.pool.New = func() any { return newSpace(messages) }
	return m
}

// NewReader makes a Reader as the function of this name does, with memory that is lent.
func (m *Memory) NewReader(c syscall.Conn) (*Reader, error) { return newReader(c, m, nil) }

// NewReader makes a Reader of a UDP socket, or of a raw one, that takes up to so many messages per system call; each
// may be a train.
func NewReader(c syscall.Conn, messages int) (*Reader, error) {
	return newReader(c, nil, newSpace(messages))
}

func newReader(c syscall.Conn, m *Memory, s *space) (*Reader, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("reading from a socket: %w", err)
	}
	r := &Reader{raw: raw, memory: m, space: s}
	r.attempt = r.receive
	return r, nil
}

// giveBack returns memory that was lent.
func (r *Reader) giveBack() {
	if r.memory != nil && r.space != nil {
		r.memory.pool.Put(r.space)
		r.space = nil
	}
}

// Read waits until at least one message has come. Datagrams of the former Read that Next has not returned
// are lost.
func (r *Reader) Read() error {
	r.got, r.next, r.train = 0, 0, nil
	r.current = Datagram{}
	if err := r.raw.Read(r.attempt); err != nil {
		r.giveBack()
		return err
	}
	if r.errno != 0 {
		return fmt.Errorf("receiving UDP datagrams: %w", r.errno)
	}
	return nil
}

func (r *Reader) receive(fd uintptr) bool {
	if r.space == nil {
		r.space = r.memory.pool.Get().(*space)
	}
	for i := range r.headers {
		h := &r.headers[i].Hdr
		h.Namelen = unix.SizeofSockaddrInet6
		h.SetControllen(controlBytes)
	}
	// Only what is empty is waited for: the poller tells of what comes, not of what was there when a signal came between.
	n, errno := uintptr(0), unix.EINTR
	for errno == unix.EINTR {
		n, _, errno = unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&r.headers[0])), uintptr(len(r.headers)),
			unix.MSG_DONTWAIT, 0, 0)
	}
	if errno == unix.EAGAIN {
		r.giveBack()
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
