package soak

import (
	"context"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/labtest"
	"github.com/skeinmesh/skein/internal/testenv"
)

// The first minute of what `make soak` does for five.
func TestSoak(t *testing.T) {
	testenv.NeedRoot(t)
	opts := Options{For: 45 * time.Second, Half: 6, Freeze: true, Seed: 1, Progress: t.Logf}
	if testing.Short() {
		opts.For = 10 * time.Second
	}
	ctx, cancel := context.WithTimeout(t.Context(), opts.For+4*time.Minute)
	defer cancel()
	l, _ := labtest.Up(t, "soak", string(Mesh))
	report, err := Run(ctx, l, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", report)
	if report.Resources.Readings < 2 || len(report.Resources.Rest) == 0 {
		t.Errorf("agents were asked %d times what they hold, and %d resources compared", report.Resources.Readings,
			len(report.Resources.Rest))
	}
	if report.Commands == 0 || report.Looks < 100 {
		t.Errorf("%d commands, %d answers checked: too few to prove anything", report.Commands, report.Looks)
	}
}
