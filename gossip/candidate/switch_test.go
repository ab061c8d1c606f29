package candidate_test

import (
	"context"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate"
)

// finder finds something with each look.
type finder struct{ looks int }

func (*finder) Source() string { return "finder" }

func (f *finder) Look(context.Context, candidate.Request) candidate.Found {
	f.looks++
	return candidate.Found{Problem: "found"}
}

// A step that is switched off finds nothing and does nothing, and is asked anew with each change.
func TestSwitch(t *testing.T) {
	f := &finder{}
	s := candidate.NewSwitch(f, false)
	wakes := 0
	look := func() bool {
		return s.Look(t.Context(), candidate.Request{Wake: func() { wakes++ }}).Problem != ""
	}
	s.Set(true)
	s.Set(false)
	if look() || f.looks != 0 || s.Source() != "finder" {
		t.Errorf("switched off it has looked %d times", f.looks)
	}
	s.Set(true)
	if wakes != 1 || !look() || f.looks != 1 {
		t.Errorf("switched on: woken %d times, looked %d times", wakes, f.looks)
	}
	s.Set(true)
	if wakes != 1 {
		t.Errorf("woken %d times for one change", wakes)
	}
	s.Set(false)
	if wakes != 2 || look() || f.looks != 1 {
		t.Errorf("switched off again: woken %d times, looked %d times", wakes, f.looks)
	}
}
