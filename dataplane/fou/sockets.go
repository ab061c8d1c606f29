package fou

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/mmsg"
)

const (
	// autoPorts are how many source ports a family has for flows: enough to spread them over queues of network cards and
	// paths of equal cost. The kernel takes any of its range; a socket for each would be too many.
	autoPorts = 8
	// readMessages are received at once; each may be a train of 64 KiB.
	readMessages = 8
)

// received is what datagrams are received into, lent like batches.
var received = mmsg.NewMemory(readMessages)

// sockets are those of one family in the namespace.
type sockets struct {
	family int
	taken  map[uint16]*portSocket // by port
	auto   []*net.UDPConn         // only to send from
	ports  []*mmsg.Writer

	mu  sync.Mutex
	way *net.UDPConn // asks how large packets may be
}

// portSocket is the socket of a port at which packets are taken.
type portSocket struct {
	conn   *net.UDPConn
	reader *mmsg.Reader
	writer *mmsg.Writer
}

var networks = [2]string{"udp4", "udp6"}

// newSockets are the sockets of a family, no port of it yet; called inside the namespace.
func newSockets(family int) (*sockets, error) {
	way, err := bind(family, 0, true)
	if err != nil {
		return nil, err
	}
	return &sockets{family: family, taken: map[uint16]*portSocket{}, way: way}, nil
}

// listen opens a port; called inside the namespace.
func (s *sockets) listen(port uint16) (*portSocket, error) {
	conn, err := bind(s.family, int(port), false)
	if err != nil {
		return nil, err
	}
	e := &portSocket{conn: conn}
	if e.reader, err = received.NewReader(conn); err == nil {
		e.writer, err = mmsg.NewWriter(conn)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	s.taken[port] = e
	return e, nil
}

// spread opens the sockets that flows are spread over; called inside the namespace.
func (s *sockets) spread() error {
	for len(s.auto) < autoPorts {
		c, err := bind(s.family, 0, true)
		if err != nil {
			return err
		}
		w, err := mmsg.NewWriter(c)
		if err != nil {
			c.Close()
			return err
		}
		s.auto, s.ports = append(s.auto, c), append(s.ports, w)
	}
	return nil
}

// bind opens a socket that sends as the kernel's tunnels do. One that is deaf receives nothing.
func bind(family, port int, deaf bool) (*net.UDPConn, error) {
	l := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
		if err := mmsg.Prepare(network, address, c); err != nil {
			return err
		}
		var err error
		if e := c.Control(func(fd uintptr) { err = prepare(int(fd), family, deaf) }); e != nil {
			return e
		}
		return err
	}}
	c, err := l.ListenPacket(context.Background(), networks[family], ":"+strconv.Itoa(port))
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("opening UDP port %d for FoU: %w: another program has it in this network namespace; stop it",
			port, err)
	}
	if err != nil {
		return nil, fmt.Errorf("opening UDP port %d for FoU: %w", port, err)
	}
	return c.(*net.UDPConn), nil
}

func prepare(fd, family int, deaf bool) error {
	type option struct{ level, name, value int }
	options := []option{{unix.IPPROTO_IP, unix.IP_TTL, dataplane.FoUTTL}, {unix.IPPROTO_IP, unix.IP_MTU_DISCOVER,
		unix.IP_PMTUDISC_DO},
		{unix.IPPROTO_IP, unix.IP_RECVTOS, 1}}
	if family == 1 {
		options = []option{{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, dataplane.FoUTTL},
			{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1},
			{unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1}} // others' tunnels may send without a checksum (RFC 6935)
	}
	if deaf {
		options = append(options, option{unix.SOL_SOCKET, unix.SO_RCVBUF, 0})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("setting socket option %d of level %d: %w", o.name, o.level, err)
		}
	}
	if !deaf {
		return nil
	}
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
}

// pathMTU is the largest packet that the kernel knows to pass to an address, in bytes; 0 if it does not know.
func (s *sockets) pathMTU(to netip.AddrPort) (mtu int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	raw, err := s.way.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		var name unix.Sockaddr = &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
		level, option := unix.IPPROTO_IPV6, unix.IPV6_MTU
		if s.family == 0 {
			name, level, option = &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}, unix.IPPROTO_IP, unix.IP_MTU
		}
		if unix.Connect(int(fd), name) != nil {
			return
		}
		if n, err := unix.GetsockoptInt(int(fd), level, option); err == nil {
			mtu = n
		}
	})
	return mtu
}

func (s *sockets) close() {
	for _, c := range append(s.auto, s.way) {
		c.Close()
	}
	for _, e := range s.taken {
		e.conn.Close()
	}
}
