package lab

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

func TestWhatTheMachineDid(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	before := machine{at: start, all: 100 * time.Second, agents: map[int]time.Duration{1: 10 * time.Second, 2: time.Hour}}
	after := machine{at: start.Add(10 * time.Second), all: 115 * time.Second,
		agents: map[int]time.Duration{1: 13 * time.Second, 3: 2 * time.Second}} // 2 has ended, and 3 was started
	stood := "in 10s, the lab itself did not get to run for up to 20ms"
	used := fmt.Sprintf("%s, and of %d processors its agents used 0.50 and all else 1.00", stood, runtime.NumCPU())
	if got := before.until(after, 20*time.Millisecond); got != used {
		t.Errorf("it did %q, want %q", got, used)
	}
	after.err = errors.New("no /proc")
	if got := before.until(after, 20*time.Millisecond); got != stood {
		t.Errorf("where the processors' time is not known it did %q, want %q", got, stood)
	}
}

// TestTheMachineIsSeenAtWork has this process stand for an agent, and work.
func TestTheMachineIsSeenAtWork(t *testing.T) {
	const work = 300 * time.Millisecond
	pid := os.Getpid()
	l := &Lab{agents: []*agent{{rec: agentRecord{Process: process{PID: pid}}}, {}}} // the second was never started
	before := l.machine()
	after := before
	for end := time.Now().Add(time.Minute); after.agents[pid] < before.agents[pid]+work; after = l.machine() {
		if time.Now().After(end) {
			t.Fatalf("an agent that works all the time: %+v and then %+v", before, after)
		}
	}
	if before.err != nil || after.err != nil || after.all < before.all+work/2 || len(after.agents) != 1 {
		t.Errorf("%+v and then %+v", before, after)
	}
}
