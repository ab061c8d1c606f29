package kube

import (
	"time"

	"golang.org/x/time/rate"
)

// What changes is written at once a few times, and then once in a while: each write is news for every node that
// watches.
const (
	writeEvery = 15 * time.Second
	writeBurst = 8
	failFirst  = time.Second
	failMost   = 2 * time.Minute
)

// pace decides when an object of this host's is written. The zero value has seen nothing; it is not safe for
// concurrent use.
type pace struct {
	written string // what the apiserver has, as far as it matters; empty: not known
	limit   *rate.Limiter
	failed  int
	notYet  time.Time // after a write that failed
}

// next tells whether the content is worth a write, and how long to wait for it; zero: write now.
func (p *pace) next(content string, now time.Time) (wait time.Duration, due bool) {
	if p.written == content {
		return 0, false
	}
	if p.limit == nil {
		p.limit = rate.NewLimiter(rate.Every(writeEvery), writeBurst)
	}
	if wait := p.notYet.Sub(now); wait > 0 {
		return wait, true
	}
	if p.limit.TokensAt(now) >= 1 {
		return 0, true
	}
	return time.Duration((1 - p.limit.TokensAt(now)) * float64(writeEvery)), true
}

// found notes that the apiserver has the content already.
func (p *pace) found(content string) { p.written = content }

// wrote notes that the content was written.
func (p *pace) wrote(content string, now time.Time) {
	p.written, p.failed, p.notYet = content, 0, time.Time{}
	if p.limit != nil {
		p.limit.AllowN(now, 1)
	}
}

// fail notes that a write failed. The next one waits longer each time, and for after at least.
func (p *pace) fail(now time.Time, after time.Duration) {
	wait := min(failFirst<<min(p.failed, 10), failMost)
	p.failed++
	p.notYet = now.Add(max(wait, after))
}

// forget has it written again: the object is another one, or somebody has changed it.
func (p *pace) forget() { p.written = "" }
