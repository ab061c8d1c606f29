package kube

import (
	"testing"
	"time"
)

// turns has room for as many clusters as may be up at once: beside more, two cores miss the tests' bounds. The flag
// -parallel of go test would not do: it lets the tests that called t.Parallel() go on in any order, so that the cluster of
// TestChart, which is up by then, would wait for its turn beside three others.
var turns = make(chan struct{}, 3)

// takeTurn waits until a cluster may be raised, and keeps the turn until the test has taken its cluster down.
func takeTurn(t *testing.T) {
	began := time.Now()
	turns <- struct{}{}
	t.Cleanup(func() { <-turns })
	t.Logf("waited %s for its turn", time.Since(began).Round(time.Second))
}

// parallel lets a test with a cluster run beside others.
func parallel(t *testing.T) {
	t.Parallel()
	takeTurn(t)
}
