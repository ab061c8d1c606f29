package gossip

import (
	"testing"
	"time"
)

// However many are alive and look for those that are missing, together they try a few times a second and no more; one
// alone, or a few, try as often as before.
func TestAttemptsTogetherAreBounded(t *testing.T) {
	for _, alive := range []int{1, 2, 7, 8, 30, 200, 1000} {
		for _, missing := range []int{1, 50, 170, 1000} {
			each := restsAfter(missing, alive) / time.Duration(missing) // of one node, between two attempts
			together := float64(alive) / each.Seconds()
			if together > 4 || alive >= rejoinTogether && together < 2 || alive < rejoinTogether && each != rejoinEach {
				t.Errorf("%d alive, %d missing: one tries each %s, all together %.1f times a second", alive, missing, each,
					together)
			}
		}
	}
}
