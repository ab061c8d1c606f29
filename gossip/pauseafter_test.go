package gossip

import (
	"testing"
	"time"
)

// However many live nodes look for many long-missing ones, together they make a few attempts a second and no more. One
// node alone, or a few, try as often as one does.
func TestAttemptsTogetherAreBounded(t *testing.T) {
	for _, alive := range []int{1, 2, 7, 8, 30, 200, 1000} {
		for _, missing := range []int{50, 170, 1000} {
			each := pauseAfter(100, missing, alive) / time.Duration(missing) // of one node, between two attempts
			together := float64(alive) / each.Seconds()
			if together > 4 || alive < rejoinTogether && each != rejoinEach {
				t.Errorf("%d alive, %d missing: one tries each %s, all together %.1f times a second", alive, missing, each,
					together)
			}
		}
	}
	if d := pauseAfter(0, 170, 30); d > 5*time.Second {
		t.Errorf("one that has failed once is tried again after %s", d)
	}
	if d := pauseAfter(100, 170, 0); d != rejoinAlone {
		t.Errorf("one that sees nobody waits %s", d)
	}
}

// TestALastMissingMemberIsNotPutOff: while a mesh is split in two, attempts are rare, since so many members are
// missing. When all but one are back, that one is tried as soon as if it alone had been missing all the time, and not
// sooner.
func TestALastMissingMemberIsNotPutOff(t *testing.T) {
	start := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	a := &attempt{failed: start, fails: 50}
	a.next = start.Add(pauseAfter(a.fails-1, 12, 8) * 3 / 2)
	if d := a.due(12, 8).Sub(start); d < time.Minute {
		t.Errorf("with 12 missing it is due after %s: they are no longer spread", d)
	}
	most := rejoinMost * 3 / 2
	if d := a.due(1, 19).Sub(start); d != most {
		t.Errorf("the last one missing is due after %s, want %s", d, most)
	}
	if a.next = start.Add(time.Second); a.due(1, 19) != a.next {
		t.Errorf("one that is due sooner is put off to %s", a.due(1, 19).Sub(start))
	}
	fresh := &attempt{next: start.Add(time.Hour)}
	if fresh.due(1, 19) != fresh.next {
		t.Error("an attempt that has not failed is moved")
	}
}
