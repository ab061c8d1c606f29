package candidate

import (
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Priorities of candidates; relays are no business of this package.
const (
	PriorityForced    = 300
	PriorityReflexive = 200
	PriorityHost      = 100
	PrioritySymmetric = 50 // a reflexive address that holds for the STUN server alone
)

// Result is what a discovery found. It is never changed after it was made.
type Result struct {
	NAT        skeinv1.NatType
	Candidates []*skeinv1.Candidate
	Mapped     []Observation
	Mapping    Behaviour
	Filtering  Behaviour
	UDP        bool // some STUN server answered
	IPv4       bool // works towards the internet, or is at least there when nobody could be asked
	IPv6       bool
	Hairpin    bool // the NAT turns packets to its own outside address round
	Preserving bool // the NAT leaves WireGuard's port its number
	PortStep   int  // a symmetric NAT's next mapping has the last one's port plus this; 0: not predictable
	Advice     []string
	At         time.Time
}

// Equal compares what others would care for: not when it was measured, nor the round-trip times.
func (r Result) Equal(o Result) bool {
	return r.NAT == o.NAT && r.Mapping == o.Mapping && r.Filtering == o.Filtering &&
		r.UDP == o.UDP && r.IPv4 == o.IPv4 && r.IPv6 == o.IPv6 && r.Hairpin == o.Hairpin &&
		r.Preserving == o.Preserving && r.PortStep == o.PortStep &&
		slices.Equal(r.Advice, o.Advice) && r.sameCandidates(o) &&
		slices.EqualFunc(r.Mapped, o.Mapped, func(a, b Observation) bool { return a.Server == b.Server && a.Mapped == b.Mapped })
}

// Traits is what a record says of the NAT beyond its type.
func (r Result) Traits() *skeinv1.NatTraits {
	return &skeinv1.NatTraits{
		Mapping: behaviours[r.Mapping], Filtering: behaviours[r.Filtering], Hairpin: r.Hairpin,
		PortPreserving: r.Preserving, PortStep: int32(r.PortStep),
	}
}

var behaviours = map[Behaviour]skeinv1.NatBehaviour{
	EndpointIndependent:     skeinv1.NatBehaviour_NAT_BEHAVIOUR_ENDPOINT_INDEPENDENT,
	AddressDependent:        skeinv1.NatBehaviour_NAT_BEHAVIOUR_ADDRESS_DEPENDENT,
	AddressAndPortDependent: skeinv1.NatBehaviour_NAT_BEHAVIOUR_ADDRESS_AND_PORT_DEPENDENT,
}

func (r Result) sameCandidates(o Result) bool {
	return slices.EqualFunc(r.Candidates, o.Candidates, func(a, b *skeinv1.Candidate) bool {
		return a.Type == b.Type && a.Address == b.Address && a.Priority == b.Priority && a.Source == b.Source
	})
}

// findings are what one run saw.
type findings struct {
	port     uint16
	local    []netip.Addr
	internal netip.Addr // from the configuration
	forced   []netip.AddrPort
	v4, v6   Evidence
	hairpin  bool
	kept     bool // nobody answered this time; v4, v6 and hairpin are those of the last time somebody did
	at       time.Time
}

// result draws the conclusions.
func (f findings) result() Result {
	a4, a6 := Assess(f.v4), Assess(f.v6)
	seen4, seen6 := len(f.v4.Observations) > 0, len(f.v6.Observations) > 0
	main := a4
	if !seen4 && (seen6 || f.v4.Servers == 0 && f.v6.Servers > 0) {
		main = a6 // IPv4 says nothing, IPv6 does
	}
	if f.v4.Servers == 0 && f.v6.Servers == 0 {
		main = Assess(Evidence{Port: f.port, Local: f.local})
	}
	r := Result{
		NAT: main.NAT, Mapping: main.Mapping, Filtering: main.Filtering, Advice: main.Advice,
		Preserving: main.Preserving, PortStep: main.PortStep,
		Mapped: slices.Concat(f.v4.Observations, f.v6.Observations),
		UDP:    seen4 || seen6, Hairpin: f.hairpin, At: f.at,
		IPv4: seen4 || f.v4.Servers == 0 && slices.ContainsFunc(f.local, netip.Addr.Is4),
		IPv6: seen6 || f.v6.Servers == 0 && slices.ContainsFunc(f.local, netip.Addr.Is6),
	}
	if f.kept {
		r.UDP = false
		r.Advice = append(r.Advice, "no STUN server answers now: what was known of the NAT stays in use, and they are asked again")
	}
	add := func(t skeinv1.CandidateType, address netip.AddrPort, priority uint32, source string) {
		s := address.String()
		if !slices.ContainsFunc(r.Candidates, func(c *skeinv1.Candidate) bool { return c.Address == s }) {
			r.Candidates = append(r.Candidates, &skeinv1.Candidate{Type: t, Address: s, Priority: priority, Source: source})
		}
	}
	for _, a := range f.forced {
		add(skeinv1.CandidateType_CANDIDATE_TYPE_FORCED, a, PriorityForced, "config")
	}
	for _, a := range []Assessment{a4, a6} {
		switch {
		case !a.Translated:
		case a.NAT == skeinv1.NatType_NAT_TYPE_SYMMETRIC:
			add(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, a.Mapped, PrioritySymmetric, "stun")
		default:
			add(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, a.Mapped, PriorityReflexive, "stun")
		}
	}
	if f.internal.IsValid() {
		add(skeinv1.CandidateType_CANDIDATE_TYPE_HOST, netip.AddrPortFrom(f.internal, f.port), PriorityHost, "config")
	}
	for _, a := range f.local {
		add(skeinv1.CandidateType_CANDIDATE_TYPE_HOST, netip.AddrPortFrom(a, f.port), PriorityHost, "interface")
	}
	return r
}

// translated reports whether some NAT keeps a mapping for us that needs refreshing.
func (f findings) translated() bool { return Assess(f.v4).Translated || Assess(f.v6).Translated }
