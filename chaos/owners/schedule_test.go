package owners

import (
	"testing"
)

func TestSchedulesComeFromTheSeed(t *testing.T) {
	w := World{Slots: 3, Gateways: 3, Servers: 3}
	kinds, roles, two := map[Kind]int{}, map[Role]int{}, 0
	for i := range 200 {
		s := w.Plan(7, i)
		if again := w.Plan(7, i); s.String() != again.String() {
			t.Fatalf("schedule %d is %q, then %q", i, s, again)
		}
		servers, drains := 0, 0
		for _, f := range s.Faults {
			kinds[f.Kind]++
			roles[f.Role]++
			if f.onServer() {
				servers++
			}
			if f.Kind == Drain {
				drains++
			}
			if f.onServer() && (f.Kind == Drain || f.Kind == CutOff) || f.For < shortestPause || f.For > longestPause || f.Kind != Pause && f.For > longestFault {
				t.Errorf("schedule %d: %s", i, f)
			}
			if f.Role == Owner && f.Slot >= w.Slots || f.Role == Gateway && f.Slot >= w.Gateways || f.Role == Server && f.Slot >= w.Servers {
				t.Errorf("schedule %d: %s hits nobody", i, f)
			}
		}
		if servers > 1 || drains > 1 || len(s.Faults) > 2 {
			t.Errorf("schedule %d: %s", i, s)
		}
		if len(s.Faults) == 2 {
			two++
		}
	}
	if len(kinds) != 7 || len(roles) != 4 || two < 40 || two > 100 {
		t.Errorf("200 schedules: %v, %v, %d with two faults", kinds, roles, two)
	}
	if w.Plan(7, 0).String() == w.Plan(8, 0).String() {
		t.Error("another seed gives the same")
	}
}
