// Package nfnl speaks the kernel's netfilter netlink protocol without a message object for each message, for tables of
// many thousands of entries and for packets that wait.
//
// A Conn may be read by one goroutine and written by another. Source: linux/netlink.h, linux/netfilter/nfnetlink.h.
package nfnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/mdlayher/socket"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

const (
	headerLen = unix.NLMSG_HDRLEN + 4 // with netfilter's own: family, version, resource
	nested    = unix.NLA_F_NESTED
	typeMask  = 1<<14 - 1 // NLA_TYPE_MASK
)

// Conn is a socket in one network namespace.
type Conn struct{ s *socket.Conn }

// Dial opens a socket in a network namespace, given by its file descriptor; 0 is the calling thread's. buffer is the
// receive buffer's size in bytes.
func Dial(ns, buffer int) (*Conn, error) {
	s, err := socket.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER, "netfilter",
		&socket.Config{NetNS: ns})
	if err != nil {
		return nil, fmt.Errorf("opening a netfilter netlink socket: %w", err)
	}
	if err := errors.Join(s.Bind(&unix.SockaddrNetlink{Family: unix.AF_NETLINK}), s.SetReadBuffer(buffer)); err != nil {
		s.Close()
		return nil, fmt.Errorf("preparing a netfilter netlink socket: %w", err)
	}
	return &Conn{s}, nil
}

// DialPath is Dial in the network namespace at path; "" is the calling thread's.
func DialPath(path string, buffer int) (*Conn, error) {
	if path == "" {
		return Dial(0, buffer)
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	defer ns.Close()
	return Dial(int(ns), buffer)
}

// Close ends reads and writes.
func (c *Conn) Close() error { return c.s.Close() }

// Option sets a netlink socket option.
func (c *Conn) Option(opt int) error { return c.s.SetsockoptInt(unix.SOL_NETLINK, opt, 1) }

// Deadline limits the reads that follow, and the one under way.
func (c *Conn) Deadline(t time.Time) error { return c.s.SetReadDeadline(t) }

// Send sends messages, one behind the other, in one system call.
func (c *Conn) Send(b []byte) error {
	for range Messages(b) {
		nlcount.Sent(1)
	}
	return c.s.Sendto(context.Background(), b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// Receive reads what the kernel sent at once, and nothing of other senders.
func (c *Conn) Receive(b []byte) ([]byte, error) {
	for {
		n, from, err := c.s.Recvfrom(context.Background(), b, unix.MSG_TRUNC)
		if err != nil {
			return nil, err
		}
		if fromKernel(from) {
			return whole(b, n)
		}
	}
}

// fromKernel tells the kernel's messages from those that a process sent to this socket.
func fromKernel(from unix.Sockaddr) bool {
	sa, ok := from.(*unix.SockaddrNetlink)
	return ok && sa.Pid == 0
}

// whole is a message of n bytes that was read into b, unless it did not fit.
func whole(b []byte, n int) ([]byte, error) {
	if n > len(b) {
		return nil, fmt.Errorf("the kernel's message has %d bytes, more than the buffer's %d", n, len(b))
	}
	return b[:n], nil
}

// Waiting reads what has come already, without waiting for more; nil: nothing has. A deadline that has passed, at which
// Receive gives up whatever has come, does not matter.
func (c *Conn) Waiting(b []byte) (got []byte, err error) {
	raw, err := c.s.SyscallConn()
	if err != nil {
		return nil, err
	}
	for {
		var n int
		var from unix.Sockaddr
		if controlled := raw.Control(func(fd uintptr) {
			n, from, err = unix.Recvfrom(int(fd), b, unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		}); controlled != nil {
			return nil, controlled
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil, nil
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, err
		case fromKernel(from):
			return whole(b, n)
		}
	}
}

// Message is one message as it was received.
type Message struct {
	Type, Flags uint16
	Seq         uint32
	Data        []byte // behind the netlink header
}

// Attributes is the part behind netfilter's header.
func (m Message) Attributes() []byte {
	if len(m.Data) < 4 {
		return nil
	}
	return m.Data[4:]
}

// Err is the error number of an answer, or of the end of a dump: 0 where all is well. ok is false when m is neither.
func (m Message) Err() (e unix.Errno, ok bool) {
	if m.Type != unix.NLMSG_ERROR && m.Type != unix.NLMSG_DONE || len(m.Data) < 4 {
		return 0, false
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data))), true
}

// Messages walks over what was received, to the first that is malformed.
func Messages(b []byte) iter.Seq[Message] {
	return func(yield func(Message) bool) {
		for len(b) >= unix.NLMSG_HDRLEN {
			n := binary.NativeEndian.Uint32(b)
			if n < unix.NLMSG_HDRLEN || uint64(n) > uint64(len(b)) {
				return
			}
			m := Message{binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:]),
				b[unix.NLMSG_HDRLEN:n]}
			if !yield(m) {
				return
			}
			b = b[min(len(b), align(int(n))):]
		}
	}
}

// Attributes walks over attributes of any netlink message by type, to the first that is malformed.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.NLA_HDRLEN {
			n := int(binary.NativeEndian.Uint16(b))
			if n < unix.NLA_HDRLEN || n > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&typeMask, b[unix.NLA_HDRLEN:n]) {
				return
			}
			b = b[min(len(b), align(n)):]
		}
	}
}

func align(n int) int { return (n + 3) &^ 3 }

// Writer builds messages. Numbers of attributes are big-endian, as netfilter has them.
type Writer struct {
	B     []byte
	start int
}

// Begin starts a message to a subsystem. resource is of netfilter's header.
func (w *Writer) Begin(subsystem, typ uint8, flags uint16, seq uint32, family uint8, resource uint16) {
	w.start = len(w.B)
	w.B = append(w.B, make([]byte, headerLen)...)
	b := w.B[w.start:]
	binary.NativeEndian.PutUint16(b[4:], uint16(subsystem)<<8|uint16(typ))
	binary.NativeEndian.PutUint16(b[6:], flags|unix.NLM_F_REQUEST)
	binary.NativeEndian.PutUint32(b[8:], seq)
	b[unix.NLMSG_HDRLEN] = family
	binary.BigEndian.PutUint16(b[unix.NLMSG_HDRLEN+2:], resource)
}

// End writes the length of the message that was begun last.
func (w *Writer) End() { binary.NativeEndian.PutUint32(w.B[w.start:], uint32(len(w.B)-w.start)) }

// Bytes adds an attribute.
func (w *Writer) Bytes(typ uint16, b []byte) {
	w.B = binary.NativeEndian.AppendUint16(w.B, uint16(unix.NLA_HDRLEN+len(b)))
	w.B = binary.NativeEndian.AppendUint16(w.B, typ)
	w.B = append(w.B, b...)
	for len(w.B)%4 != 0 {
		w.B = append(w.B, 0)
	}
}

// Uint8 adds an attribute.
func (w *Writer) Uint8(typ uint16, v uint8) { w.Bytes(typ, []byte{v}) }

// Uint16 adds an attribute.
func (w *Writer) Uint16(typ, v uint16) { w.Bytes(typ, []byte{byte(v >> 8), byte(v)}) }

// Uint32 adds an attribute.
func (w *Writer) Uint32(typ uint16, v uint32) {
	w.Bytes(typ, []byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// Nest adds an attribute of those that f adds.
func (w *Writer) Nest(typ uint16, f func()) {
	at := len(w.B)
	w.Bytes(typ|nested, nil)
	f()
	binary.NativeEndian.PutUint16(w.B[at:], uint16(len(w.B)-at))
}
