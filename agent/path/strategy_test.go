package path

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

func node(nat skeinv1.NatType, cs ...Candidate) Node { return Node{NAT: nat, Candidates: cs} }

func cand(t skeinv1.CandidateType, addr string) Candidate { return Candidate{Type: t, Addr: ap(addr)} }

func TestPairIsSymmetric(t *testing.T) {
	all := append(slices.Clone(nats), natUnknown)
	for _, a := range all {
		for _, b := range all {
			r1, w1, ok1 := Pair(a, b)
			r2, w2, ok2 := Pair(b, a)
			if r1 != r2 || w1 != w2 || ok1 != ok2 || r1 == "" || w1 == "" {
				t.Errorf("%s with %s: %q %v, the other way %q %v", candidate.NATName(a), candidate.NATName(b), r1, ok1, r2, ok2)
			}
		}
	}
}

func TestStrategy(t *testing.T) {
	lan1, lan2 := cand(host, "192.168.1.2:51820"), cand(host, "192.168.2.2:51820")
	pub1, pub2 := cand(srflx, "203.0.113.1:1000"), cand(srflx, "203.0.113.2:2000")
	v6a, v6b := cand(host, "[2001:db8::a]:51820"), cand(host, "[2001:db8::b]:51820")
	forcedB := cand(forced, "203.0.113.2:51820")
	granted := Candidate{Type: srflx, Addr: ap("203.0.113.2:40000"), Source: "pcp"}
	site := func(n Node) Node { n.Site = "home"; return n }
	for _, c := range []struct {
		name       string
		self, peer Node
		rule       string
		want       []string // targets in order
	}{
		{"cone and cone", node(natPortRestricted, lan1, pub1), node(natRestricted, pub2, lan2), "cone-cone",
			[]string{"192.168.2.2:51820", "203.0.113.2:2000"}},
		{"forced comes first", node(natPortRestricted, lan1, pub1), node(natPortRestricted, lan2, pub2, forcedB), "full-cone",
			[]string{"203.0.113.2:51820", "192.168.2.2:51820", "203.0.113.2:2000"}},
		{"cone and symmetric", node(natRestricted, lan1, pub1), node(natSymmetric, lan2, pub2), "cone-symmetric",
			[]string{"192.168.2.2:51820", "203.0.113.2:2000"}},
		{"symmetric twice", node(natSymmetric, lan1, pub1), node(natSymmetric, lan2, pub2), "symmetric-symmetric", nil},
		{"port-restricted and symmetric", node(natPortRestricted, lan1, pub1), node(natSymmetric, lan2, pub2),
			"port-restricted-symmetric", nil},
		{"blocked", node(natBlocked, lan1), node(natNone, pub2), "udp-blocked", nil},
		{"blocked with a forced end", node(natBlocked, lan1), node(natNone, forcedB), "udp-blocked", nil},
		{"unknown is tried", node(natUnknown, lan1), node(natSymmetric, lan2, pub2), "nat-unknown",
			[]string{"192.168.2.2:51820", "203.0.113.2:2000"}},
		{"symmetric twice in one site", site(node(natSymmetric, lan1, pub1)), site(node(natSymmetric, lan2, pub2)),
			"same-site", []string{"192.168.2.2:51820"}},
		{"symmetric twice behind one address", node(natSymmetric, lan1, pub1),
			node(natSymmetric, lan2, cand(srflx, "203.0.113.1:7")), "same-public-ip", []string{"192.168.2.2:51820"}},
		{"blocked in one site", site(node(natBlocked, lan1)), site(node(natBlocked, lan2)), "same-site",
			[]string{"192.168.2.2:51820"}},
		{"a forwarded port at the peer", node(natSymmetric, lan1, pub1), node(natSymmetric, lan2, granted), "full-cone",
			[]string{"192.168.2.2:51820", "203.0.113.2:40000"}},
		{"a forwarded port here", node(natSymmetric, lan1, Candidate{Type: srflx, Addr: ap("203.0.113.1:40000"),
			Source: "natpmp"}), node(natSymmetric, lan2, pub2), "full-cone", []string{"192.168.2.2:51820", "203.0.113.2:2000"}},
		{"IPv6 past two symmetric NATs", node(natSymmetric, lan1, v6a), node(natSymmetric, lan2, v6b), "open-endpoint",
			[]string{"[2001:db8::b]:51820"}},
		{"no IPv6 here", node(natSymmetric, lan1), node(natSymmetric, lan2, v6b), "symmetric-symmetric", nil},
		{"IPv6 only here", node(natNone, v6a), node(natNone, pub2), "no-candidate", nil},
		{"nothing known of the peer", node(natNone, pub1), node(natNone), "no-candidate", nil},
		{"not the same address, twice or unfit", node(natNone, lan1, pub1), node(natNone, lan1, pub2, pub2,
			cand(host, "127.0.0.1:51820"), cand(host, "0.0.0.0:1"), cand(host, "224.0.0.1:1"), cand(host, "[fe80::1]:1"),
			cand(host, "1.2.3.4:0"),
			cand(host, "10.4.0.9:51820"), cand(relayC, "198.51.100.9:7443")), "public", []string{"203.0.113.2:2000"}},
	} {
		p := Strategy(c.self, c.peer, []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16")})
		var got []string
		for _, x := range p.Targets {
			got = append(got, x.Addr.String())
		}
		if p.Rule != c.rule || !slices.Equal(got, c.want) || p.Probe != (len(c.want) > 0) || p.Reason == "" {
			t.Errorf("%s: %s %v, want %s %v", c.name, p.Rule, got, c.rule, c.want)
		}
		for _, k := range p.Skipped {
			if k.Why == "" {
				t.Errorf("%s: %s is skipped without a reason", c.name, k.Addr)
			}
		}
	}
}

// A record full of candidates costs a bounded number of probes.
func TestTargetsAreBounded(t *testing.T) {
	peer := node(natNone)
	for i := range 64 {
		peer.Candidates = append(peer.Candidates,
			Candidate{Type: host, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i + 1)}), 1)})
	}
	if p := Strategy(node(natNone), peer, nil); len(p.Targets) != targetsMax || len(p.Skipped) != 64-targetsMax {
		t.Errorf("%d targets, %d skipped", len(p.Targets), len(p.Skipped))
	}
}

// The priority in a record orders its addresses, also for records of older agents, whose hosts have 100.
func TestOrderIsThePriority(t *testing.T) {
	record := func(hosts uint32) *skeinv1.Record {
		return &skeinv1.Record{NatType: natFullCone, Candidates: []*skeinv1.Candidate{
			{Type: srflx, Address: "203.0.113.2:3", Priority: 50}, {Type: srflx, Address: "203.0.113.2:2", Priority: 200},
			{Type: host, Address: "192.168.2.2:1", Priority: hosts}, {Type: forced, Address: "203.0.113.2:4", Priority: 300},
			{Type: srflx, Address: "203.0.113.2:5", Priority: 260},
		}}
	}
	for hosts, want := range map[uint32]string{100: "4 5 1 2 3 ", 250: "4 5 1 2 3 ", 210: "4 5 1 2 3 ",
		150: "4 5 2 1 3 "} {
		have := ""
		for _, target := range Strategy(node(natFullCone, cand(host, "192.168.1.2:51820")),
			NodeOf(record(hosts)), nil).Targets {
			have += fmt.Sprint(target.Addr.Port()) + " "
		}
		if have != want {
			t.Errorf("hosts of %d: order %s, want %s", hosts, have, want)
		}
	}
}

func TestNodeOf(t *testing.T) {
	n := NodeOf(&skeinv1.Record{
		NatType: natSymmetric, Site: "home", PersistentKeepalive: 20, ForcedEndpoint: "203.0.113.9:51820",
		Candidates: []*skeinv1.Candidate{{Type: host, Address: "[::ffff:192.168.1.2]:51820", Source: "interface"},
			{Type: srflx, Address: "nonsense"}},
	})
	want := Node{NAT: natSymmetric, Site: "home", Keepalive: 20e9, Candidates: []Candidate{
		{Type: host, Addr: ap("192.168.1.2:51820"), Source: "interface", Priority: 250},
		{Type: forced, Addr: ap("203.0.113.9:51820"), Source: "config", Priority: 300},
	}}
	if !n.Equal(want) {
		t.Errorf("%+v, want %+v", n, want)
	}
	if n := NodeOf(&skeinv1.Record{ForcedEndpoint: "home.example:51820"}); len(n.Candidates) != 0 {
		t.Errorf("a name that is not looked up yet is not a candidate: %+v", n)
	}
}
