package udp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/relay/wire"
)

// port is one reserved port: a socket of its own, so that no other program gets it.
type port struct {
	number uint16
	conn   *net.UDPConn
	raw    syscall.RawConn
	ipv6   bool // the socket speaks both families, IPv4 in mapped form
	// way is where this process forwards what comes here; nil: the kernel does, or nobody.
	way atomic.Pointer[way]
}

// way leads from one end of a pair to the other.
type way struct {
	from netip.AddrPort // who is at this end: from others nothing is taken
	out  *port          // the other end's port
	to   sockAddress    // where the other end is
	src  []byte         // control message with the address to send from
}

// openPort takes the next free port of the range.
func (u *Relay) openPort(p *pair, side int) (*port, error) {
	var last error
	for range int(u.cfg.Last) - int(u.cfg.First) + 1 {
		n := u.next
		if u.next++; u.next > u.cfg.Last || u.next == 0 {
			u.next = u.cfg.First
		}
		if u.cfg.Avoid != nil && u.cfg.Avoid(n) {
			last = errors.New("a former run's flows still use them")
			continue
		}
		l, err := u.listen(n)
		if err == nil {
			return l, nil
		}
		last = err
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("ports %d-%d: %w", u.cfg.First, u.cfg.Last, last)
}

func (u *Relay) listen(n uint16) (l *port, err error) {
	open := func() {
		lc := net.ListenConfig{Control: u.cfg.Control}
		var c net.PacketConn
		if c, err = lc.ListenPacket(context.Background(), "udp", ":"+strconv.Itoa(int(n))); err != nil {
			return
		}
		l = &port{number: n, conn: c.(*net.UDPConn)}
	}
	if err := within(u.cfg.Namespace, open); err != nil {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("open UDP port %d: %w", n, err)
	}
	if l.raw, err = l.conn.SyscallConn(); err == nil {
		l.filter(true)
		err = l.prepare()
	}
	if err != nil {
		l.close()
		return nil, fmt.Errorf("prepare UDP port %d: %w", n, err)
	}
	return l, nil
}

// within runs f on a thread of a network namespace.
func within(ns *netns.NsHandle, f func()) error {
	if ns == nil {
		f()
		return nil
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := netns.Set(*ns)
		if err == nil {
			f()
		}
		done <- err
	}()
	return <-done
}

func (l *port) prepare() error {
	var err error
	cerr := l.raw.Control(func(fd uintptr) {
		wire.PrepareUDP(fd)
		var domain int
		if domain, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil {
			return
		}
		l.ipv6 = domain == unix.AF_INET6
		// What is forwarded has its size from the sender's path: it is dropped where it does not fit, never cut.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
		if l.ipv6 {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
	})
	return errors.Join(cerr, err)
}

// onlyBinds is the filter of a port whose packets this process does not forward: what is not a bind is dropped before
// it wakes anybody. It sees datagrams from their UDP header on.
var onlyBinds = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 8},
	{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: wire.BindMagic, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0x40000},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0},
}

// filter takes binds alone, or everything. Without it strangers only cost more.
func (l *port) filter(on bool) {
	_ = l.raw.Control(func(fd uintptr) {
		if on {
			_ = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
				&unix.SockFprog{Len: uint16(len(onlyBinds)), Filter: &onlyBinds[0]})
		} else {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		}
	})
}

func (l *port) close() { _ = l.conn.Close() }

// send sends one datagram from an address of ours. It never waits: what cannot be sent now is lost, as on a full link.
func (l *port) send(to, local netip.AddrPort, b []byte) {
	var dst unix.Sockaddr
	if l.ipv6 {
		dst = &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}
	} else {
		dst = &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	}
	_ = l.raw.Control(func(fd uintptr) {
		_, _ = unix.SendmsgN(int(fd), b, l.source(local.Addr()), dst, unix.MSG_DONTWAIT)
	})
}

// source is the control message that chooses the address to send from.
func (l *port) source(a netip.Addr) []byte {
	if l.ipv6 {
		return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
	}
	return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
}

// forward makes this process forward a mapping; the zero one: nothing.
func (p *pair) forward(m Mapping) {
	a, b := p.ends[0].port, p.ends[1].port
	a.filter(m.IsZero())
	b.filter(m.IsZero())
	if m.IsZero() {
		a.way.Store(nil)
		b.way.Store(nil)
		return
	}
	a.way.Store(&way{from: m.ARemote, out: b, to: b.address(m.BRemote), src: b.source(m.BLocal.Addr())})
	b.way.Store(&way{from: m.BRemote, out: a, to: a.address(m.ARemote), src: a.source(m.ALocal.Addr())})
}

// sockAddress is a socket address as the kernel takes it.
type sockAddress struct {
	b [unix.SizeofSockaddrInet6]byte
	n uint32
}

func (l *port) address(a netip.AddrPort) sockAddress {
	var out sockAddress
	if l.ipv6 {
		out.n = unix.SizeofSockaddrInet6
		binary.NativeEndian.PutUint16(out.b[:], unix.AF_INET6)
		ip := a.Addr().As16()
		copy(out.b[8:], ip[:])
	} else {
		out.n = unix.SizeofSockaddrInet4
		binary.NativeEndian.PutUint16(out.b[:], unix.AF_INET)
		ip := a.Addr().As4()
		copy(out.b[4:], ip[:])
	}
	binary.BigEndian.PutUint16(out.b[2:], a.Port())
	return out
}

// read takes what comes to one end's port, until that is closed.
func (u *Relay) read(p *pair, side int) {
	l := p.ends[side].port
	burst := func(fd uintptr) (done bool) {
		b := u.borrow()
		n := b.receive(fd)
		if n > 0 {
			u.forward(p, side, l, b, n)
		}
		u.giveBack(b)
		return n != 0
	}
	for l.raw.Read(burst) == nil {
	}
}

// forward forwards one burst, and looks at what does not come from the end's proven mapping.
func (u *Relay) forward(p *pair, side int, l *port, b *batch, n int) {
	w := l.way.Load()
	b.out = b.out[:0]
	for i := range n {
		from, ok := b.from(i, l.ipv6)
		if !ok || b.headers[i].Hdr.Flags&unix.MSG_TRUNC != 0 {
			continue
		}
		if w != nil && from == w.from {
			b.out = append(b.out, i)
			continue
		}
		if data := b.payload(i); len(data) > 0 && wire.IsBind(data) {
			if local, ok := b.local(i, l.ipv6); ok {
				u.bind(p, side, from, netip.AddrPortFrom(local, l.number), data)
				continue
			}
		}
		u.counters.refused.Add(1)
	}
	if len(b.out) == 0 {
		return
	}
	sent, bytes := b.send(w)
	u.counters.packets.Add(uint64(sent))
	u.counters.bytes.Add(uint64(bytes))
	u.counters.lost.Add(uint64(len(b.out) - min(sent, len(b.out))))
	p.passed.Set(time.Now())
}

// batch is what one recvmmsg takes, with room to send it on as it is: a train of equal datagrams that the kernel has
// joined (UDP_GRO) leaves as one, too (UDP_SEGMENT).
type batch struct {
	headers [wire.ReceiveMessages]unix.Mmsghdr
	iovecs  [wire.ReceiveMessages]unix.Iovec
	names   [wire.ReceiveMessages][unix.SizeofSockaddrInet6]byte
	control [wire.ReceiveMessages][96]byte
	data    []byte

	out   []int // indexes of the messages to send on
	sends [wire.ReceiveMessages]unix.Mmsghdr
	ways  [wire.ReceiveMessages][96]byte // control of sends
}

func newBatches() chan *batch { return make(chan *batch, runtime.NumCPU()) }

func newBatch() *batch {
	b := &batch{data: make([]byte, wire.ReceiveMessages*wire.ReceiveBytes)}
	for i := range b.headers {
		b.iovecs[i].Base = &b.data[i*wire.ReceiveBytes]
	}
	return b
}

func (u *Relay) borrow() *batch {
	select {
	case b := <-u.buffers:
		return b
	default:
		return newBatch()
	}
}

func (u *Relay) giveBack(b *batch) {
	select {
	case u.buffers <- b:
	default:
	}
}

// receive takes what is there. 0: nothing; negative: an error of an earlier datagram, which is cleared by having been
// read.
func (b *batch) receive(fd uintptr) int {
	for i := range b.headers {
		b.iovecs[i].SetLen(wire.ReceiveBytes)
		h := &b.headers[i].Hdr
		*h = unix.Msghdr{Name: &b.names[i][0], Namelen: uint32(len(b.names[i])), Iov: &b.iovecs[i], Control: &b.control[i][0]}
		h.SetIovlen(1)
		h.SetControllen(len(b.control[i]))
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

// payload is a datagram, or several that the kernel has joined.
func (b *batch) payload(i int) []byte {
	return b.data[i*wire.ReceiveBytes:][:b.headers[i].Len]
}

func (b *batch) from(i int, ipv6 bool) (netip.AddrPort, bool) {
	name := b.names[i][:b.headers[i].Hdr.Namelen]
	if len(name) < unix.SizeofSockaddrInet4 {
		return netip.AddrPort{}, false
	}
	at := binary.BigEndian.Uint16(name[2:])
	if !ipv6 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), at), at != 0
	}
	if len(name) < unix.SizeofSockaddrInet6 {
		return netip.AddrPort{}, false
	}
	a := netip.AddrFrom16([16]byte(name[8:24])).Unmap()
	return netip.AddrPortFrom(a, at), at != 0 && !a.IsLinkLocalUnicast()
}

// each calls f with the control messages of a received message.
func (b *batch) each(i int, f func(level, typ int32, data []byte)) {
	c := b.control[i][:min(int(b.headers[i].Hdr.Controllen), len(b.control[i]))]
	for len(c) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
		n := int(h.Len)
		if n < unix.CmsgLen(0) || n > len(c) {
			return
		}
		f(h.Level, h.Type, c[unix.CmsgLen(0):n])
		c = c[min(unix.CmsgSpace(n-unix.CmsgLen(0)), len(c)):]
	}
}

// local is the address of ours that a message was sent to.
func (b *batch) local(i int, ipv6 bool) (a netip.Addr, ok bool) {
	b.each(i, func(level, typ int32, data []byte) {
		switch {
		case ipv6 && level == unix.IPPROTO_IPV6 && typ == unix.IPV6_PKTINFO && len(data) >= 16:
			a, ok = netip.AddrFrom16([16]byte(data[:16])).Unmap(), true
		case !ipv6 && level == unix.IPPROTO_IP && typ == unix.IP_PKTINFO && len(data) >= 12:
			a, ok = netip.AddrFrom4([4]byte(data[8:12])), true
		}
	})
	return a, ok
}

// segment is the size of the datagrams that the kernel has joined; 0: there is one.
func (b *batch) segment(i int) (size int) {
	b.each(i, func(level, typ int32, data []byte) {
		if level == unix.IPPROTO_UDP && typ == unix.UDP_GRO && len(data) >= 2 {
			size = int(binary.NativeEndian.Uint16(data))
		}
	})
	if size >= int(b.headers[i].Len) {
		return 0
	}
	return size
}

// send sends the messages of out the way, and tells how many datagrams and bytes the kernel took.
func (b *batch) send(w *way) (packets, bytes int) {
	for k, i := range b.out {
		data := b.payload(i)
		b.iovecs[i].SetLen(len(data))
		h := &b.sends[k].Hdr
		*h = unix.Msghdr{Name: &w.to.b[0], Namelen: w.to.n, Iov: &b.iovecs[i]}
		h.SetIovlen(1)
		c := b.ways[k][:0]
		c = append(c, w.src...)
		if s := b.segment(i); s > 0 {
			c = appendSegment(c, s)
		}
		h.Control = &b.ways[k][0]
		h.SetControllen(len(c))
	}
	_ = w.out.raw.Control(func(fd uintptr) { packets, bytes = b.write(fd, w) })
	return packets, bytes
}

func appendSegment(c []byte, size int) []byte {
	start := len(c)
	c = append(c, make([]byte, unix.CmsgSpace(2))...)
	h := (*unix.Cmsghdr)(unsafe.Pointer(&c[start]))
	h.Level, h.Type = unix.IPPROTO_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(c[start+unix.CmsgLen(0):], uint16(size))
	return c
}

func (b *batch) write(fd uintptr, w *way) (packets, bytes int) {
	failures := 0
	for k := 0; k < len(b.out) && failures <= wire.ReceiveMessages; {
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.sends[k])), uintptr(len(b.out)-k),
			unix.MSG_DONTWAIT, 0, 0)
		if errno == 0 {
			for range int(n) {
				packets += b.count(b.out[k])
				bytes += int(b.headers[b.out[k]].Len)
				k++
			}
			continue
		}
		failures++
		switch {
		case errno == unix.EINTR, errno == unix.ECONNREFUSED: // the latter reports an earlier datagram
			continue
		case b.segment(b.out[k]) > 0 && (errno == unix.EINVAL || errno == unix.EIO || errno == unix.EMSGSIZE ||
			errno == unix.EOPNOTSUPP):
			p, n := b.singly(fd, b.out[k], w)
			packets, bytes = packets+p, bytes+n
		}
		k++ // that one is lost
	}
	return packets, bytes
}

func (b *batch) count(i int) int {
	if s := b.segment(i); s > 0 {
		return (int(b.headers[i].Len) + s - 1) / s
	}
	return 1
}

// singly sends a train datagram by datagram, for links that cannot cut it up.
func (b *batch) singly(fd uintptr, i int, w *way) (packets, bytes int) {
	data, s := b.payload(i), b.segment(i)
	for len(data) > 0 {
		one := data[:min(s, len(data))]
		data = data[len(one):]
		v := unix.Iovec{Base: &one[0]}
		v.SetLen(len(one))
		h := unix.Msghdr{Name: &w.to.b[0], Namelen: w.to.n, Iov: &v, Control: &w.src[0]}
		h.SetIovlen(1)
		h.SetControllen(len(w.src))
		if _, _, errno := unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&h)), unix.MSG_DONTWAIT); errno == 0 {
			packets++
			bytes += len(one)
		}
	}
	return packets, bytes
}
