package mmsg

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	batchMessages = 128
	// The kernel's limits for a train (UDP_MAX_SEGMENTS, before Linux 6.9), and for a datagram of either family.
	trainSegments = 64
	trainBytes    = 65535 - 20 - 8
)

// Writer sends by one socket.
type Writer struct {
	raw   syscall.RawConn
	six   bool
	plain atomic.Bool // no trains: the kernel or the network card cannot cut them
	pool  sync.Pool
}

// NewWriter makes a Writer for a socket of one family.
func NewWriter(c *net.UDPConn) (*Writer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("writing to %s: %w", c.LocalAddr(), err)
	}
	w := &Writer{raw: raw, six: isIPv6(c)}
	w.pool.New = func() any { return newBatch(w) }
	err = raw.Control(func(fd uintptr) {
		_, err := unix.GetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT)
		w.plain.Store(err != nil)
	})
	return w, err
}

// Write sends packets to one destination of the socket's family, in order, and returns how many went before
// the error. Packets of one size that follow each other go as trains.
func (w *Writer) Write(packets [][]byte, to netip.AddrPort, from Source) (int, error) {
	b := w.pool.Get().(*batch)
	defer b.free()
	length := setName(&b.name, to, w.six)
	sent, plain := 0, w.plain.Load()
	for sent < len(packets) {
		b.fill(packets[sent:], length, from, plain)
		err := w.raw.Write(b.attempt)
		if err == nil && b.errno != 0 {
			err = b.errno
		}
		sent += b.sent
		if err == nil {
			continue
		}
		if plain || !b.stuckAtTrain() {
			return sent, fmt.Errorf("sending to %s: %w", to, err)
		}
		switch b.errno {
		case unix.EIO: // the card computes no checksums; it will not learn it
			w.plain.Store(true)
		case unix.EINVAL, unix.EMSGSIZE: // larger than this path's MTU: singly they can be fragmented
		default:
			return sent, fmt.Errorf("sending to %s: %w", to, err)
		}
		plain = true
	}
	return sent, nil
}

// batch is one sendmmsg.
type batch struct {
	pool     *sync.Pool
	six      bool
	headers  [batchMessages]unix.Mmsghdr
	iovecs   [batchMessages]unix.Iovec
	control  []byte
	name     unix.RawSockaddrInet6
	attempt  func(fd uintptr) bool
	messages int
	done     int // messages that went
	sent     int // packets in them
	packets  int
	errno    syscall.Errno
}

func newBatch(w *Writer) *batch {
	b := &batch{pool: &w.pool, six: w.six, control: make([]byte, batchMessages*controlBytes)}
	b.attempt = b.send
	return b
}

func (b *batch) free() {
	clear(b.iovecs[:b.packets])
	b.packets = 0
	b.pool.Put(b)
}

// fill puts as many packets into messages as there is room for.
func (b *batch) fill(packets [][]byte, nameLength uint32, from Source, plain bool) {
	packets = packets[:min(len(packets), batchMessages)]
	b.messages, b.done, b.sent, b.packets = 0, 0, 0, len(packets)
	segment, bytes, ended := 0, 0, true
	for i, p := range packets {
		if len(p) > 0 {
			b.iovecs[i].Base = &p[0]
		}
		b.iovecs[i].SetLen(len(p))
		if !ended && len(p) > 0 && len(p) <= segment && bytes+len(p) <= trainBytes {
			h := &b.headers[b.messages-1].Hdr
			h.SetIovlen(int(h.Iovlen) + 1)
			bytes += len(p)
			ended = len(p) < segment || int(h.Iovlen) == trainSegments // a shorter one can only be the last
			continue
		}
		b.close(segment, from)
		h := &b.headers[b.messages].Hdr
		*h = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&b.name)), Namelen: nameLength, Iov: &b.iovecs[i]}
		h.SetIovlen(1)
		b.messages++
		segment, bytes, ended = len(p), len(p), plain || len(p) == 0
	}
	b.close(segment, from)
}

// close writes the control messages of the last message.
func (b *batch) close(segment int, from Source) {
	if b.messages == 0 {
		return
	}
	h := &b.headers[b.messages-1].Hdr
	c := addSource(b.control[(b.messages-1)*controlBytes:][:0:controlBytes], from, b.six)
	if h.Iovlen > 1 {
		c = addControl(c, unix.IPPROTO_UDP, unix.UDP_SEGMENT, uint16(segment))
	}
	if len(c) > 0 {
		h.Control = &c[0]
		h.SetControllen(len(c))
	}
}

// send writes until all are gone, one fails, or the socket is full.
func (b *batch) send(fd uintptr) bool {
	b.errno = 0
	for b.done < b.messages {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.headers[b.done])),
			uintptr(b.messages-b.done), unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			for range n {
				b.sent += int(b.headers[b.done].Hdr.Iovlen)
				b.done++
			}
		case unix.EAGAIN:
			return false
		case unix.EINTR:
		default:
			b.errno = errno
			return true
		}
	}
	return true
}

// stuckAtTrain tells whether the message that failed is a train.
func (b *batch) stuckAtTrain() bool {
	return b.done < b.messages && b.headers[b.done].Hdr.Iovlen > 1
}
