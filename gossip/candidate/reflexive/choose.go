package reflexive

import (
	"net/netip"
	"slices"
)

const (
	maxServers  = 4 // asked per address family and run
	defaultPort = "3478"
)

// chooseServers picks whom to ask: those that answered last, then the others, starting further on at every attempt so
// that dead ones at the head of a long list are passed over. One port of an address is enough: the server names the
// other.
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
