package resolve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"
)

const patience = 2 * time.Second // for one name

var errNoAddress = errors.New("the name has no address")

// Lookup finds the addresses of a host name.
type Lookup func(ctx context.Context, host string) ([]netip.Addr, error)

// System asks the host's own resolver.
func System(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// Split takes host:port, or a host alone when there is a default port.
func Split(s, port string) (string, uint16, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil && port != "" {
		host, p, err = net.SplitHostPort(net.JoinHostPort(s, port))
	}
	if err != nil {
		return "", 0, fmt.Errorf("endpoint %q: %w; want host:port", s, err)
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 || host == "" {
		return "", 0, fmt.Errorf("endpoint %q: want host:port with a port from 1 to 65535", s)
	}
	return host, uint16(n), nil
}

// Names looks names up and keeps the last answer for when the name service is away. It is safe for concurrent use.
type Names struct {
	lookup Lookup
	mu     sync.Mutex
	known  map[string][]netip.Addr
}

// New makes one; nil asks the host's own resolver.
func New(l Lookup) *Names {
	if l == nil {
		l = System
	}
	return &Names{lookup: l, known: map[string][]netip.Addr{}}
}

// Endpoint gives the addresses of host:port, IPv4 first; port is the default where s names none.
func (r *Names) Endpoint(ctx context.Context, s, port string) ([]netip.AddrPort, error) {
	host, p, err := Split(s, port)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, a)
	} else {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		found, err := r.lookup(ctx, host)
		if addrs = r.remember(host, found, err); len(addrs) == 0 {
			return nil, fmt.Errorf("look up %q: %w", host, cmp.Or(err, errNoAddress))
		}
	}
	var out []netip.AddrPort
	for _, is := range []func(netip.Addr) bool{netip.Addr.Is4, netip.Addr.Is6} {
		for _, a := range addrs {
			if a = a.Unmap(); is(a) {
				out = append(out, netip.AddrPortFrom(a, p))
			}
		}
	}
	return out, nil
}

func (r *Names) remember(host string, found []netip.Addr, err error) []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.known[host] = found
	}
	return r.known[host]
}
