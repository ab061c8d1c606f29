package instant

import (
	"strings"
	"testing"
	"time"
)

func TestInstant(t *testing.T) {
	var m Instant
	if !m.Load().IsZero() {
		t.Fatal("a new one is a time")
	}
	now := time.Now()
	if !m.SetOnce(now) || m.SetOnce(now.Add(time.Hour)) || m.Load() != now {
		t.Errorf("it is %s, want the first of two", m.Load())
	}
	m.Set(now.Add(time.Minute))
	if d := m.Load().Sub(now); d != time.Minute {
		t.Errorf("%s later, want a minute", d)
	}
	// The monotonic reading is what makes a difference of two times independent of the wall clock.
	if !strings.Contains(m.Load().String(), "m=") {
		t.Errorf("%s has no monotonic reading", m.Load())
	}
	m.Clear()
	if !m.Load().IsZero() {
		t.Errorf("it is still %s", m.Load())
	}
}
