package roster

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func TestRoster(t *testing.T) {
	st, ids := apitest.Members(t, "a", "b")
	a, b, c := memberID(t, ids[0]), memberID(t, ids[1]), identity.ID{3}
	r := New(st)
	if ids := r.Members(); len(ids) != 2 || !slices.IsSortedFunc(ids, func(x, y identity.ID) int {
		return slices.Compare(x[:], y[:])
	}) {
		t.Errorf("members are %v", ids)
	}
	if key, ok := r.Key(b); !ok || identity.IDOf(key) != b {
		t.Error("b's key is not b's")
	}
	if _, ok := r.Key(c); ok {
		t.Error("a stranger has a key")
	}
	v4, v6, ok := r.Overlay(b)
	if !ok || v4 != netip.MustParseAddr("10.4.0.2") || !v6.Is6() {
		t.Errorf("b has %s and %s", v4, v6)
	}
	for _, addr := range []netip.Addr{v4, v6} {
		if id, ok := r.Owner(addr); !ok || id != b {
			t.Errorf("%s is %s's", addr, id)
		}
	}
	for _, addr := range []string{"10.4.0.3", "::ffff:10.4.0.2", "fd00::1", "0.0.0.0", "::"} {
		if id, ok := r.Owner(netip.MustParseAddr(addr)); ok {
			t.Errorf("%s is %s's", addr, id)
		}
	}
	if id, ok := r.Owner(netip.Addr{}); ok {
		t.Errorf("no address is %s's", id)
	}
	if r.Name(b) != "b" || r.Name(c) != c.String() {
		t.Error("names")
	}

	before := r.Members()
	without := st.Clone()
	apitest.Decide(t, without, &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
		NodeId: b.String()}}})
	if !r.Update(without) {
		t.Error("a revocation changed no member")
	}
	if _, ok := r.Key(b); ok {
		t.Error("a revoked node still has a key")
	}
	if _, ok := r.Owner(v4); ok {
		t.Error("a revoked node still owns its address")
	}
	if len(before) != 2 || len(r.Members()) != 1 {
		t.Errorf("a reader's members changed under it: %v, now %v", before, r.Members())
	}

	later := without.Clone()
	apitest.Decide(t, later, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: "00000000000000aa", SecretHash: []byte(strings.Repeat("s", 32)), LifetimeNanos: int64(time.Hour), Uses: 1}}})
	if r.Update(later) || later.Index() == without.Index() {
		t.Error("a token is taken for a change of the members")
	}
	if id, ok := r.Owner(netip.MustParseAddr("10.4.0.1")); !ok || id != a || len(r.Members()) != 1 {
		t.Errorf("after an event that changed no member they are %v", r.Members())
	}
}

func memberID(t *testing.T, text string) identity.ID {
	t.Helper()
	id, err := identity.ParseID(text)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Packets by the tunnel carry a code once the log says of both ends that they know of it.
func TestCodesNeedBothEnds(t *testing.T) {
	a, b, c := identity.ID{1}, identity.ID{2}, identity.ID{3}
	r := &Roster{}
	r.current.Store(&members{ids: []identity.ID{a, b, c}, nodes: []Member{{codes: true}, {codes: true}, {}}})
	for _, x := range []struct {
		of   identity.ID
		want bool
	}{{b, true}, {c, false}, {identity.ID{9}, false}} {
		if got := r.Coded(a, x.of); got != x.want {
			t.Errorf("with %s: %t, want %t", x.of, got, x.want)
		}
	}
}
