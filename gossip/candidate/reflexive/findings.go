package reflexive

import (
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

// findings are what one run saw.
type findings struct {
	port    uint16
	local   []netip.Addr
	v4, v6  Evidence
	hairpin bool
	kept    bool // nobody answered this time; v4, v6 and hairpin are those of the last time somebody did
	spare   bool // no STUN server answered, but WireGuard ports of peers did
	off     bool // nobody is to be asked
	at      time.Time
}

// report draws the conclusions.
func (f findings) report() candidate.NATReport {
	a4, a6 := Assess(f.v4), Assess(f.v6)
	seen4, seen6 := len(f.v4.Observations) > 0, len(f.v6.Observations) > 0
	main := a4
	if !seen4 && (seen6 || f.v4.Servers == 0 && f.v6.Servers > 0) {
		main = a6 // IPv4 says nothing, IPv6 does
	}
	if f.v4.Servers == 0 && f.v6.Servers == 0 {
		main = Assess(Evidence{Port: f.port, Local: f.local, Off: f.off})
	}
	r := candidate.NATReport{
		NAT: main.NAT, Mapping: main.Mapping, Filtering: main.Filtering, Advice: main.Advice,
		Preserving: main.Preserving, PortStep: main.PortStep,
		Mapped: slices.Concat(f.v4.Observations, f.v6.Observations),
		UDP:    seen4 || seen6, Hairpin: f.hairpin, At: f.at,
		IPv4: seen4 || f.v4.Servers == 0 && slices.ContainsFunc(f.local, netip.Addr.Is4),
		IPv6: seen6 || f.v6.Servers == 0 && slices.ContainsFunc(f.local, netip.Addr.Is6),
	}
	if f.kept {
		r.UDP = false
		r.Advice = append(r.Advice, "no STUN server answers now: what was known of the NAT stays in use, and they are "+
			"asked again")
	}
	if f.spare {
		r.Advice = append(r.Advice, "STUN servers do not answer here, WireGuard ports of peers do: something drops the "+
			"STUN port; direct paths work all the same")
	}
	return r
}

// candidates are the addresses outside that are worth telling.
func (f findings) candidates() (out []*skeinv1.Candidate) {
	for _, a := range []Assessment{Assess(f.v4), Assess(f.v6)} {
		if !a.Translated {
			continue
		}
		priority := uint32(candidate.PriorityReflexive)
		if a.NAT == skeinv1.NatType_NAT_TYPE_SYMMETRIC {
			priority = candidate.PrioritySymmetric
		}
		out = append(out, candidate.Make(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, a.Mapped, priority, "stun"))
	}
	return out
}

// trusted are the observations that count.
func (f findings) trusted() []candidate.Observation {
	v4, _ := f.v4.believed()
	v6, _ := f.v6.believed()
	return slices.Concat(v4, v6)
}

// translated reports whether some NAT keeps a mapping for us that needs refreshing.
func (f findings) translated() bool { return Assess(f.v4).Translated || Assess(f.v6).Translated }
