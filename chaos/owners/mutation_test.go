package owners

import (
	"context"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/overlay"
)

// pausedOwner is a seed whose first schedule stops an owner for longer than its lease, and does nothing else.
func pausedOwner(t *testing.T) uint64 {
	t.Helper()
	w := World{Slots: len(full.egresses) + 1, Gateways: len(full.gateways), Servers: len(full.servers)}
	for seed := range uint64(100_000) {
		s := w.Plan(seed, 0)
		if f := s.Faults[0]; len(s.Faults) == 1 && f.Kind == Pause && f.Role == Owner && f.For > 2500*time.Millisecond &&
			f.For < 4*time.Second {
			return seed
		}
	}
	t.Fatal("no seed begins with a paused owner")
	return 0
}

// A run finds a kernel that counts leases five times too long: an owner that stood still goes on when another has the
// slot. So what it reports of kernels that count right is worth something.
func TestARunFindsALongLease(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds skein and raises a lab")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	opts := Options{Name: "owners-mutated", Schedules: 6, Seed: pausedOwner(t), Lab: lab.Options{Dir: t.TempDir()},
		Progress: func(s string) { t.Log(s) }}
	r, err := RunMutated(ctx, opts, "long-lease")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("schedule %d: %s", r.Schedules, r.Violations[0].Text)
}

func TestMutationsFitTheSources(t *testing.T) {
	for name, p := range mutations {
		if _, err := overlay.Files("../..", []mutation{p}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := BuildMutated(t.Context(), "nothing", t.TempDir()); err == nil ||
		err.Error() != `there is no mutation "nothing": there are long-lease` {
		t.Errorf("an unknown bug: %v", err)
	}
	t.Chdir(t.TempDir())
	_, err := BuildMutated(t.Context(), "long-lease", t.TempDir())
	if want := "mutation long-lease needs go and skein's sources: run it in them: the working directory is in no " +
		"module"; err == nil || err.Error() != want {
		t.Errorf("outside of the sources: %v, want %q", err, want)
	}
}
