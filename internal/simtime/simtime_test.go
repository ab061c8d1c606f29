package simtime_test

import (
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/simtime"
)

// Many look at lapsed timers at once, by the race detector: on two processors it crashes within a tenth of a second.
func TestLapsedTimers(t *testing.T) {
	simtime.Test(t, func(*testing.T) {
		var all sync.WaitGroup
		for range 200 {
			all.Go(func() {
				for range 200 {
					tick := time.NewTicker(time.Millisecond)
					time.Sleep(5 * time.Millisecond)
					select {
					case <-tick.C:
					default:
					}
					tick.Stop()
				}
			})
		}
		all.Wait()
	})
}
