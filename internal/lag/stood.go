package lag

import (
	"sync"
	"time"
)

// Stood measures, until it is asked, the longest time for which this process did not get to run, to within every. It is
// for tests and labs, whose failures may be the machine's: it wakes the process each time.
func Stood(every time.Duration) (longest func() time.Duration) {
	s := stops{every: every, last: time.Now()}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				s.woke(time.Now())
			case <-stop:
				s.woke(time.Now())
				return
			}
		}
	}()
	end := sync.OnceFunc(func() { close(stop); <-done })
	return func() time.Duration { end(); return s.longest }
}

// stops are the times between two wakes that should be every apart.
type stops struct {
	every, longest time.Duration
	last           time.Time
}

func (s *stops) woke(now time.Time) {
	s.longest, s.last = max(s.longest, now.Sub(s.last)-s.every), now
}
