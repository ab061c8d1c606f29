package ownrecord

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/addr"
)

// WithOwn adds a host's private addresses to the networks behind it, sorted, those that are not in one of them already.
func WithOwn(networks []string, addrs []netip.Addr) []string {
	out := slices.Clone(networks)
	sorted := slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)
	for _, a := range slices.Compact(sorted) {
		p := netip.PrefixFrom(a, a.BitLen())
		if addr.Private(p) && !events.Covered(p.String(), networks) {
			out = append(out, p.String())
		}
	}
	return out
}

// JoinAddresses are the addresses of a member's port for relay sessions and joiners.
func JoinAddresses(r *skeinv1.Record) []string {
	return slices.Concat(r.GetRelay().GetAddresses(), r.GetJoinAddresses())
}

// WithRelayPort gives hosts the port at which each is dialed: outside is the one that forwards to this host, under a
// number of its own if there is one.
func WithRelayPort(hosts []string, outside string, p config.Ports) (out []string) {
	for _, h := range hosts {
		port := p.Relay
		if h == outside {
			port = cmp.Or(p.RelayOutside, p.Relay)
		}
		out = append(out, net.JoinHostPort(h, strconv.Itoa(int(port))))
	}
	return out
}

// WithPort gives all hosts one port.
func WithPort(hosts []string, port uint16) []string {
	var out []string
	for _, h := range hosts {
		out = append(out, net.JoinHostPort(h, strconv.Itoa(int(port))))
	}
	return out
}

// Elastic are the addresses that a cloud translates to this host one to one, so that all of its ports are reached
// there: the metadata service names them, and what STUN servers see from outside must not be another. A port that a
// router forwards is none: it forwards WireGuard's alone, and neither the relay's nor STUN's.
func Elastic(n *candidate.Result) (out []netip.Addr) {
	if n == nil {
		return nil
	}
	for _, ip := range n.Elastic {
		other := func(o candidate.Observation) bool {
			return o.Mapped.Addr().Is4() == ip.Is4() && !slices.Contains(n.Elastic, o.Mapped.Addr())
		}
		if addr.Public(ip) && !slices.ContainsFunc(n.Mapped, other) {
			out = append(out, ip)
		}
	}
	return out
}
