package wireguard

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// State is the configuration a device has, or shall have.
type State struct {
	PrivateKey dataplane.Key
	Port       int
	Mark       uint32
	Peers      map[dataplane.Key]dataplane.Peer
}

// Want turns a Spec's part into comparable form: prefixes masked, sorted and unique, addresses
// unmapped, keepalive in whole seconds, every prefix with one owner. A prefix that two peers claim
// stays with the lower key, and a note tells of it.
func Want(w dataplane.WireGuard) (State, []string) {
	s := State{PrivateKey: clamped(w.PrivateKey), Port: w.Port, Mark: w.Mark,
		Peers: make(map[dataplane.Key]dataplane.Peer, len(w.Peers))}
	var notes []string
	owners := make(map[netip.Prefix]dataplane.Key, 2*len(w.Peers))
	var contested []netip.Prefix
	for k, p := range w.Peers {
		p.AllowedIPs = normal(p.AllowedIPs)
		p.Endpoint = unmapped(p.Endpoint)
		p.Keepalive = p.Keepalive.Truncate(time.Second)
		s.Peers[k] = p
		for _, ip := range p.AllowedIPs {
			o, taken := owners[ip]
			if taken {
				contested = append(contested, ip)
			}
			if !taken || k.Compare(o) < 0 {
				owners[ip] = k
			}
		}
	}
	slices.SortFunc(contested, netip.Prefix.Compare)
	for _, ip := range slices.Compact(contested) {
		for k, p := range s.Peers {
			if owners[ip] == k || !slices.Contains(p.AllowedIPs, ip) {
				continue
			}
			p.AllowedIPs = slices.DeleteFunc(slices.Clone(p.AllowedIPs), func(x netip.Prefix) bool { return x == ip })
			s.Peers[k] = p
			notes = append(notes, "two peers claim "+ip.String()+": "+owners[ip].Short()+" keeps it, "+k.Short()+
				" does not get it")
		}
	}
	slices.Sort(notes)
	return s, notes
}

// clamped is the form in which a device gives a private key back.
func clamped(k dataplane.Key) dataplane.Key {
	if !k.IsZero() {
		k[0] &= 248
		k[31] = k[31]&127 | 64
	}
	return k
}

// normal returns the prefixes masked, sorted and unique; the same slice if they are already.
func normal(ps []netip.Prefix) []netip.Prefix {
	ok := true
	for i, p := range ps {
		if p != p.Masked() || p.Addr().Is4In6() || i > 0 && ps[i-1].Compare(p) >= 0 {
			ok = false
			break
		}
	}
	if ok {
		return ps
	}
	out := make([]netip.Prefix, 0, len(ps))
	for _, p := range ps {
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if p.IsValid() {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out)
}

func unmapped(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

func (s State) clone() State {
	s.Peers = maps.Clone(s.Peers)
	if s.Peers == nil {
		s.Peers = map[dataplane.Key]dataplane.Peer{}
	}
	return s
}

func sortedKeys[V any](m map[dataplane.Key]V) []dataplane.Key {
	return slices.SortedFunc(maps.Keys(m), dataplane.Key.Compare)
}
