package reflexive

import (
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/gossip/candidate"
)

// believed splits what was seen from furthest out into what counts and what does not. A server may lie, or be wrong:
// one that names somebody else's address would turn every cone into a symmetric NAT and have peers shoot at a stranger.
// So servers vote, one voice for each address: where more than half of at least three agree on an address, and then on
// the port as well, the others are not believed. Of two that disagree, the one that names this host's own address is
// right, since nobody else has it.
func (e Evidence) believed() (kept, lies []candidate.Observation) {
	kept = e.vantage()
	for _, agree := range []func(a, b netip.AddrPort) bool{
		func(a, b netip.AddrPort) bool { return a.Addr() == b.Addr() },
		func(a, b netip.AddrPort) bool { return a == b },
	} {
		winner, ok := e.vote(kept, agree)
		if !ok {
			continue
		}
		against := dissenters(kept, func(o candidate.Observation) bool { return agree(o.Mapped, winner) })
		lies = append(lies, filter(kept, func(o candidate.Observation) bool { return against[o.Server.Addr()] })...)
		kept = filter(kept, func(o candidate.Observation) bool { return !against[o.Server.Addr()] })
	}
	return kept, lies
}

// vote finds what the servers agree on, if they do.
func (e Evidence) vote(seen []candidate.Observation, agree func(a, b netip.AddrPort) bool) (netip.AddrPort, bool) {
	voters := dissenters(seen, func(candidate.Observation) bool { return false })
	for _, o := range seen {
		against := dissenters(seen, func(other candidate.Observation) bool { return agree(other.Mapped, o.Mapped) })
		if len(voters) >= 3 && 2*len(against) < len(voters) || len(voters) == 2 && len(against) == 1 &&
			!against[o.Server.Addr()] && e.isLocal(o.Mapped) {
			return o.Mapped, true
		}
	}
	return netip.AddrPort{}, false
}

// dissenters are the addresses of servers of which any observation fails.
func dissenters(seen []candidate.Observation, ok func(candidate.Observation) bool) map[netip.Addr]bool {
	out := map[netip.Addr]bool{}
	for _, o := range seen {
		if !ok(o) {
			out[o.Server.Addr()] = true
		}
	}
	return out
}

func filter(seen []candidate.Observation, keep func(candidate.Observation) bool) []candidate.Observation {
	return slices.DeleteFunc(slices.Clone(seen), func(o candidate.Observation) bool { return !keep(o) })
}
