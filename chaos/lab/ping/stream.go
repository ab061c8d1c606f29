package ping

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Patience is how long an echo may take before it counts as lost.
const Patience = time.Second

// Protocol numbers of ICMP, for parsing.
const (
	protoICMPv4 = 1
	protoICMPv6 = 58
)

// Open opens the raw socket that a Stream to dst needs, in the calling thread's network namespace.
func Open(dst netip.Addr) (net.PacketConn, error) {
	network, any := "ip4:icmp", "0.0.0.0"
	if dst.Is6() {
		network, any = "ip6:ipv6-icmp", "::"
	}
	l := net.ListenConfig{Control: DeepQueue}
	c, err := l.ListenPacket(context.Background(), network, any)
	if err == nil {
		err = answersAlone(c, dst.Is6())
	}
	if err != nil {
		return nil, fmt.Errorf("raw socket for echoes to %s: %w", dst, err)
	}
	return c, nil
}

// queueBytes hold some five thousand small packets, with what the kernel counts for each.
const queueBytes = 4 << 20

// DeepQueue makes a socket keep what comes while its program does not run: what that misses would be counted as lost on
// the way. The kernel's usual 208 KiB are full in half a second of 500 packets a second. It fits
// net.ListenConfig.Control and net.Dialer.Control, and needs CAP_NET_ADMIN.
func DeepQueue(_, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, queueBytes)
	})
	if err := errors.Join(err, failed); err != nil {
		return fmt.Errorf("a receive buffer of %d bytes: %w", queueBytes, err)
	}
	return nil
}

// answersAlone keeps all but answers to echoes from a raw socket, which else gets all ICMP that comes to this host.
func answersAlone(c net.PacketConn, six bool) error {
	if six {
		var f ipv6.ICMPFilter
		f.SetAll(true)
		f.Accept(ipv6.ICMPTypeEchoReply)
		return ipv6.NewPacketConn(c).SetICMPFilter(&f)
	}
	var f ipv4.ICMPFilter
	f.SetAll(true)
	f.Accept(ipv4.ICMPTypeEchoReply)
	return ipv4.NewPacketConn(c).SetICMPFilter(&f)
}

// Stream sends echoes to one address until it is closed.
type Stream struct {
	conn net.PacketConn
	dst  netip.Addr
	id   uint16 // with nonce, tells our answers from those of others on the same host
	n    [8]byte
	size int // bytes of data in each echo

	mu     sync.Mutex
	tally  Tally
	answer chan struct{} // closed and replaced at each answer

	stop     context.CancelFunc
	sending  sync.WaitGroup
	received sync.WaitGroup
}

// Sizes of an echo's data, in bytes: what it needs itself, and what fits into an IPv4 packet.
const (
	MinSize = 16
	MaxSize = 65507
)

// Start sends count echoes (0: until Stop), one per interval, through conn, which the Stream then owns.
// Each carries size bytes of data, at least MinSize.
func Start(conn net.PacketConn, dst netip.Addr, interval time.Duration, count, size int) *Stream {
	ctx, cancel := context.WithCancel(context.Background())
	s := &Stream{conn: conn, dst: dst, id: uint16(rand.Uint32()), size: min(max(size, MinSize), MaxSize), stop: cancel,
		answer: make(chan struct{})}
	binary.BigEndian.PutUint64(s.n[:], rand.Uint64())
	s.sending.Go(func() { s.send(ctx, interval, count) })
	s.received.Go(s.receive)
	return s
}

func (s *Stream) send(ctx context.Context, interval time.Duration, count int) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for i := 0; count == 0 || i < count; i++ {
		s.mu.Lock()
		number := s.tally.Sent(time.Now())
		s.mu.Unlock()
		// An error (no route, no key yet) is an echo that gets no answer: the tally says so.
		_, _ = s.conn.WriteTo(s.echo(number), &net.IPAddr{IP: s.dst.AsSlice()})
		if i+1 == count {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Stream) echo(number int) []byte {
	kind := icmp.Type(ipv4.ICMPTypeEcho)
	if s.dst.Is6() {
		kind = ipv6.ICMPTypeEchoRequest
	}
	data := make([]byte, s.size)
	copy(data, s.n[:])
	binary.BigEndian.PutUint64(data[8:], uint64(number))
	m := icmp.Message{Type: kind, Body: &icmp.Echo{ID: int(s.id), Seq: number & 0xffff, Data: data}}
	b, err := m.Marshal(nil) // the kernel fills in the checksum of IPv6
	if err != nil {
		panic(err) // an echo of fixed size always encodes
	}
	return b
}

func (s *Stream) receive() {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := s.conn.ReadFrom(buf)
		now := time.Now()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error on the socket; the missing answer is what counts
		}
		number, ok := s.decode(buf[:n], from)
		if !ok {
			continue
		}
		s.mu.Lock()
		s.tally.Received(number, now)
		close(s.answer)
		s.answer = make(chan struct{})
		s.mu.Unlock()
	}
}

// decode finds the number of the echo that a packet answers; other people's packets give false.
func (s *Stream) decode(b []byte, from net.Addr) (int, bool) {
	ip, ok := from.(*net.IPAddr)
	if !ok {
		return 0, false
	}
	if a, ok := netip.AddrFromSlice(ip.IP); !ok || a.Unmap() != s.dst {
		return 0, false
	}
	proto := protoICMPv4
	if s.dst.Is6() {
		proto = protoICMPv6
	}
	m, err := icmp.ParseMessage(proto, b)
	if err != nil || (m.Type != ipv4.ICMPTypeEchoReply && m.Type != ipv6.ICMPTypeEchoReply) {
		return 0, false
	}
	echo, ok := m.Body.(*icmp.Echo)
	if !ok || echo.ID != int(s.id) || len(echo.Data) != s.size || [8]byte(echo.Data) != s.n {
		return 0, false
	}
	return int(binary.BigEndian.Uint64(echo.Data[8:])), true
}

// Report is the account so far.
func (s *Stream) Report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tally.Report(time.Now(), Patience)
}

// Answered waits until n echoes have been answered.
func (s *Stream) Answered(ctx context.Context, n int) error {
	for {
		s.mu.Lock()
		have, more := s.tally.received, s.answer
		s.mu.Unlock()
		if have >= n {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d echoes to %s answered: %w", have, n, s.dst, ctx.Err())
		}
	}
}

// Stop ends the sending, waits until every echo is answered or lost, and returns the final account.
func (s *Stream) Stop() Report {
	s.stop()
	return s.Finish()
}

// Finish is Stop for a stream with a count: it lets all of them leave first.
func (s *Stream) Finish() Report {
	s.sending.Wait()
	s.stop()
	s.mu.Lock()
	sent := len(s.tally.sent)
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	_ = s.Answered(ctx, sent) // what is not answered by then is lost
	cancel()
	s.conn.Close()
	s.received.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tally.Report(time.Now().Add(Patience), Patience)
}
