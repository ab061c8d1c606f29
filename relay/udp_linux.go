package relay

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Batched UDP as recvmmsg(2) and sendmmsg(2) have it, on connected sockets. golang.org/x/net offers the
// same, but makes an address object for each datagram and holds the buffers while it waits.

const (
	receiveMessages = 16
	// receiveBytes takes the largest datagram, or a train of equal ones when the sender uses
	// UDP_SEGMENT, as wireguard-go does. Pages that no datagram reaches are never touched.
	receiveBytes = 64 << 10
	sendMessages = 64
	// socketBuffer rides out bursts; it is a limit, not an allocation.
	socketBuffer = 4 << 20
)

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// prepareUDP asks for large buffers and trains of segments.
func prepareUDP(fd uintptr) {
	for _, force := range []int{unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, force, socketBuffer) != nil {
			plain := unix.SO_RCVBUF
			if force == unix.SO_SNDBUFFORCE {
				plain = unix.SO_SNDBUF
			}
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, plain, socketBuffer)
		}
	}
	_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1)
}

func connectUDP(fd uintptr, to netip.AddrPort) error {
	return unix.Connect(int(fd), &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().Unmap().As4()})
}

// receiveBatch holds a burst of datagrams.
type receiveBatch struct {
	headers [receiveMessages]mmsghdr
	iovecs  [receiveMessages]unix.Iovec
	control [receiveMessages][32]byte
	data    []byte
}

func newReceiveBatch() *receiveBatch {
	b := &receiveBatch{data: make([]byte, receiveMessages*receiveBytes)}
	for i := range b.headers {
		b.iovecs[i].Base = &b.data[i*receiveBytes]
		b.iovecs[i].SetLen(receiveBytes)
		b.headers[i].hdr.Iov = &b.iovecs[i]
		b.headers[i].hdr.SetIovlen(1)
		b.headers[i].hdr.Control = &b.control[i][0]
	}
	return b
}

// receive takes what is there. 0: nothing; negative: an error, which on a connected UDP socket only reports
// that WireGuard was not listening, and is cleared by having been read.
func (b *receiveBatch) receive(fd uintptr) int {
	for i := range b.headers {
		b.headers[i].hdr.SetControllen(len(b.control[i]))
	}
	n, _, errno := unix.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&b.headers[0])), receiveMessages, unix.MSG_DONTWAIT, 0, 0)
	switch errno {
	case 0:
		return int(n)
	case unix.EAGAIN:
		return 0
	default:
		return -1
	}
}

// message returns a datagram, or several of segment bytes each (the last may be shorter). One that was cut
// is none.
func (b *receiveBatch) message(i int) (data []byte, segment int) {
	h := &b.headers[i]
	if h.hdr.Flags&unix.MSG_TRUNC != 0 {
		return nil, 0
	}
	data = b.data[i*receiveBytes:][:h.n]
	control := b.control[i][:min(int(h.hdr.Controllen), len(b.control[i]))]
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

// sendBatch collects packets for one proxy's socket.
type sendBatch struct {
	to      *proxy
	n, sent int
	headers [sendMessages]mmsghdr
	iovecs  [sendMessages]unix.Iovec
	call    func(fd uintptr)
}

// proxyBatch is what a session's reader collects between two reads.
type proxyBatch = sendBatch

func (b *sendBatch) add(p []byte) bool {
	if b.n == sendMessages {
		return false
	}
	b.iovecs[b.n].Base = &p[0]
	b.iovecs[b.n].SetLen(len(p))
	b.headers[b.n].hdr.Iov = &b.iovecs[b.n]
	b.headers[b.n].hdr.SetIovlen(1)
	b.n++
	return true
}

// send writes the batch, never waits, and returns how many datagrams went.
func (b *sendBatch) send(raw syscall.RawConn) int {
	if b.call == nil {
		b.call = b.write
	}
	b.sent = 0
	if raw.Control(b.call) != nil {
		return 0
	}
	return b.sent
}

func (b *sendBatch) write(fd uintptr) {
	failures := 0
	for i := 0; i < b.n; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.headers[i])), uintptr(b.n-i), unix.MSG_DONTWAIT, 0, 0)
		if errno == 0 {
			i += int(n)
			b.sent += int(n)
			continue
		}
		// ECONNREFUSED reports an earlier datagram; this one has not been tried yet.
		if failures++; failures > 2 || !errors.Is(errno, unix.ECONNREFUSED) && !errors.Is(errno, unix.EINTR) {
			return
		}
	}
}

func (b *sendBatch) clear() {
	for i := range b.n {
		b.iovecs[i].Base = nil
	}
	b.to, b.n = nil, 0
}
