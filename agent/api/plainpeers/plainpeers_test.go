package plainpeers

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Where a plain peer reaches a node: the host of its forced endpoint, its public address, or, only in its own
// network, a private one.
func TestWherePlainPeersAreAnswered(t *testing.T) {
	host := func(addresses ...string) (out []*skeinv1.Candidate) {
		for _, a := range addresses {
			out = append(out, &skeinv1.Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: a})
		}
		return out
	}
	for name, c := range map[string]struct {
		record *skeinv1.Record
		want   string
		public bool
	}{
		"public": {&skeinv1.Record{Candidates: host("10.1.2.3:51820", "198.51.100.7:51820")},
			"198.51.100.7:51821", true},
		"public IPv6": {&skeinv1.Record{Candidates: host("[fe80::1]:51820", "[2001:db8::7]:51820")},
			"[2001:db8::7]:51821", true},
		"forced": {&skeinv1.Record{ForcedEndpoint: "gw.example.com:7000",
			Candidates: host("198.51.100.7:51820")}, "gw.example.com:51821", true},
		"private": {&skeinv1.Record{Candidates: host("10.1.2.3:51820", "10.1.2.4:51820")},
			"10.1.2.3:51821", false},
		"behind NAT": {&skeinv1.Record{Candidates: []*skeinv1.Candidate{{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX,
			Address: "198.51.100.7:4"}}}, "", false},
		"never heard of":     {nil, "", false},
		"link-local, broken": {&skeinv1.Record{Candidates: host("[fe80::1]:51820", "nonsense")}, "", false},
	} {
		if c.record != nil {
			c.record.PlainPort = 51821
		}
		end, public := endOf(&skeinv1.Node{Id: "b33ad742981917ca", Name: "gw1", WireguardKey: []byte("key")},
			c.record)
		if end.GetAddress() != c.want || public != c.public || end.GetNode() != "gw1" ||
			string(end.GetWireguardKey()) != "key" {
			t.Errorf("%s: %v %v, want %s", name, end, public, c.want)
		}
	}
}

// A configuration leads to all that the mesh leads to, and not to the peer's own networks; networks of nodes are
// refused, and what is no
// private network is left to the log.
func TestWhatPlainPeersReach(t *testing.T) {
	s := apitest.WithPlainPeer(t)
	n := s.Nodes()[0]
	id, err := identity.ParseID(n.GetId())
	if err != nil {
		t.Fatal(err)
	}
	records := api.Records{id: {NodeAddresses: []string{"192.168.77.0/24"}}}
	routes := routesOf(s, records, &skeinv1.PlainPeer{Name: "phone"})
	for _, want := range []string{s.Cluster().GetOverlayIpv4(), s.Cluster().GetOverlayIpv6(), "192.168.8.0/24"} {
		if !slices.Contains(routes, netip.MustParsePrefix(want)) {
			t.Errorf("it does not lead to %s: %v", want, routes)
		}
	}
	if own := routesOf(s, records, s.PlainPeer("office")); len(own) != len(routes)-1 {
		t.Errorf("to itself it leads by %v", own)
	}
	for network, refused := range map[string]bool{"192.168.77.128/25": true, "192.168.0.0/16": true,
		"192.168.78.0/24": false, "0.0.0.0/0": false, "nonsense": false} {
		err := checkNodeNetworks(&skeinv1.AddPlainPeerRequest{Name: "x", AllowedIps: []string{network}}, s, records)
		if (err != nil) != refused || refused && !strings.Contains(err.Error(), "a node address of "+n.GetName()) {
			t.Errorf("%s: %v", network, err)
		}
	}
}

// A plain peer is in no site: it knows a site's network as other sites do.
func TestPlainPeersKnowOtherAddresses(t *testing.T) {
	s, ids := apitest.WithTranslations(t)
	id, err := identity.ParseID(ids[0])
	if err != nil {
		t.Fatal(err)
	}
	records := api.Records{id: {Site: "home", NodeAddresses: []string{"192.168.1.0/25"}}}
	if err := s.Fold(&skeinv1.Event{Index: s.Index() + 1, Schema: 1, Time: 7, Body: &skeinv1.Event_SettingsChanged{
		SettingsChanged: &skeinv1.SettingsChanged{Settings: &skeinv1.Settings{RouteNodeAddresses: true}}}}); err != nil {
		t.Fatal(err)
	}
	routes := routesOf(s, records, &skeinv1.PlainPeer{Name: "phone"})
	if slices.Contains(routes, netip.MustParsePrefix("192.168.1.0/25")) ||
		!slices.Contains(routes, netip.MustParsePrefix("10.201.1.0/25")) {
		t.Errorf("it reaches %v", routes)
	}
}
