package kube

import (
	"strconv"
	"testing"
	"time"
)

func TestWritesAreFew(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	end := now.Add(time.Hour)
	var p pace
	n := 0
	for i := 0; now.Before(end); i++ { // content that changes each second
		content := strconv.Itoa(i)
		if wait, due := p.next(content, now); due && wait == 0 {
			p.wrote(content, now)
			n++
			if _, due := p.next(content, now); due {
				t.Fatal("what was written is written again")
			}
		} else if wait > writeEvery {
			t.Fatalf("a change waits %v", wait)
		}
		now = now.Add(time.Second)
	}
	if most := int(time.Hour/writeEvery) + writeBurst; n > most || n < most/2 {
		t.Errorf("%d writes in an hour, want about %d", n, most)
	}
	p.found("other")
	if _, due := p.next("other", now); due {
		t.Error("what was found is written")
	}
	p.forget()
	if _, due := p.next("other", now); !due {
		t.Error("what was forgotten is not written again")
	}
}

func TestFailedWritesWaitLonger(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var p pace
	waits := map[time.Duration]bool{}
	for i := range 12 {
		p.fail(now, 0)
		wait, due := p.next("x", now)
		least := min(failFirst<<i, failMost*2/3)
		if !due || wait < least || wait > least*3/2 {
			t.Errorf("after %d failures: %v, %v; want %v to half as long again", i+1, wait, due, least)
		}
		waits[wait-least] = true
	}
	if len(waits) < 6 {
		t.Errorf("agents that fail together come back together: beyond the least they wait %v", waits)
	}
	p.fail(now, 5*time.Minute)
	if wait, _ := p.next("x", now); wait != 5*time.Minute {
		t.Errorf("asked to stay away for 5m, it waits %v", wait)
	}
	p.again()
	if wait, due := p.next("x", now); !due || wait != 0 {
		t.Errorf("when the apiserver is back: %v, %v", wait, due)
	}
	p.fail(now, 0)
	p.wrote("x", now)
	if wait, due := p.next("y", now); !due || wait != 0 {
		t.Errorf("after a success: %v, %v", wait, due)
	}
}
