package probe

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	sourceTTL  = 2 * time.Second // a changed route shows after this, or at once when sending fails
	maxSources = 4096
)

// sources tells which IPv4 address the kernel would send from. It asks by connecting a UDP socket that
// carries the mark, which sends nothing and follows the same rules as WireGuard's packets.
type sources struct {
	mu    sync.Mutex
	fd    int // -1: closed
	cache map[netip.Addr]source
}

type source struct {
	addr netip.Addr
	at   time.Time
}

func openSources(mark uint32) (*sources, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open route lookup socket: %w", err)
	}
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("set mark on route lookup socket: %w", err)
		}
	}
	return &sources{fd: fd, cache: make(map[netip.Addr]source)}, nil
}

func (s *sources) lookup(to netip.Addr, now time.Time) (netip.Addr, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := s.cache[to]; ok && now.Sub(e.at) < sourceTTL {
		return e.addr, nil
	}
	addr, err := s.ask(to)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("find the source address: %w", err)
	}
	if len(s.cache) >= maxSources {
		clear(s.cache)
	}
	s.cache[to] = source{addr: addr, at: now}
	return addr, nil
}

func (s *sources) ask(to netip.Addr) (netip.Addr, error) {
	if s.fd < 0 {
		return netip.Addr{}, unix.EBADF
	}
	// The former answer stays bound to the socket until it is disconnected.
	unspec := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	if err := disconnect(s.fd, &unspec); err != nil {
		return netip.Addr{}, err
	}
	if err := unix.Connect(s.fd, &unix.SockaddrInet4{Addr: to.As4(), Port: 9}); err != nil {
		return netip.Addr{}, err
	}
	name, err := unix.Getsockname(s.fd)
	if err != nil {
		return netip.Addr{}, err
	}
	local, ok := name.(*unix.SockaddrInet4)
	if !ok || local.Addr == [4]byte{} {
		return netip.Addr{}, unix.EADDRNOTAVAIL
	}
	return netip.AddrFrom4(local.Addr), nil
}

func (s *sources) forget(to netip.Addr) {
	s.mu.Lock()
	delete(s.cache, to)
	s.mu.Unlock()
}

func (s *sources) close() {
	s.mu.Lock()
	if s.fd >= 0 {
		unix.Close(s.fd)
		s.fd = -1
	}
	s.mu.Unlock()
}
