package probe

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/mmsg"
)

const (
	receiveBuffer = 256 << 10 // bytes the kernel queues for us before it drops
	readMessages  = 8         // taken at a time
	maxPayload    = 1472      // bytes sent in one datagram: plain Ethernet
	// hopLimit differs from the 64 that WireGuard's packets leave with. The kernel joins datagrams of one flow only when
	// their TTLs agree; a ping glued to the end of WireGuard's data would pass the filter unseen.
	hopLimit = 128
)

// Handler takes one datagram: where it came from, which of our addresses it was sent to, and what it holds. The
// payload is valid until Handler returns. It is called from one goroutine per address family and must not block.
type Handler func(from netip.AddrPort, local netip.Addr, payload []byte, at time.Time)

// Config opens a Socket.
type Config struct {
	Port int    // WireGuard's UDP port
	Mark uint32 // SO_MARK on all we send, so that it never enters the tunnel
	Log  *slog.Logger
}

// Socket sends UDP from WireGuard's port and receives STUN and pings that arrive there.
type Socket struct {
	port    uint16
	log     *slog.Logger
	v4, v6  *family // nil where the host does not have the family
	sources *sources
	running sync.WaitGroup
}

// family is one raw socket.
type family struct {
	file   *os.File
	conn   syscall.RawConn
	reader *mmsg.Reader
	ipv6   bool

	mu  sync.Mutex // guards out
	out []byte
}

// Open makes the raw sockets. Nothing is received before Serve.
func Open(c Config) (*Socket, error) {
	if c.Port < 1 || c.Port > 65535 {
		return nil, fmt.Errorf("open probe socket: WireGuard's port is %d, want 1 to 65535", c.Port)
	}
	s := &Socket{port: uint16(c.Port), log: c.Log}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	var err4, err6 error
	s.v4, err4 = openFamily(s.port, c.Mark, false)
	s.v6, err6 = openFamily(s.port, c.Mark, true)
	if s.v4 == nil && s.v6 == nil {
		err := errors.Join(err4, err6)
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("open probe socket for UDP port %d: %w; the agent needs CAP_NET_RAW", c.Port, err)
		}
		return nil, fmt.Errorf("open probe socket for UDP port %d: %w", c.Port, err)
	}
	if s.v4 != nil {
		var err error
		if s.sources, err = openSources(c.Mark); err != nil {
			s.Close()
			return nil, err
		}
	}
	if err := errors.Join(err4, err6); err != nil {
		s.log.Info("probing without one address family", "error", err)
	}
	return s, nil
}

// IPv4 reports whether the socket speaks IPv4.
func (s *Socket) IPv4() bool { return s.v4 != nil }

// IPv6 reports whether the socket speaks IPv6.
func (s *Socket) IPv6() bool { return s.v6 != nil }

// Port is WireGuard's port.
func (s *Socket) Port() uint16 { return s.port }

func openFamily(port uint16, mark uint32, ipv6 bool) (*family, error) {
	domain, name := unix.AF_INET, "IPv4"
	if ipv6 {
		domain, name = unix.AF_INET6, "IPv6"
	}
	fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, fmt.Errorf("%s raw socket: %w", name, err)
	}
	if err := prepare(fd, port, mark, ipv6); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%s raw socket: %w", name, err)
	}
	f := &family{file: os.NewFile(uintptr(fd), "skein-probe-"+name), ipv6: ipv6}
	if f.conn, err = f.file.SyscallConn(); err == nil {
		f.reader, err = mmsg.NewReader(f.file, readMessages)
	}
	if err != nil {
		f.file.Close()
		return nil, fmt.Errorf("%s raw socket: %w", name, err)
	}
	return f, nil
}

// prepare attaches the filter first and then throws away what the kernel queued before it was there.
func prepare(fd int, port uint16, mark uint32, ipv6 bool) error {
	if err := attach(fd, port, ipv6); err != nil {
		return err
	}
	for {
		var b [1]byte
		if _, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT); err != nil && err != unix.EINTR {
			break
		}
	}
	type option struct {
		level, name, value int
		what               string
	}
	options := []option{{unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer, "receive buffer"}}
	if mark != 0 {
		options = append(options, option{unix.SOL_SOCKET, unix.SO_MARK, int(mark), "mark"})
	}
	if ipv6 {
		options = append(options,
			option{unix.IPPROTO_IPV6, unix.IPV6_CHECKSUM, 6, "checksum offset"}, // the kernel fills and checks it
			option{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1, "packet info"},
			option{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, hopLimit, "hop limit"},
			option{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE, "no fragmentation"})
	} else {
		options = append(options,
			option{unix.IPPROTO_IP, unix.IP_TTL, hopLimit, "TTL"},
			option{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE, "no fragmentation"})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set %s: %w", o.what, err)
		}
	}
	return nil
}

func attach(fd int, port uint16, ipv6 bool) error {
	program, err := filter(port, ipv6)
	if err != nil {
		return err
	}
	raw := make([]unix.SockFilter, len(program))
	for i, p := range program {
		raw[i] = unix.SockFilter{Code: p.Op, Jt: p.Jt, Jf: p.Jf, K: p.K}
	}
	err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(raw)),
		Filter: &raw[0]})
	if err != nil {
		return fmt.Errorf("attach the packet filter: %w", err)
	}
	return nil
}

// Close ends the socket and waits until Serve's goroutines have returned.
func (s *Socket) Close() error {
	for _, f := range []*family{s.v4, s.v6} {
		if f != nil {
			f.file.Close()
		}
	}
	if s.sources != nil {
		s.sources.close()
	}
	s.running.Wait()
	return nil
}

// Send sends a datagram from WireGuard's port; the kernel's routing chooses the source address.
func (s *Socket) Send(to netip.AddrPort, payload []byte) error {
	return s.SendFrom(netip.Addr{}, to, payload)
}

// SendFrom is Send with a source address, as an answer should have the address its question was sent to.
func (s *Socket) SendFrom(local netip.Addr, to netip.AddrPort, payload []byte) error {
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if len(payload) > maxPayload {
		return fmt.Errorf("send probe to %s: %d bytes, at most %d fit", to, len(payload), maxPayload)
	}
	var err error
	switch {
	case !to.IsValid() || to.Port() == 0:
		return fmt.Errorf("send probe: %q is not an address and port", to)
	case to.Addr().Is4() && s.v4 != nil:
		err = s.send4(local.Unmap(), to, payload)
	case to.Addr().Is6() && s.v6 != nil:
		err = s.v6.send6(s.port, local, to, payload)
	default:
		err = unix.EAFNOSUPPORT
	}
	if err != nil {
		return fmt.Errorf("send probe to %s: %w", to, err)
	}
	return nil
}

// send4 must know the source address before the kernel does, because the checksum covers it. An address
// that has left the host since it was cached is looked up again.
func (s *Socket) send4(local netip.Addr, to netip.AddrPort, payload []byte) error {
	if local.Is4() {
		return s.v4.send4(s.port, local, to, payload)
	}
	src, err := s.sources.lookup(to.Addr(), time.Now())
	if err != nil {
		return err
	}
	if err = s.v4.send4(s.port, src, to, payload); err == nil || errors.Is(err, unix.EAGAIN) ||
		errors.Is(err, unix.EMSGSIZE) {
		return err
	}
	s.sources.forget(to.Addr())
	if src, err = s.sources.lookup(to.Addr(), time.Now()); err != nil {
		return err
	}
	return s.v4.send4(s.port, src, to, payload)
}

func (f *family) send4(port uint16, src netip.Addr, to netip.AddrPort, payload []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out = appendUDP(f.out[:0], netip.AddrPortFrom(src, port), to, payload)
	return f.send(f.out, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: src.As4()}),
		&unix.SockaddrInet4{Addr: to.Addr().As4()})
}

func (f *family) send6(port uint16, local netip.Addr, to netip.AddrPort, payload []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.out = binary.BigEndian.AppendUint16(f.out[:0], port)
	f.out = binary.BigEndian.AppendUint16(f.out, to.Port())
	f.out = binary.BigEndian.AppendUint16(f.out, uint16(udpHeader+len(payload)))
	f.out = append(f.out, 0, 0)
	f.out = append(f.out, payload...)
	dst := &unix.SockaddrInet6{Addr: to.Addr().As16()}
	if zone, err := strconv.Atoi(to.Addr().Zone()); err == nil {
		dst.ZoneId = uint32(zone)
	}
	var control []byte
	if local.Is6() && !local.Is4In6() {
		control = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: local.As16(), Ifindex: dst.ZoneId})
	}
	return f.send(f.out, control, dst)
}

// send never waits: a full send queue loses the probe, as a full link would.
func (f *family) send(b, control []byte, to unix.Sockaddr) error {
	var err error
	cerr := f.conn.Control(func(fd uintptr) {
		_, err = unix.SendmsgN(int(fd), b, control, to, unix.MSG_DONTWAIT)
	})
	if cerr != nil {
		return cerr
	}
	return err
}

// Serve starts to receive. It is called once.
func (s *Socket) Serve(h Handler) {
	for _, f := range []*family{s.v4, s.v6} {
		if f != nil {
			s.running.Go(func() { s.receive(f, h) })
		}
	}
}

func (s *Socket) receive(f *family, h Handler) {
	for {
		err := f.reader.Read()
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			continue // one datagram was lost to an error of its own
		}
		if err != nil {
			return // closed
		}
		at := time.Now()
		for p, ok := f.reader.Next(); ok; p, ok = f.reader.Next() {
			if f.ipv6 {
				if d, ok := parseUDP(p.Data, s.port); ok {
					h(netip.AddrPortFrom(p.From.Addr(), d.srcPort), p.To.Addr, d.payload, at)
				}
			} else if d, ok := parseIPv4(p.Data, s.port); ok {
				h(netip.AddrPortFrom(d.src, d.srcPort), d.dst, d.payload, at)
			}
		}
	}
}
