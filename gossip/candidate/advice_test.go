package candidate

import (
	"net/netip"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestAdvice(t *testing.T) {
	srflx := func(source string) []*skeinv1.Candidate {
		return []*skeinv1.Candidate{Make(skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX,
			netip.MustParseAddrPort("198.51.100.9:7"), PriorityReflexive, source)}
	}
	notes := func(text string) []Note {
		return []Note{{Source: "pcp", Text: text}, {Source: "upnp", Text: "the router does not answer"}}
	}
	mapped := []Observation{{Server: netip.MustParseAddrPort("203.0.113.1:3478"),
		Mapped: netip.MustParseAddrPort("198.51.100.9:7")}}
	own := Host{Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.9")}}
	const (
		none = skeinv1.NatType_NAT_TYPE_NONE
		port = skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE
		sym  = skeinv1.NatType_NAT_TYPE_SYMMETRIC
		full = skeinv1.NatType_NAT_TYPE_FULL_CONE
	)
	tests := []struct {
		name string
		r    Result
		want string // one of the lines; empty: none at all
	}{
		{"public", Result{NATReport: NATReport{NAT: none}}, ""},
		{"full cone", Result{NATReport: NATReport{NAT: full}}, ""},
		{"the NAT's own advice stays", Result{NATReport: NATReport{NAT: none, Advice: []string{"name stunServers"}}},
			"name stunServers"},
		{"mapped by the router", Result{NATReport: NATReport{NAT: sym, Advice: []string{"hopeless"}},
			Candidates: srflx("upnp")}, "nothing to do: the router forwards UDP at 198.51.100.9:7 to this host (upnp)"},
		{"silent router", Result{NATReport: NATReport{NAT: port}, Notes: notes("the router does not answer"),
			Candidates: srflx("stun")}, "forward UDP port 51820 on the router to this host, or switch UPnP"},
		{"refusing router", Result{NATReport: NATReport{NAT: sym},
			Notes: notes("refused by the gateway (PCP): not authorized")}, "supports port mapping but refuses it"},
		{"a grant that does nothing", Result{NATReport: NATReport{NAT: port}, Notes: notes("says the router, but packets " +
			"from outside do not arrive there")}, "what is sent there does not arrive"},
		{"double NAT", Result{NATReport: NATReport{NAT: port}, Notes: notes("10.0.0.7 is private: there is another NAT in " +
			"front of it (double NAT)")}, "two NATs in a row"},
		{"router without an address", Result{NATReport: NATReport{NAT: port}, Notes: notes("refused by the gateway " +
			"(NAT-PMP): network failure: the router has no address itself")}, "no public address itself"},
		{"not asked", Result{NATReport: NATReport{NAT: sym}}, "let skein ask it (natTraversal.portMapping)"},
		{"firewall without NAT", Result{NATReport: NATReport{NAT: port, Preserving: true, Mapped: mapped,
			Advice: []string{"open UDP port"}}, Host: own}, "open UDP port"},
		{"forced", Result{NATReport: NATReport{NAT: port},
			Candidates: []*skeinv1.Candidate{{Type: skeinv1.CandidateType_CANDIDATE_TYPE_FORCED}}}, ""},
	}
	for _, tt := range tests {
		got := strings.Join(tt.r.AllAdvice(51820), "\n")
		if !strings.Contains(got, tt.want) || tt.want == "" && got != "" || strings.Contains(got, "hopeless") {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
