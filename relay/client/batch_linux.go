package client

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/relay/wire"
)

// Batched UDP by recvmmsg(2) and sendmmsg(2), on connected sockets. golang.org/x/net offers the same, but allocates an
// address for each datagram and holds the buffers while it waits.

const sendMessages = 64

func connectUDP(fd uintptr, to netip.AddrPort) error {
	return unix.Connect(int(fd), &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().Unmap().As4()})
}

// receiveBatch holds a burst of datagrams.
type receiveBatch struct {
	headers [wire.ReceiveMessages]unix.Mmsghdr
	iovecs  [wire.ReceiveMessages]unix.Iovec
	control [wire.ReceiveMessages][32]byte
	data    []byte
}

func newReceiveBatch() *receiveBatch {
	b := &receiveBatch{data: make([]byte, wire.ReceiveMessages*wire.ReceiveBytes)}
	for i := range b.headers {
		b.iovecs[i].Base = &b.data[i*wire.ReceiveBytes]
		b.iovecs[i].SetLen(wire.ReceiveBytes)
		b.headers[i].Hdr.Iov = &b.iovecs[i]
		b.headers[i].Hdr.SetIovlen(1)
		b.headers[i].Hdr.Control = &b.control[i][0]
	}
	return b
}

// receive reads the datagrams that have arrived. 0: there are none; negative: an error. On a connected UDP socket an
// error only reports that WireGuard was not listening, and reading it clears it.
func (b *receiveBatch) receive(fd uintptr) int {
	for i := range b.headers {
		b.headers[i].Hdr.SetControllen(len(b.control[i]))
	}
	n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&b.headers[0])), wire.ReceiveMessages,
		unix.MSG_DONTWAIT, 0, 0)
	switch errno {
	case 0:
		return int(n)
	case unix.EAGAIN:
		return 0
	default:
		return -1
	}
}

// message returns a datagram, or several of segment bytes each (the last may be shorter). A truncated one is left out.
func (b *receiveBatch) message(i int) (data []byte, segment int) {
	h := &b.headers[i]
	if h.Hdr.Flags&unix.MSG_TRUNC != 0 {
		return nil, 0
	}
	data = b.data[i*wire.ReceiveBytes:][:h.Len]
	control := b.control[i][:min(int(h.Hdr.Controllen), len(b.control[i]))]
	if len(control) >= unix.CmsgLen(2) {
		c := (*unix.Cmsghdr)(unsafe.Pointer(&control[0]))
		if c.Level == unix.IPPROTO_UDP && c.Type == unix.UDP_GRO {
			if s := int(binary.NativeEndian.Uint16(control[unix.CmsgLen(0):])); s > 0 {
				return data, s
			}
		}
	}
	return data, len(data)
}

// maxTrain and maxTrainBytes bound one message with UDP_SEGMENT: the kernel's limits of segments, and of a datagram.
const (
	maxTrain      = 64
	maxTrainBytes = 65000
)

// sendBatch collects packets for one proxy's socket. Successive packets of equal size are sent as one message, which
// the kernel splits again (UDP_SEGMENT), unless plain says that the kernel cannot.
type sendBatch struct {
	to    *proxy
	plain *atomic.Bool

	packets  int // iovecs in use
	messages int // headers in use
	segment  int // size of the packets in the last message
	bytes    int // in the last message
	ended    bool
	sent     int
	headers  [sendMessages]unix.Mmsghdr
	iovecs   [sendMessages]unix.Iovec
	control  [sendMessages][24]byte
	call     func(fd uintptr)
}

// add adds a packet, which must stay in memory until send. It returns false if the batch is full.
func (b *sendBatch) add(p []byte) bool {
	if b.packets == sendMessages {
		return false
	}
	v := &b.iovecs[b.packets]
	v.Base = &p[0]
	v.SetLen(len(p))
	b.packets++
	if b.messages > 0 && !b.ended && len(p) <= b.segment && b.bytes+len(p) <= maxTrainBytes && !b.plain.Load() {
		h := &b.headers[b.messages-1].Hdr
		h.SetIovlen(int(h.Iovlen) + 1)
		b.bytes += len(p)
		b.ended = len(p) < b.segment || int(h.Iovlen) == maxTrain // only the last packet may be shorter
		return true
	}
	b.headers[b.messages].Hdr = unix.Msghdr{Iov: v}
	b.headers[b.messages].Hdr.SetIovlen(1)
	b.messages++
	b.segment, b.bytes, b.ended = len(p), len(p), false
	return true
}

// send writes the batch without blocking, and returns how many packets were sent.
func (b *sendBatch) send(raw syscall.RawConn) int {
	if b.call == nil {
		b.call = b.write
	}
	b.sent = 0
	for i := range b.messages {
		h := &b.headers[i].Hdr
		if h.Iovlen > 1 {
			c := (*unix.Cmsghdr)(unsafe.Pointer(&b.control[i][0]))
			c.Level, c.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
			c.SetLen(unix.CmsgLen(2))
			binary.NativeEndian.PutUint16(b.control[i][unix.CmsgLen(0):], uint16(h.Iov.Len))
			h.Control = &b.control[i][0]
			h.SetControllen(unix.CmsgSpace(2))
		}
	}
	if raw.Control(b.call) != nil {
		return 0
	}
	return b.sent
}

func (b *sendBatch) write(fd uintptr) {
	failures := 0
	for i := 0; i < b.messages; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.headers[i])), uintptr(b.messages-i),
			unix.MSG_DONTWAIT, 0, 0)
		if errno == 0 {
			for ; n > 0; n-- {
				b.sent += int(b.headers[i].Hdr.Iovlen)
				i++
			}
			continue
		}
		failures++
		switch {
		case failures > 3:
			return
		case errno == unix.ECONNREFUSED, errno == unix.EINTR:
			// ECONNREFUSED reports an earlier datagram; this one has not been tried yet.
		case b.headers[i].Hdr.Iovlen > 1 && (errno == unix.EINVAL || errno == unix.EIO || errno == unix.ENOPROTOOPT ||
			errno == unix.EOPNOTSUPP):
			b.plain.Store(true)
			i = b.flatten(i)
		default:
			return
		}
	}
}

// flatten makes one message of each packet that is not sent yet, and returns the first of them.
func (b *sendBatch) flatten(from int) int {
	first := 0
	for i := range from {
		first += int(b.headers[i].Hdr.Iovlen)
	}
	for i := first; i < b.packets; i++ {
		b.headers[i].Hdr = unix.Msghdr{Iov: &b.iovecs[i]}
		b.headers[i].Hdr.SetIovlen(1)
	}
	// Messages before the first are sent; their headers are not read again.
	b.messages = b.packets
	return first
}

func (b *sendBatch) clear() {
	for i := range b.packets {
		b.iovecs[i].Base = nil
	}
	b.to, b.packets, b.messages = nil, 0, 0
}
