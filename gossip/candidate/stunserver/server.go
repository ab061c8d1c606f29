package stunserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"

	"github.com/skeinmesh/skein/internal/sock"
)

const (
	sourceRate, sourceBurst = 200, 400 // requests per second and source; hundreds of nodes may share one NAT
	totalRate, totalBurst   = 10_000, 10_000
	answerRate, answerBurst = 20, 40 // per address, for answers on behalf of another node
	maxAsking               = 32     // questions to other nodes under way
	askTimeout              = 2 * time.Second
)

// Config makes a Server.
type Config struct {
	Port      int    // primary UDP port, usually 3478
	Alternate int    // 0: Port + 1
	Mark      uint32 // SO_MARK on all it sends, so that answers never enter the tunnel

	// ChangeIP asks another public node to run Answer for the same address and transaction. Without it, or when it
	// fails, clients are told that another address cannot be had. It must not pick a node that shares our address.
	ChangeIP func(ctx context.Context, addr netip.AddrPort, tx stunmsg.TxID) error

	Log *slog.Logger
}

// Stats counts since the start.
type Stats struct{ Requests, Answers, Dropped, Asked uint64 }

// Server answers binding requests on a primary and an alternate port, in both address families.
type Server struct {
	c        Config
	families [2]*family // IPv4, IPv6; nil: the host has none
	sources  *limiter
	total    *limiter
	answers  *limiter
	asking   asking
	ctx      context.Context // ends the questions to other nodes
	stop     context.CancelFunc
	running  sync.WaitGroup

	requests, answered, dropped, asked atomic.Uint64
}

type family struct {
	ipv6  bool
	conns [sockets]*net.UDPConn
}

// Listen starts a server.
func Listen(c Config) (*Server, error) {
	if c.Alternate == 0 {
		c.Alternate = c.Port + 1
	}
	if c.Port < 1 || c.Port > 65535 || c.Alternate < 1 || c.Alternate > 65535 || c.Port == c.Alternate {
		return nil, fmt.Errorf("start STUN server: ports %d and %d, want two different ones from 1 to 65535",
			c.Port, c.Alternate)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		c: c, sources: newLimiter(sourceRate, sourceBurst), total: newLimiter(totalRate, totalBurst),
		answers: newLimiter(answerRate, answerBurst), asking: asking{under: make(map[netip.AddrPort]bool)},
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	var errs [2]error
	for i, network := range []string{"udp4", "udp6"} {
		s.families[i], errs[i] = listenFamily(network, c)
		if errors.Is(errs[i], unix.EADDRINUSE) {
			s.Close()
			return nil, fmt.Errorf("start STUN server: %w; stop what uses the port, or set ports.stun", errs[i])
		}
	}
	if s.families[0] == nil && s.families[1] == nil {
		s.Close()
		return nil, fmt.Errorf("start STUN server: %w", errors.Join(errs[0], errs[1]))
	}
	for _, f := range s.families {
		if f != nil {
			s.running.Go(func() { s.serve(f, viaPrimary) })
			s.running.Go(func() { s.serve(f, viaAlternate) })
		}
	}
	return s, nil
}

func listenFamily(network string, c Config) (*family, error) {
	f := &family{ipv6: network == "udp6"}
	for i, port := range []int{c.Port, c.Alternate, 0} {
		conn, err := sock.ListenUDP(network, netip.AddrPortFrom(netip.Addr{}, uint16(port)), c.Mark)
		if err == nil {
			f.conns[i] = conn
			err = f.wantDestination(conn)
		}
		if err != nil {
			f.close()
			return nil, fmt.Errorf("listen on %s port %d: %w", network, port, err)
		}
	}
	return f, nil
}

func (f *family) wantDestination(conn *net.UDPConn) error {
	if f.ipv6 {
		return ipv6.NewPacketConn(conn).SetControlMessage(ipv6.FlagDst, true)
	}
	return ipv4.NewPacketConn(conn).SetControlMessage(ipv4.FlagDst, true)
}

func (f *family) close() {
	for _, c := range f.conns {
		if c != nil {
			c.Close()
		}
	}
}

// Close ends the server and waits for its goroutines.
func (s *Server) Close() error {
	s.stop()
	for _, f := range s.families {
		if f != nil {
			f.close()
		}
	}
	s.running.Wait()
	return nil
}

// Stats reads the counters.
func (s *Server) Stats() Stats {
	return Stats{Requests: s.requests.Load(), Answers: s.answered.Load(), Dropped: s.dropped.Load(), Asked: s.asked.Load()}
}

func (s *Server) serve(f *family, on via) {
	b, oob := make([]byte, stunmsg.MaxSize), make([]byte, 128)
	for {
		n, on2, _, from, err := f.conns[on].ReadMsgUDPAddrPort(b, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error of an earlier answer
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		now := time.Now()
		s.requests.Add(1)
		if !s.sources.allow(from.Addr(), now) || !s.total.allow(netip.IPv4Unspecified(), now) {
			s.dropped.Add(1)
			continue
		}
		s.request(f, on, f.destination(oob[:on2]), from, b[:n])
	}
}

func (s *Server) request(f *family, on via, local netip.Addr, from netip.AddrPort, b []byte) {
	port := s.c.Port
	if on == viaAlternate {
		port = s.c.Alternate
	}
	at := serving{on: on, alternate: uint16(s.c.Alternate), another: s.c.ChangeIP != nil}
	if local.IsValid() {
		at.local = netip.AddrPortFrom(local, uint16(port))
	}
	r, ok := respond(b, from, at)
	if !ok {
		s.dropped.Add(1)
		return
	}
	if !r.another {
		s.send(f, r.via, local, from, r.bytes)
		return
	}
	if !s.asking.begin(from) {
		s.dropped.Add(1) // repeated while under way, or too many; the client asks again
		return
	}
	s.running.Go(func() {
		defer s.asking.end(from)
		s.ask(f, local, from, r)
	})
}

// asking holds the questions to other nodes under way: one per client, and few in all.
type asking struct {
	mu    sync.Mutex
	under map[netip.AddrPort]bool
}

func (a *asking) begin(from netip.AddrPort) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.under[from] || len(a.under) >= maxAsking {
		return false
	}
	a.under[from] = true
	return true
}

func (a *asking) end(from netip.AddrPort) {
	a.mu.Lock()
	delete(a.under, from)
	a.mu.Unlock()
}

// ask has another node answer, and says so to the client when that cannot be.
func (s *Server) ask(f *family, local netip.Addr, from netip.AddrPort, r reply) {
	ctx, cancel := context.WithTimeout(s.ctx, askTimeout)
	defer cancel()
	s.asked.Add(1)
	if err := s.c.ChangeIP(ctx, from, r.tx); err != nil {
		s.c.Log.Debug("no other node could answer a STUN request", "from", from, "error", err)
		s.send(f, r.via, local, from, r.bytes)
	}
}

// Answer sends the answer to a request that another node took in, from this node's alternate port, or from the one that
// is never named.
func (s *Server) Answer(addr netip.AddrPort, tx stunmsg.TxID, silent bool) error {
	addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
	if !addr.Addr().IsGlobalUnicast() || addr.Port() == 0 {
		return fmt.Errorf("answer a STUN request for another node: %s is not an address to answer to", addr)
	}
	f := s.families[0]
	if addr.Addr().Is6() {
		f = s.families[1]
	}
	if f == nil {
		return fmt.Errorf("answer a STUN request for another node: this host has no socket for %s", addr)
	}
	if !s.answers.allow(addr.Addr(), time.Now()) {
		return fmt.Errorf("answer a STUN request for another node: too many for %s; ask again in a second", addr.Addr())
	}
	b, err := stunmsg.Success(tx, addr)
	if err != nil {
		return err
	}
	from := viaAlternate
	if silent {
		from = viaSilent
	}
	if _, err := f.conns[from].WriteToUDPAddrPort(b, addr); err != nil {
		return fmt.Errorf("answer a STUN request for another node: %w", err)
	}
	s.answered.Add(1)
	return nil
}

// send answers from the very address that was asked; a host may have several.
func (s *Server) send(f *family, from via, local netip.Addr, to netip.AddrPort, b []byte) {
	if _, _, err := f.conns[from].WriteMsgUDPAddrPort(b, f.source(local), to); err == nil {
		s.answered.Add(1)
	}
}

func (f *family) destination(oob []byte) netip.Addr {
	var ip net.IP
	if f.ipv6 {
		var cm ipv6.ControlMessage
		if cm.Parse(oob) == nil {
			ip = cm.Dst
		}
	} else {
		var cm ipv4.ControlMessage
		if cm.Parse(oob) == nil {
			ip = cm.Dst
		}
	}
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

func (f *family) source(local netip.Addr) []byte {
	switch {
	case !local.IsValid():
		return nil
	case f.ipv6:
		return (&ipv6.ControlMessage{Src: local.AsSlice()}).Marshal()
	default:
		return (&ipv4.ControlMessage{Src: local.AsSlice()}).Marshal()
	}
}
