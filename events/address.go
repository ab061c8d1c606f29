package events

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// nextIPv4 is the next free address after the one given last, and from the start of the pool again
// after its end. So an address rests as long as it can before anybody gets it again; those of revoked
// nodes are never given again.
func (s *State) nextIPv4() (netip.Addr, error) {
	pool, err := netip.ParsePrefix(s.Cluster().GetOverlayIpv4())
	if err != nil || !pool.Addr().Is4() || pool.Bits() > 30 {
		return netip.Addr{}, refuse(FailedPrecondition, "the cluster's overlay %q is not a usable IPv4 prefix",
			s.Cluster().GetOverlayIpv4())
	}
	network := number(pool.Masked().Addr())
	hosts := uint32(1)<<(32-pool.Bits()) - 2 // without the network's own and the broadcast address
	at := uint32(0)                          // offset of the last one given
	if pool.Contains(s.newest.ipv4) {
		at = number(s.newest.ipv4) - network
	}
	// What lies in a site's range is for that site, as long as there is anything else.
	for _, ranges := range [][]SiteRange{s.SiteRangesOf(""), nil} {
		for left := hosts; left > 0; left-- {
			if at++; at > hosts {
				at = 1
			}
			a := address(network + at)
			if in := slices.IndexFunc(ranges, func(r SiteRange) bool { return r.IPv4.Contains(a) }); in >= 0 {
				rest := min(number(last(ranges[in].IPv4))-network-at, left-1)
				at, left = at+rest, left-rest
				continue
			}
			if !s.taken(&s.addresses, a.String(), "") {
				return a, nil
			}
		}
	}
	return netip.Addr{}, s.overlayFull(pool)
}

func (s *State) overlayFull(pool netip.Prefix) error {
	hosts := uint32(1)<<(32-pool.Bits()) - 2
	return refuse(ResourceExhausted,
		"the overlay %s is full: its %d addresses belong to %s%s; addresses of revoked nodes are never reused and an "+
			"overlay cannot grow, so make a cluster with a larger one (overlay.ipv4 in skein.yaml, then skein up --init)",
		pool, hosts, s.users(), s.resting())
}

// last is the last address of an IPv4 prefix.
func last(p netip.Prefix) netip.Addr {
	return address(number(p.Addr()) | (uint32(1)<<(32-p.Bits()) - 1))
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func address(n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}

// users names the live nodes, the first few by name.
func (s *State) users() string {
	const shown = 10
	var names []string
	for n := range s.nodes.all() {
		if len(names) == shown {
			names = append(names, "…")
			break
		}
		names = append(names, n.GetName())
	}
	return fmt.Sprintf("%d nodes (%s)", s.nodes.n, strings.Join(names, ", "))
}

func (s *State) resting() string {
	var out string
	if s.revoked.n > 0 {
		out = fmt.Sprintf(" and to %d revoked ones", s.revoked.n)
	}
	if s.plain.n > 0 {
		out += fmt.Sprintf(" and to %d plain peers", s.plain.n)
	}
	return out
}
