package events

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
)

// nextIPv4 is the next free address after the one given last, and from the start of the pool again
// after its end. So an address rests as long as it can before anybody gets it again; those of revoked
// nodes are never given again.
func (s *State) nextIPv4() (netip.Addr, error) {
	pool, err := netip.ParsePrefix(s.Cluster().GetOverlayIpv4())
	if err != nil || !pool.Addr().Is4() || pool.Bits() > 30 {
		return netip.Addr{}, refuse(FailedPrecondition, "the cluster's overlay %q is no usable IPv4 prefix", s.Cluster().GetOverlayIpv4())
	}
	network := number(pool.Masked().Addr())
	hosts := uint32(1)<<(32-pool.Bits()) - 2 // without the network's own and the broadcast address
	at := uint32(0)                          // offset of the last one given
	if pool.Contains(s.newest.ipv4) {
		at = number(s.newest.ipv4) - network
	}
	for range hosts {
		if at++; at > hosts {
			at = 1
		}
		a := address(network + at)
		if !s.taken(&s.addresses, a.String(), "") {
			return a, nil
		}
	}
	return netip.Addr{}, s.overlayFull(pool)
}

func (s *State) overlayFull(pool netip.Prefix) error {
	hosts := uint32(1)<<(32-pool.Bits()) - 2
	return refuse(ResourceExhausted,
		"the overlay %s is full: its %d addresses belong to %s%s; addresses of revoked nodes are not given again and an overlay cannot grow, so make a cluster with a larger one (overlay.ipv4 in skein.yaml, then skein up --init)",
		pool, hosts, s.users(), s.resting())
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
