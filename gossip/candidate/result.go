package candidate

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Priorities of candidates: the highest is tried first. A LAN's address comes before what others see, since it is the
// shorter way wherever it works at all, as RFC 8445 section 5.1.2 has it too.
const (
	PriorityForced    = 300
	PriorityHost      = 250
	PriorityReflexive = 200 // also of what a router or a cloud's metadata service grants
	PrioritySymmetric = 50  // a reflexive address that holds for the STUN server alone
	PriorityRelay     = 10
)

// oldHost is what agents published for host candidates while they tried them before those of 200. They never read it.
const oldHost = 100

// Priority is that of a record's candidate: as the record has it, but for the hosts' of older agents and where it has
// none.
func Priority(c *skeinv1.Candidate) uint32 {
	p := c.GetPriority()
	if p == 0 || p == oldHost && c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_HOST {
		return PriorityOf(c.GetType())
	}
	return p
}

// Sorted is a copy of a record's candidates in the order in which they are tried.
func Sorted(cs []*skeinv1.Candidate) []*skeinv1.Candidate {
	out := slices.Clone(cs)
	slices.SortStableFunc(out, func(a, b *skeinv1.Candidate) int { return cmp.Compare(Priority(b), Priority(a)) })
	return out
}

// PriorityOf is the priority of a type of candidate.
func PriorityOf(t skeinv1.CandidateType) uint32 {
	switch t {
	case skeinv1.CandidateType_CANDIDATE_TYPE_FORCED:
		return PriorityForced
	case skeinv1.CandidateType_CANDIDATE_TYPE_HOST:
		return PriorityHost
	case skeinv1.CandidateType_CANDIDATE_TYPE_RELAY:
		return PriorityRelay
	}
	return PriorityReflexive
}

// maxCandidates is what a record may hold.
const maxCandidates = 64

// Behaviour is how a NAT maps or filters, in the words of RFC 4787.
type Behaviour string

// Behaviours of mapping and of filtering.
const (
	Unknown                 Behaviour = "unknown"
	EndpointIndependent     Behaviour = "endpoint-independent"
	AddressDependent        Behaviour = "address-dependent"
	AddressAndPortDependent Behaviour = "address-and-port-dependent"
)

// NATName is a kind of NAT as people read it and write it, such as port-restricted-cone.
func NATName(n skeinv1.NatType) string {
	return strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(n.String(), "NAT_TYPE_")), "_", "-")
}

// Observation is what one STUN server saw as the address of WireGuard's port.
type Observation struct {
	Server netip.AddrPort
	Mapped netip.AddrPort
	RTT    time.Duration
}

// String is the observation as people read it.
func (o Observation) String() string { return fmt.Sprintf("%s: %s", o.Server, o.Mapped) }

// NATReport is what is known of the NAT in front of this host.
type NATReport struct {
	NAT        skeinv1.NatType
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

// equal compares what others would care for: not when it was measured, nor the round-trip times.
func (n NATReport) equal(o NATReport) bool {
	return n.NAT == o.NAT && n.Mapping == o.Mapping && n.Filtering == o.Filtering &&
		n.UDP == o.UDP && n.IPv4 == o.IPv4 && n.IPv6 == o.IPv6 && n.Hairpin == o.Hairpin &&
		n.Preserving == o.Preserving && n.PortStep == o.PortStep && slices.Equal(n.Advice, o.Advice) &&
		slices.EqualFunc(n.Mapped, o.Mapped, func(a, b Observation) bool {
			return a.Server == b.Server && a.Mapped == b.Mapped
		})
}

// Result is what all steps found together. It is never changed after it was made.
type Result struct {
	NATReport
	Candidates []*skeinv1.Candidate
	Notes      []Note
	Problems   []Problem
	Host       Host
	Elastic    []netip.Addr // what a cloud's metadata service calls this host's addresses outside: all ports lead here
}

// Problem is what an operator should repair.
type Problem struct{ Source, Text, Help string }

// Equal compares what others would care for.
func (r Result) Equal(o Result) bool {
	return r.equal(o.NATReport) && r.SameCandidates(o) && slices.Equal(r.Notes, o.Notes) && slices.Equal(r.Problems,
		o.Problems) && r.Host.Equal(o.Host) && slices.Equal(r.Elastic, o.Elastic)
}

// SameCandidates compares the candidates alone.
func (r Result) SameCandidates(o Result) bool { return SameCandidates(r.Candidates, o.Candidates) }

// SameCandidates compares two lists of candidates.
func SameCandidates(a, b []*skeinv1.Candidate) bool {
	return slices.EqualFunc(a, b, func(x, y *skeinv1.Candidate) bool { return proto.Equal(x, y) })
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

// merge makes one Result of what the steps found, in their order: the first to name an address has it.
func merge(host Host, steps []Step, found []Found) Result {
	r := Result{Host: host}
	seen := map[string]bool{}
	for i, f := range found {
		for _, c := range f.Candidates {
			if !seen[c.Address] && len(r.Candidates) < maxCandidates {
				seen[c.Address] = true
				r.Candidates = append(r.Candidates, c)
			}
		}
		if f.NAT != nil {
			r.NATReport = *f.NAT
		}
		r.Notes, r.Elastic = append(r.Notes, f.Notes...), append(r.Elastic, f.Elastic...)
		if f.Problem != "" {
			r.Problems = append(r.Problems, Problem{Source: steps[i].Source(), Text: f.Problem, Help: f.Help})
		}
	}
	return r
}

// Make is a candidate of a step's source.
func Make(t skeinv1.CandidateType, address netip.AddrPort, priority uint32, source string) *skeinv1.Candidate {
	return &skeinv1.Candidate{Type: t, Address: address.String(), Priority: priority, Source: source}
}
