package podnet

import (
	"fmt"
	"testing"

	"github.com/skeinmesh/skein/internal/testns"
)

// TestPodsOfTwoAgents: agents that share a host have their pods in separate tables. Each finds and removes only its
// own, and an agent whose table changes moves its pods.
func TestPodsOfTwoAgents(t *testing.T) {
	host := newHost(t)
	first, second := attachment(1, testns.New(t, "pod")), attachment(2, testns.New(t, "pod"))
	second.Table = 126
	mustAdd(t, host, first)
	mustAdd(t, host, second)
	found := func(table int) (out string) {
		t.Helper()
		in(t, host, func() error {
			fs, err := Scan("none", table)
			for _, f := range fs {
				out += f.Pod + " " + f.Addr.String() + "; "
			}
			return err
		})
		return out
	}
	const one, two = "pod-1 10.64.0.1; pod-1 fd64::1; ", "pod-2 10.64.0.2; pod-2 fd64::2; "
	if a, b := found(0), found(126); a != one || b != two {
		t.Errorf("the agents find %q and %q, want %q and %q", a, b, one, two)
	}
	in(t, host, func() error { return Check(second) })
	wrong := second
	wrong.Table = 0
	in(t, host, func() error {
		if err := Check(wrong); err == nil {
			return fmt.Errorf("the pod's routes are not in the default table, and nobody says so")
		}
		return nil
	})
	for range 2 { // what has moved stays
		in(t, host, func() error { return Move(126, 136) })
	}
	if a, b := found(0), found(136); a != one || b != two {
		t.Errorf("once the second's have moved, the agents find %q and %q", a, b)
	}
	second.Table = 136
	in(t, host, func() error { return Check(second) })
	in(t, host, func() error { return Purge(136) })
	if a, b := found(0), found(136); a != one || b != "" {
		t.Errorf("once the second's are removed, the agents find %q and %q", a, b)
	}
	in(t, host, func() error { return Check(first) })
}
