package main

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestNetcheckFits(t *testing.T) {
	r := &skeinv1.NetcheckResponse{
		NatType: skeinv1.NatType_NAT_TYPE_SYMMETRIC, Mapping: "address-and-port-dependent",
		Filtering: "address-and-port-dependent", PortStep: 1,
		Udp: true, Ipv4: true, CheckedAt: time.Now().UnixNano(), Gateways: []string{"192.168.3.1",
			"fe80::5054:ff:fe12:3456%enp0s31f6"}, TunnelMtu: 1420,
		Mapped: []string{"198.18.1.11:3478: 198.18.3.1:45996", "[2001:db8:1::b]:3478: " +
			"[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:45996"},
		Candidates: []*skeinv1.Candidate{{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "198.18.3.1:45996",
			Priority: 50, Source: "stun"}},
		Notes: []*skeinv1.DiscoveryNote{
			{Source: "pcp", Text: "not published: the router's external address 10.0.0.7 is private: there is another NAT in " +
				"front of it (double NAT)"},
			{Source: "natpmp", Text: "the router does not answer"},
		},
		Advice: []string{strings.Repeat("a word of advice ", 20)},
	}
	var out strings.Builder
	printNetcheck(&out, r)
	for _, want := range []string{"symmetric (mapping", "each new port is the last one +1; no hairpin",
		"gateway     192.168.3.1", "tunnel MTU 1420", "pcp         not published", "advice      a word"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing from\n%s", want, out.String())
		}
	}
	for line := range strings.Lines(out.String()) {
		if utf8.RuneCountInString(strings.TrimRight(line, "\n")) > tableWidth {
			t.Errorf("too wide: %s", line)
		}
	}
	for _, tt := range []struct {
		nat                 skeinv1.NatType
		preserving, hairpin bool
		want                string
	}{
		{skeinv1.NatType_NAT_TYPE_FULL_CONE, true, false, "keeps WireGuard's port number; no hairpin"},
		{skeinv1.NatType_NAT_TYPE_FULL_CONE, false, true, "changes WireGuard's port number; turns packets"},
		{skeinv1.NatType_NAT_TYPE_NONE, true, false, ""},
	} {
		r := &skeinv1.NetcheckResponse{NatType: tt.nat, PortPreserving: tt.preserving, Hairpin: tt.hairpin}
		if got := natTraits(r); !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
			t.Errorf("%v: %q, want %q", tt.nat, got, tt.want)
		}
	}
}
