package candidate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"
)

const (
	resolveTime = 2 * time.Second
	maxServers  = 4 // asked per address family and run
	defaultPort = "3478"
)

var errNoAddress = errors.New("the name has no address")

// lookup finds the addresses of a host name.
type lookup func(ctx context.Context, host string) ([]netip.Addr, error)

func systemLookup(ctx context.Context, host string) ([]netip.Addr, error) {
	return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
}

// splitEndpoint takes host:port, or a host alone when there is a default port.
func splitEndpoint(s, port string) (string, uint16, error) {
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

// resolver looks names up and keeps the last answer for when the name service is away.
type resolver struct {
	lookup lookup
	mu     sync.Mutex
	known  map[string][]netip.Addr
}

// endpoint gives the addresses of host:port, IPv4 first.
func (r *resolver) endpoint(ctx context.Context, s, port string) ([]netip.AddrPort, error) {
	host, p, err := splitEndpoint(s, port)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, a)
	} else {
		ctx, cancel := context.WithTimeout(ctx, resolveTime)
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

func (r *resolver) remember(host string, found []netip.Addr, err error) []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.known[host] = found
	}
	return r.known[host]
}

// chooseServers picks whom to ask: those that answered last, then the others, starting further on at every attempt so that
// dead ones at the head of a long list are passed over. One port of an address is enough: the server names the other.
func chooseServers(all []netip.AddrPort, answered map[netip.AddrPort]bool, attempt int) []netip.AddrPort {
	var good, rest []netip.AddrPort
	for _, s := range all {
		if answered[s] {
			good = append(good, s)
		} else {
			rest = append(rest, s)
		}
	}
	if n := len(rest); n > maxServers {
		k := attempt * maxServers % n
		rest = slices.Concat(rest[k:], rest[:k])
	}
	var out []netip.AddrPort
	count := map[bool]int{}
	for _, s := range slices.Concat(good, rest) {
		known := slices.ContainsFunc(out, func(o netip.AddrPort) bool { return o.Addr() == s.Addr() })
		if !known && count[s.Addr().Is4()] < maxServers {
			count[s.Addr().Is4()]++
			out = append(out, s)
		}
	}
	return out
}
