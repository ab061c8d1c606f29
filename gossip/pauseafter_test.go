package gossip

import (
	"testing"
	"time"
)

// However many are alive and look for many that are missing for long, together they try a few times a second and no
// more; one alone, or a few, try as often as one does.
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
