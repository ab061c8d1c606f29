package plane

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
)

// failing is a subsystem that cannot be put right.
type failing struct {
	subsystem
	err error
}

func (f *failing) Name() string                                 { return "nft" }
func (f *failing) Repair(dataplane.Spec) (int, []string, error) { return 0, nil, f.err }

// Whoever applies Specs hears once of damage that cannot be repaired, so that it asks why.
func TestDamageThatStaysIsToldOf(t *testing.T) {
	var told []string
	o := Options{Log: slog.New(slog.DiscardHandler), OnBroken: func(s string) { told = append(told, s) }}
	f := &failing{err: errors.New("no")}
	x := newPart(f)
	p := &Plane{opts: o.filled(), spec: &dataplane.Spec{}, parts: []*part{x}}
	for range 3 {
		p.repair(x)
	}
	if len(told) != 1 || told[0] != "nft" || !x.dirty {
		t.Fatalf("told of %v, dirty %v; want once, and that it is tried again", told, x.dirty)
	}
	f.err = nil
	p.repair(x)
	f.err = errors.New("no")
	p.repair(x)
	if len(told) != 2 {
		t.Errorf("told of %v; want the second damage, too", told)
	}
}
