package kube

import (
	"testing"
	"time"

	"github.com/skeinmesh/skein/kube/resource"
)

// A resource that was refused is left alone for a while; a new generation of it, or another one of its name, is not.
func TestANewGenerationIsTriedAtOnce(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	r := refusedWishes{"u1": {generation: 3, until: now.Add(10 * time.Second)}}
	for _, c := range []struct {
		name string
		m    resource.Meta
		at   time.Duration
		want bool // it is left alone
	}{
		{"the same", resource.Meta{UID: "u1", Generation: 3}, 0, true},
		{"when the time is over", resource.Meta{UID: "u1", Generation: 3}, 10 * time.Second, false},
		{"the next generation", resource.Meta{UID: "u1", Generation: 4}, 0, false},
		{"made anew", resource.Meta{UID: "u2", Generation: 3}, 0, false},
	} {
		if got := r.wait(c.m, now.Add(c.at)) > 0; got != c.want {
			t.Errorf("%s: left alone: %v, want %v", c.name, got, c.want)
		}
	}
}
