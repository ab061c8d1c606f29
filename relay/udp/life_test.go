package udp

import (
	"testing"
	"time"
)

func TestOnePairThatWorksTellsThatTheKernelForwards(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		name         string
		fell, worked time.Duration // ago; 0: never
		drops        bool
	}{
		{"nothing is known", 0, 0, false},
		{"one failed", time.Minute, 0, true},
		{"one failed, and another works", time.Minute, 2 * time.Minute, false},
		{"one failed, and another worked long ago", time.Minute, kernelRetry + time.Second, true},
		{"one failed long ago", kernelRetry + time.Second, 0, false},
	} {
		u := &Relay{}
		if c.fell != 0 {
			u.fellAt.Set(now.Add(-c.fell))
		}
		if c.worked != 0 {
			u.worked.Set(now.Add(-c.worked))
		}
		if got := u.kernelDrops(now); got != c.drops {
			t.Errorf("%s: drops is %v", c.name, got)
		}
	}
}
