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
			if f.onServer() && (f.Kind == Drain || f.Kind == CutOff) || f.For < shortestPause || f.For > longestPause ||
				f.Kind != Pause && f.For > longestFault {
				t.Errorf("schedule %d: %s", i, f)
			}
			if f.Role == Owner && f.Slot >= w.Slots || f.Role == Gateway && f.Slot >= w.Gateways || f.Role == Server &&
				f.Slot >= w.Servers {
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
	if kinds[Clock] > 0 {
		t.Error("the clock is turned, and must not be")
	}
	if w.Plan(7, 0).String() == w.Plan(8, 0).String() {
		t.Error("another seed gives the same")
	}
}

func TestClockIsTurnedBothWaysWhereItMay(t *testing.T) {
	w := World{Slots: 3, Gateways: 3, Servers: 3, Clock: true}
	kinds, ahead := map[Kind]int{}, 0
	for i := range 200 {
		clocks := 0
		for _, f := range w.Plan(7, i).Faults {
			kinds[f.Kind]++
			if f.Kind != Clock {
				if f.Jump != 0 || f.Role == Machine {
					t.Errorf("schedule %d: %+v", i, f)
				}
				continue
			}
			if clocks++; f.Jump > 0 {
				ahead++
			}
			if d := f.Jump.Abs(); f.Role != Machine || d < shortestJump || d > longestJump {
				t.Errorf("schedule %d: %+v", i, f)
			}
		}
		if clocks > 1 {
			t.Errorf("schedule %d turns the clock twice at once", i)
		}
	}
	if n := kinds[Clock]; len(kinds) != len(Kinds) || n < 40 || n > 100 || ahead < n/4 || ahead > n*3/4 {
		t.Errorf("200 schedules: %v, %d of the jumps ahead", kinds, ahead)
	}
}
