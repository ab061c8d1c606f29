package lab

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// TestForwardDrops: each form of one node's becomes a drop, and others' are not its own.
func TestForwardDrops(t *testing.T) {
	own := []netip.Addr{netip.MustParseAddr("10.4.0.1"), netip.MustParseAddr("fd00::1")}
	all := map[NotForwarded]bool{
		{"a", DropsNew}: true, {"a", DropsDirection}: true, {"a", DropsLarge}: true, {"b", DropsLarge}: true,
	}
	for _, c := range []struct {
		node string
		own  []netip.Addr
		want []fabric.ForwardDrop
	}{
		{"a", own, []fabric.ForwardDrop{{To: own}, {Above: largeAbove}, {New: true}}},
		{"b", own, []fabric.ForwardDrop{{Above: largeAbove}}},
		{"c", own, nil},
		// Who is alone in its site passes nothing on to it: an empty list would drop everything.
		{"a", nil, []fabric.ForwardDrop{{Above: largeAbove}, {New: true}}},
	} {
		if d := cmp.Diff(c.want, forwardDrops(c.node, all, c.own), cmpopts.EquateComparable(netip.Addr{})); d != "" {
			t.Errorf("%s: %s", c.node, d)
		}
	}
}

// TestZombieIsKnownAndHealed: status and whoever attaches know of a zombie, its rules are in its kernel, and heal ends
// it.
func TestZombieIsKnownAndHealed(t *testing.T) {
	l := raiseStubs(t, `name: NAME
sites: {a: {nat: none}, b: {nat: none}}
nodes: {a1: {site: a, server: true}, b1: {site: b}, b2: {site: b}}
`)
	err := l.Zombie(t.Context(), "everything", "b1")
	if err == nil || !strings.Contains(err.Error(), "allowed: new, direction, large") {
		t.Errorf("a form that is not known: %v", err)
	}
	rules := func() string {
		t.Helper()
		var b strings.Builder
		if err := fabric.Dump(fabric.HostNS(l.Spec.Name, "b1"), &b); err != nil {
			t.Fatal(err)
		}
		_, tables, _ := strings.Cut(b.String(), "# nftables")
		return tables
	}
	none := rules()
	for _, drops := range []string{DropsDirection, DropsNew} {
		if err := l.Zombie(t.Context(), drops, "b1"); err != nil {
			t.Fatal(err)
		}
	}
	before := rules()
	again, err := Attach(l.Spec.Name, Options{Dir: l.opts.Dir})
	if err != nil {
		t.Fatal(err)
	}
	want := []NotForwarded{{"b1", DropsDirection}, {"b1", DropsNew}}
	if d := cmp.Diff(want, again.Status(t.Context()).Zombies); d != "" {
		t.Error(d)
	}
	if err := again.Heal(t.Context(), "a1", "b2"); err != nil {
		t.Fatal(err)
	}
	if rules() != before {
		t.Error("healing others changed what the zombie drops")
	}
	if err := again.Heal(t.Context(), "b1"); err != nil {
		t.Fatal(err)
	}
	if z := again.Status(t.Context()).Zombies; len(z) != 0 {
		t.Errorf("healed, but %v", z)
	}
	rule := strings.Repeat(" ", 4) // a chain has two
	count := func(s string) int { return strings.Count(s, rule) }
	if after := rules(); count(before) <= count(none) || count(after) != count(none) {
		t.Errorf("none:\n%s\nas a zombie:\n%s\nhealed:\n%s", none, before, after)
	}
}
