package projection_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

func translate(t *testing.T, s *events.State, site, prefix, as string) {
	t.Helper()
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_SetSiteTranslation{
		SetSiteTranslation: &skeinv1.SetSiteTranslation{
			Translation: &skeinv1.SiteTranslation{Site: site, Prefix: prefix, As: as}}}})
}

// offices are five nodes: two at home and two at work, where the first of each has 192.168.1.0/24 behind it, and one
// in a third site. seen is what the node of that number gets.
func offices(t *testing.T) (s *events.State, ids []identity.ID, seen func(int) (dataplane.Spec, []projection.Refusal)) {
	s, ids = mesh(t, 5)
	records := map[identity.ID]*skeinv1.Record{}
	for i, site := range []string{"home", "home", "work", "work", "cloud"} {
		records[ids[i]] = &skeinv1.Record{Site: site}
	}
	records[ids[0]].NodeAddresses = []string{"192.168.1.0/24"}
	records[ids[2]].NodeAddresses = []string{"192.168.1.0/24"}
	return s, ids, func(i int) (dataplane.Spec, []projection.Refusal) {
		in := input(s, ids)
		in.Self, in.Records, in.Host.RouteNodeAddresses = ids[i], records, true
		if i < 4 { // each is in its site's network
			in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("192.168.1.0/24")}
		}
		return projection.Project(in)
	}
}

// allowed is what a Spec leads to a node, but for its overlay addresses.
func allowed(s *events.State, spec dataplane.Spec, id identity.ID) string {
	var out []string
	for _, p := range spec.WireGuard.Peers[dataplane.Key(s.Node(id).GetWireguardKey())].AllowedIPs {
		if !p.IsSingleIP() {
			out = append(out, p.String())
		}
	}
	return strings.Join(out, " ")
}

// Without a translation each site keeps its own network, and says what to do about the other's.
func TestOverlappingSitesAreToldOf(t *testing.T) {
	s, ids, seen := offices(t)
	for _, c := range []struct {
		at, peer int
		says     string
	}{
		{0, 2, `node address 192.168.1.0/24 of site work overlaps 192.168.1.0/24, which is node n0's, in site home: let other sites know it under other addresses: skein site translate "work" --prefix 192.168.1.0/24 --as PREFIX`},
		{1, 2, `node address 192.168.1.0/24 of site work overlaps 192.168.1.0/24, the network on a link of this host, in site home: let`},
		{2, 0, `skein site translate "home" --prefix 192.168.1.0/24`},
		{3, 0, `skein site translate "home" --prefix 192.168.1.0/24`},
	} {
		spec, refused := seen(c.at)
		i := slices.IndexFunc(refused, func(r projection.Refusal) bool { return r.Peer == ids[c.peer] })
		if i < 0 || !strings.Contains(refused[i].Reason, c.says) {
			t.Errorf("n%d says of n%d: %v, want %q", c.at, c.peer, refused, c.says)
		}
		if got := allowed(s, spec, ids[c.peer]); got != "" {
			t.Errorf("n%d leads %s to n%d", c.at, got, c.peer)
		}
		if spec.Translations != nil || spec.Inside != nil {
			t.Errorf("n%d translates %v, but for %v", c.at, spec.Translations, spec.Inside)
		}
	}
	if spec, refused := seen(4); len(refused) != 1 ||
		(allowed(s, spec, ids[0]) == "") == (allowed(s, spec, ids[2]) == "") {
		t.Errorf("a third site gives the network to one of both, and says so: %v", refused)
	}
}

// With translations each site has its own network as it is, and the other's under its other addresses, at both ends
// of each tunnel.
func TestOverlappingSitesAreTranslated(t *testing.T) {
	s, ids, seen := offices(t)
	translate(t, s, "home", "192.168.0.0/20", "10.201.0.0/20")
	translate(t, s, "work", "192.168.1.0/24", "10.202.1.0/24")
	const home, work = "10.201.1.0/24", "10.202.1.0/24"
	for _, c := range []struct {
		at         int
		home, work string // what is led to the nodes that have the networks
	}{{0, "", work}, {1, home, work}, {2, home, ""}, {3, home, work}, {4, home, work}} {
		spec, refused := seen(c.at)
		if len(refused) > 0 {
			t.Errorf("n%d refuses %v", c.at, refused)
		}
		if h, w := allowed(s, spec, ids[0]), allowed(s, spec, ids[2]); h != c.home || w != c.work {
			t.Errorf("n%d leads %q home and %q to work, want %q and %q", c.at, h, w, c.home, c.work)
		}
		for _, as := range []string{"10.201.0.0/20", work} {
			if !slices.Contains(spec.Pods.Pools, netip.MustParsePrefix(as)) {
				t.Errorf("at n%d packets for %s that lead nowhere would leave the mesh: %v", c.at, as, spec.Pods.Pools)
			}
		}
		want := map[int]string{0: "[192.168.1.0/24 as 10.201.1.0/24]", 2: "[192.168.1.0/24 as 10.202.1.0/24]"}[c.at]
		if got := fmt.Sprint(spec.Translations); got != want && (want != "" || len(spec.Translations) > 0) {
			t.Errorf("n%d translates %s, want %s", c.at, got, want)
		}
		if want == "" {
			continue
		}
		var inside []netip.Prefix // the other node of its site
		mate := s.Node(ids[c.at+1])
		for _, a := range []string{mate.GetIpv4(), mate.GetIpv6()} {
			p, _ := netip.MustParseAddr(a).Prefix(netip.MustParseAddr(a).BitLen())
			inside = append(inside, p)
		}
		if !slices.Equal(spec.Inside, inside) {
			t.Errorf("n%d does not translate to %v, want %v", c.at, spec.Inside, inside)
		}
	}
}

// On one link, addresses are led to their members between hosts that offer their own there, and nothing else is: not
// the link's network itself, whoever has it behind it.
func TestOneLink(t *testing.T) {
	const link, mine, theirs = "192.168.1.0/24", "192.168.1.4/32", "192.168.1.5/32"
	for _, c := range []struct {
		name, own, asks string
		led, refused    bool
	}{
		{"both offer their addresses", mine, theirs, true, false},
		{"this host offers none", "", theirs, false, false},
		{"this host offers one on another link", "10.0.0.4/32", theirs, false, false},
		{"the address is on no link here", "", "192.168.8.5/32", true, false},
		{"the link's network", "", link, false, false},
		{"the link's network, with this host's address in it", mine, link, false, true},
		{"a part of it", mine, "192.168.1.128/25", false, false},
		{"what it is a part of", "", "192.168.0.0/16", false, false},
		{"a network elsewhere", "", "192.168.0.0/24", true, false},
	} {
		s, ids := mesh(t, 2)
		in := input(s, ids)
		in.Host.RouteNodeAddresses = true
		in.Host.Connected = []netip.Prefix{netip.MustParsePrefix(link)}
		in.Records = map[identity.ID]*skeinv1.Record{ids[0]: {}, ids[1]: {NodeAddresses: []string{c.asks}}}
		if c.own != "" {
			in.Records[ids[0]].NodeAddresses = []string{c.own}
		}
		spec, refused := projection.Project(in)
		peer := spec.WireGuard.Peers[dataplane.Key(s.Node(ids[1]).GetWireguardKey())]
		led := slices.Contains(peer.AllowedIPs, netip.MustParsePrefix(c.asks))
		if led != c.led || (len(refused) > 0) != c.refused {
			t.Errorf("%s: led %v, refused %v", c.name, led, refused)
		}
	}
}

// A node of the own site that is not in that network reaches it as it is, by an overlay address; and through leaders
// both forms are led.
func TestTheOwnSiteKnowsBoth(t *testing.T) {
	s, ids := mesh(t, 4)
	translate(t, s, "home", "192.168.1.0/24", "10.201.1.0/24")
	in := input(s, ids)
	in.Host.RouteNodeAddresses = true
	in.Records = map[identity.ID]*skeinv1.Record{ids[0]: {Site: "home"}, ids[2]: {Site: "dc"}, ids[3]: {Site: "dc"},
		ids[1]: {Site: "home", NodeAddresses: []string{"192.168.1.0/24"}}}
	in.Reach = sites.NewReach("", map[identity.ID]bool{ids[1]: true, ids[2]: true},
		map[identity.ID]projection.Way{ids[1]: {Via: ids[1], Passed: true}, ids[3]: {Via: ids[2]}}, nil,
		[]projection.Guard{{From: ids[1], Of: []identity.ID{ids[1]}}, {From: ids[2], Of: []identity.ID{ids[2], ids[3]}}})
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	if got := allowed(s, spec, ids[1]); got != "10.201.1.0/24 192.168.1.0/24" {
		t.Errorf("the member has %s", got)
	}
	for _, text := range []string{"10.201.1.0/24", "192.168.1.0/24"} {
		p := netip.MustParsePrefix(text)
		if !slices.ContainsFunc(spec.Pods.Remote, func(n dataplane.Narrow) bool { return n.Prefix == p }) {
			t.Errorf("%s has no route of its own", p)
		}
		if !slices.ContainsFunc(spec.Hops.Routes, func(r dataplane.HopRoute) bool { return r.Prefix == p && r.Last }) {
			t.Errorf("%s is not passed on: %v", p, spec.Hops.Routes)
		}
		if !slices.Contains(spec.Hops.Guards[0].Sources, p) && !slices.Contains(spec.Hops.Guards[1].Sources, p) {
			t.Errorf("nobody may bring %s: %v", p, spec.Hops.Guards)
		}
	}
	in.Self = ids[3] // another site's, behind its leader
	behind := map[identity.ID]bool{ids[2]: true}
	in.Reach = sites.NewReach("", behind, map[identity.ID]projection.Way{ids[0]: {Via: ids[2]},
		ids[1]: {Via: ids[2]}}, nil,
		[]projection.Guard{{From: ids[2], Of: []identity.ID{ids[0], ids[1]}}})
	spec, _ = projection.Project(in)
	text := projection.Text(spec, func(dataplane.Key) string { return "" })
	if strings.Contains(text, "192.168.1.0") || !strings.Contains(text, "hop 10.201.1.0/24") {
		t.Errorf("another site gets\n%s", text)
	}
	in.Self = ids[1]
	in.Reach = sites.NewReach("", behind, map[identity.ID]projection.Way{ids[3]: {Via: ids[0]}}, nil,
		[]projection.Guard{{From: ids[2], Of: []identity.ID{ids[3]}}})
	spec, _ = projection.Project(in)
	for _, text := range []string{"10.201.1.0/24", "192.168.1.0/24"} {
		if !slices.Contains(spec.Hops.Own, netip.MustParsePrefix(text)) {
			t.Errorf("%s is not its own: %v", text, spec.Hops.Own)
		}
	}
}

// Nobody draws a site's network to itself by its other addresses; a member that the log has put into the site comes
// before one that says so itself, and only one has the network.
func TestNobodyClaimsASitesAddresses(t *testing.T) {
	s, ids := mesh(t, 4)
	translate(t, s, "home", "192.168.1.0/24", "10.201.1.0/24")
	in := input(s, ids)
	in.Host.RouteNodeAddresses = true
	in.Records = map[identity.ID]*skeinv1.Record{ids[0]: {Site: "dc"},
		ids[1]: {Site: "home", NodeAddresses: []string{"10.201.1.0/25", "192.168.0.0/16"}},
		ids[2]: {Site: "home", NodeAddresses: []string{"192.168.1.0/24"}},
		ids[3]: {NodeAddresses: []string{"192.168.1.0/24"}}}
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId:   ids[3].String(),
		Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "home"}, SettingsFields: []string{"site"}}}})
	spec, refused := projection.Project(in)
	for i, want := range []string{"", "", "", "10.201.1.0/24"} {
		if i > 0 && allowed(s, spec, ids[i]) != want {
			t.Errorf("n%d has %q, want %q", i, allowed(s, spec, ids[i]), want)
		}
	}
	var said []string
	for _, r := range refused {
		said = append(said, r.Reason)
	}
	slices.Sort(said)
	want := []string{
		"node address 10.201.1.0/25 overlaps 10.201.1.0/24, which is the overlay's or another node's",
		"node address 192.168.0.0/16 is wider than 192.168.1.0/24, which is translated in site home: name its parts, or " +
			"translate all of it",
		"node address 192.168.1.0/24 overlaps 10.201.1.0/24, which is node n3's",
	}
	if !slices.Equal(said, want) {
		t.Errorf("it says\n%s", strings.Join(said, "\n"))
	}
}

// The pods of another CNI are a network of a site, too.
func TestPodsOfASiteAreTranslated(t *testing.T) {
	s, ids := mesh(t, 3)
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{PodRanges: []string{"10.244.0.0/16"}}, Fields: []string{"pod_ranges"}}}})
	decide(t, s, &skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
		NodeId:   ids[1].String(),
		PodCidrs: &skeinv1.PodCidrs{KubernetesNode: "n1", Cidrs: []string{"10.244.1.0/24"}}}}})
	translate(t, s, "home", "10.244.0.0/16", "10.203.0.0/16")
	in := input(s, ids)
	in.Host.RouteNodeAddresses = true
	in.Records = map[identity.ID]*skeinv1.Record{ids[0]: {Site: "dc"}, ids[1]: {Site: "home"},
		ids[2]: {Site: "dc", NodeAddresses: []string{"10.244.1.0/24"}}}
	spec, refused := projection.Project(in)
	if len(refused) > 0 || allowed(s, spec, ids[1]) != "10.203.1.0/24" || allowed(s, spec, ids[2]) != "10.244.1.0/24" {
		t.Errorf("it leads %s home and %s to dc, and refuses %v", allowed(s, spec, ids[1]), allowed(s, spec, ids[2]), refused)
	}
	in.Self = ids[1]
	spec, _ = projection.Project(in)
	if got := fmt.Sprint(spec.Translations); got != "[10.244.1.0/24 as 10.203.1.0/24]" {
		t.Errorf("its own node translates %s", got)
	}
}
