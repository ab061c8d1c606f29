package events

import (
	"strings"
	"testing"
)

// A pool's subnets are shown as a user writes them.
func TestDiffShowsSubnets(t *testing.T) {
	w := newPools(t)
	before := w.s.Clone()
	w.must(createPool(pool("seen", 2, "10.201.0.0/24,fd00:201::/120")))
	between := w.s.Clone()
	w.must(extendPool("seen", "10.201.1.0/24,fd00:201::100/120"))
	made := strings.Join(Diff(before, between), "\n")
	if want := "subnets [10.201.0.0/24,fd00:201::/120]"; !strings.Contains(made, want) {
		t.Errorf("%q is missing from\n%s", want, made)
	}
	want := "~ pool seen: subnets [10.201.0.0/24,fd00:201::/120] → [10.201.0.0/24,fd00:201::/120 " +
		"10.201.1.0/24,fd00:201::100/120]"
	if have := Diff(between, w.s); len(have) != 1 || have[0] != want {
		t.Errorf("have %q\nwant %q", have, want)
	}
}
