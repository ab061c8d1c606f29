package server

import (
	"testing"
	"time"
)

func TestBucket(t *testing.T) {
	b := bucket{rate: 1000} // a burst of 100
	for _, c := range []struct {
		at   time.Duration
		n    float64
		want time.Duration
	}{
		{time.Second, 100, 0},
		{time.Second, 50, 50 * time.Millisecond},
		{time.Second + 50*time.Millisecond, 10, 10 * time.Millisecond},
		{2 * time.Second, 100, 0}, // idle time saves up no more than a burst
		{2 * time.Second, 1, time.Millisecond},
	} {
		if d := b.take(c.at, c.n); (d - c.want).Abs() > time.Microsecond {
			t.Errorf("%.0f at %s: wait %s, want %s", c.n, c.at, d, c.want)
		}
	}
	if d := (&bucket{}).take(time.Second, 1e12); d != 0 {
		t.Errorf("no limit, and a wait of %s", d)
	}
}

func TestQuotaTakesTheStricter(t *testing.T) {
	q := quota{bucket{rate: 1e6}, bucket{rate: 100}}
	if d := q.take(time.Second, 1000, 60); d != 500*time.Millisecond {
		t.Errorf("wait %s for 50 packets too many at 100 a second", d)
	}
}
