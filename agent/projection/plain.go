package projection

import (
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/plainpeer"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Plain is what a host knows of plain peers, beside the log and the records.
type Plain struct {
	Carrying bool              // this host answers some
	Terms    map[uint64]uint64 // its own claims, by the peers' created_index
	Now      time.Time         // by the leader's clock; zero: none of them expires
}

// PlainExpired reports whether a plain peer's time is over.
func PlainExpired(p *skeinv1.PlainPeer, now time.Time) bool {
	return p.GetExpiresAt() != 0 && !now.IsZero() && now.UnixNano() >= p.GetExpiresAt()
}

// PlainPrefixes are the addresses of a plain peer and the networks behind it.
func PlainPrefixes(p *skeinv1.PlainPeer) (out []netip.Prefix) {
	for _, text := range []string{p.GetIpv4(), p.GetIpv6()} {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	for _, text := range p.GetAllowedIps() {
		if n, err := netip.ParsePrefix(text); err == nil {
			out = append(out, n)
		}
	}
	return out
}

// PlainNetworks are the networks behind plain peers.
func PlainNetworks(s *events.State) []netip.Prefix { return plainNetworks(s) }

func plainNetworks(s *events.State) (out []netip.Prefix) {
	for _, p := range s.PlainPeers() {
		for _, text := range p.GetAllowedIps() {
			if n, err := netip.ParsePrefix(text); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

// PlainCarriers are a plain peer's carriers that are members, in order.
func PlainCarriers(s *events.State, p *skeinv1.PlainPeer) (out []identity.ID) {
	for _, c := range p.GetCarriers() {
		if id, err := identity.ParseID(c.GetNodeId()); err == nil && s.Node(id) != nil {
			out = append(out, id)
		}
	}
	return out
}

// PlainTerms are what carriers say of a plain peer in their records.
func PlainTerms(index uint64, carriers []identity.ID, record func(identity.ID) *skeinv1.Record) map[identity.ID]uint64 {
	out := map[identity.ID]uint64{}
	for _, id := range carriers {
		for _, c := range record(id).GetPlainSessions() {
			if c.GetPeer() == index {
				out[id] = max(out[id], c.GetTerm())
			}
		}
	}
	return out
}

// plainPeers are the prefixes of plain peers by the node that they are reached through: the carrier that holds the
// peer or, where none
// says so, the one that the peer asks first.
func (in *Input) plainPeers() map[identity.ID][]netip.Prefix {
	out := map[identity.ID][]netip.Prefix{}
	for _, p := range in.State.PlainPeers() {
		carriers := PlainCarriers(in.State, p)
		if len(carriers) == 0 || PlainExpired(p, in.Plain.Now) {
			continue
		}
		terms := PlainTerms(p.GetCreatedIndex(), carriers,
			func(id identity.ID) *skeinv1.Record { return in.Records[id] })
		delete(terms, in.Self)
		if t := in.Plain.Terms[p.GetCreatedIndex()]; t > 0 {
			terms[in.Self] = t
		}
		holder, ok := plainpeer.Holder(carriers, terms)
		if !ok {
			holder = carriers[0]
		}
		out[holder] = append(out[holder], PlainPrefixes(p)...)
	}
	return out
}
