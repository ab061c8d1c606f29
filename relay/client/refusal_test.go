package client

import (
	"testing"
	"time"
)

// Each further refusal counts twice as long, up to a bound. One about packets sent before does not, and one that comes
// long after the last is a first one.
func TestRefusalsLast(t *testing.T) {
	var r refusal
	now := 10 * time.Second
	if r.stands(now) {
		t.Fatal("a way that nobody has refused is refused")
	}
	for _, hold := range []time.Duration{500, 1000, 2000, 4000, 8000, 16000, 30000, 30000} {
		hold *= time.Millisecond
		r = r.next(now, farHold)
		if !r.stands(now) || !r.stands(now+hold-1) || r.stands(now+hold) {
			t.Fatalf("want it to stand for %s, got %s", hold, r.hold)
		}
		if r.next(now+hold-1, farHold) != r {
			t.Fatal("a second word about the same packets counts")
		}
		now += hold
	}
	if r = r.next(now+farHold+1, farHold); r.hold != refusalFirst {
		t.Errorf("a word long after the last counts for %s", r.hold)
	}
}
