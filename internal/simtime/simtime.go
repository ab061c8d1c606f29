// Package simtime runs tests on virtual time, in bubbles of testing/synctest, also with the race detector.
//
// Goroutines of one bubble that look at lapsed timers at the same moment share one context of the detector, which
// corrupts it: the process crashes in it, or it checks itself and gives up (seen with go1.26; compare golang/go issue
// 78156). That needs two processors at a time, so with the detector a bubble has one. What it finds are accesses that
// nothing orders, whether or not they coincide.
package simtime

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

var (
	mu      sync.Mutex
	running int
	procs   int // before the first of those that run
)

// Test is synctest.Test.
func Test(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if raceDetector {
		enter()
		defer leave()
	}
	synctest.Test(t, f)
}

func enter() {
	mu.Lock()
	defer mu.Unlock()
	if running == 0 {
		procs = runtime.GOMAXPROCS(1)
	}
	running++
}

func leave() {
	mu.Lock()
	defer mu.Unlock()
	if running--; running == 0 {
		runtime.GOMAXPROCS(procs)
	}
}
