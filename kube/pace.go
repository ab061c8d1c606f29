package kube

import (
	"math/rand/v2"
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

// retry decides when what has failed is tried again. The zero value has not failed; it is not safe for concurrent use.
type retry struct {
	failed int
	notYet time.Time
}

// wait is how long to wait before the next try; 0: try now.
func (r *retry) wait(now time.Time) time.Duration { return max(r.notYet.Sub(now), 0) }

// fail notes a failure. The next try waits longer each time, by chance up to half as long again, so that a thousand
// agents do not come back at one moment, and for after at least, which the apiserver has asked for.
func (r *retry) fail(now time.Time, after time.Duration) {
	wait := min(failFirst<<min(r.failed, 10), failMost*2/3)
	wait += rand.N(wait/2 + 1)
	r.failed++
	r.notYet = now.Add(max(wait, after))
}

// succeed notes that it worked, or that the next try is due at once.
func (r *retry) succeed() { *r = retry{} }

// pace decides when an object of this host's is written. The zero value has seen nothing; it is not safe for
// concurrent use.
type pace struct {
	written string // what the apiserver has, as far as it matters; empty: not known
	limit   *rate.Limiter
	retry   retry
}

// next tells whether the content is worth a write, and how long to wait for it; zero: write now.
func (p *pace) next(content string, now time.Time) (wait time.Duration, due bool) {
	if p.written == content {
		return 0, false
	}
	if p.limit == nil {
		p.limit = rate.NewLimiter(rate.Every(writeEvery), writeBurst)
	}
	if wait := p.retry.wait(now); wait > 0 {
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
	p.written = content
	p.retry.succeed()
	if p.limit != nil {
		p.limit.AllowN(now, 1)
	}
}

// fail notes that a write failed. The next one comes later, and not before after.
func (p *pace) fail(now time.Time, after time.Duration) { p.retry.fail(now, after) }

// again has what failed tried at once: the apiserver is back, or the token is another one.
func (p *pace) again() { p.retry.succeed() }

// forget has it written again: the object is another one, or somebody has changed it.
func (p *pace) forget() { p.written = "" }
