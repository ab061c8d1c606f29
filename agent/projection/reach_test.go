package projection_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// siteMesh is a mesh of two sites: n0, n1 and n2 are at one, n3 and n4 at the other; n0 and n3 pass packets on. The
// host is one of them, with ways to the rest, and a narrow path between the leaders.
func siteMesh(t *testing.T, self int, ways map[int]projection.Way, peers ...int) (projection.Input, []identity.ID) {
	t.Helper()
	s, ids := mesh(t, 5)
	in := input(s, ids)
	in.Self = ids[self]
	isPeer, by := map[identity.ID]bool{}, map[identity.ID]projection.Way{}
	for _, p := range peers {
		isPeer[ids[p]] = true
		in.Endpoints[ids[p]] = projection.Endpoint{Addr: netip.MustParseAddrPort("198.18.0." + itoa(p+1) +
			":51820"), Proven: true}
	}
	for n, w := range ways {
		by[ids[n]] = w
	}
	in.Reach = sites.NewReach("", isPeer, by, nil, nil)
	return in, ids
}

// TestGoldenSites: a host that passes nothing on, and a leader of its site whose path to the other leader is narrow.
func TestGoldenSites(t *testing.T) {
	_, ids := mesh(t, 5)
	in, _ := siteMesh(t, 1, map[int]projection.Way{3: {Via: ids[0]}, 4: {Via: ids[0]}}, 0, 2)
	in.Reach.Guards = []projection.Guard{{From: ids[0], Of: []identity.ID{ids[3], ids[4]}}}
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	if spec.Pods.Forward {
		t.Error("a host that passes nothing on forwards")
	}
	checkGolden(t, in.State, spec, "testdata/sites-member.golden")

	in, _ = siteMesh(t, 0, map[int]projection.Way{
		1: {Via: ids[1], Passed: true}, 2: {Via: ids[2], Passed: true}, 3: {Via: ids[3], Passed: true}, 4: {Via: ids[3]},
	}, 1, 2, 3)
	in.Reach.Guards = []projection.Guard{
		{From: ids[1], Of: ids[1:2]}, {From: ids[2], Of: ids[2:3]}, {From: ids[3], Of: []identity.ID{ids[4], ids[3]}},
	}
	e := in.Endpoints[ids[3]]
	e.MTU = 1300
	in.Endpoints[ids[3]] = e
	if spec, refused = projection.Project(in); len(refused) > 0 {
		t.Fatal(refused)
	}
	if !spec.Pods.Forward {
		t.Error("a leader does not forward")
	}
	checkGolden(t, in.State, spec, "testdata/sites-leader.golden")
}

// TestAMoveChangesNoPeer: when another leader passes packets on, WireGuard's peers and what leads into the tunnel stay.
func TestAMoveChangesNoPeer(t *testing.T) {
	_, ids := mesh(t, 5)
	spec := func(via int) dataplane.Spec {
		in, _ := siteMesh(t, 1, map[int]projection.Way{3: {Via: ids[via]}, 4: {Via: ids[via]}}, 0, 2)
		in.Reach.Guards = []projection.Guard{{From: ids[0], Of: ids[3:]}, {From: ids[2], Of: ids[3:]}}
		s, refused := projection.Project(in)
		if len(refused) > 0 {
			t.Fatal(refused)
		}
		return s
	}
	before, after := spec(0), spec(2)
	if before.Equal(after) {
		t.Fatal("the move changes nothing")
	}
	after.Hops.Routes = before.Hops.Routes
	if !before.Equal(after) {
		t.Errorf("the move changes more than where hops lead:\n%s\n%s", text(before), text(after))
	}
}

// TestAMemberWithoutAWayEndsInTheTunnel: what is for it leaves by no other link.
func TestAMemberWithoutAWayEndsInTheTunnel(t *testing.T) {
	in, ids := siteMesh(t, 1, nil, 0, 2)
	spec, _ := projection.Project(in)
	lost := netip.MustParseAddr(in.State.Node(ids[4]).GetIpv4())
	covered := false
	for _, p := range spec.Targets {
		covered = covered || p.Contains(lost)
	}
	if !covered || spec.Hops.Self.IsValid() || len(spec.WireGuard.Peers) != 2 {
		t.Errorf("%s", text(spec))
	}
}

func text(s dataplane.Spec) string {
	return strings.TrimSpace(projection.Text(s, func(k dataplane.Key) string {
		return string("0123456789abcdef"[k[0]&15])
	}))
}
