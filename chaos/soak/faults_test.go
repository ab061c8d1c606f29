package soak

import (
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/chaos/lab"
)

// Those that are spared are the same for a seed, a server is among them, and most servers are not.
func TestSpared(t *testing.T) {
	spec, err := lab.Parse("crowd.yaml", lab.Crowd("many", 40))
	if err != nil {
		t.Fatal(err)
	}
	server := map[string]bool{}
	for _, n := range spec.Nodes {
		server[n.Name] = n.Server
	}
	first := spared(spec, 10, 1)
	for seed := range uint64(20) {
		names := spared(spec, 10, seed)
		servers := 0
		for _, n := range names {
			if server[n] {
				servers++
			}
		}
		if len(names) != 10 || servers != 1 {
			t.Errorf("seed %d: %d are spared, %d servers among them: %s", seed, len(names), servers, strings.Join(names, " "))
		}
	}
	if !slices.Equal(first, spared(spec, 10, 1)) || slices.Equal(first, spared(spec, 10, 2)) {
		t.Error("the seed does not choose them")
	}
	if names := spared(spec, 0, 1); len(names) != 0 {
		t.Errorf("%v are spared though none is to be", names)
	}
}

// No agent has two faults at a time.
func TestClaims(t *testing.T) {
	c := claims{held: map[string]bool{}}
	if got := c.claim("a", "b"); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("of two that nobody holds %v were taken", got)
	}
	if got := c.claim("b", "c"); !slices.Equal(got, []string{"c"}) {
		t.Errorf("of two of which one is held %v were taken", got)
	}
	c.free("a", "b")
	if got := c.claim("b", "c"); !slices.Equal(got, []string{"b"}) {
		t.Errorf("after it was given back %v were taken", got)
	}
}
