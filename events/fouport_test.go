package events

import (
	"fmt"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// The tunnels' port changes when everybody knows how, and one change at a time.
func TestFoUPortChanges(t *testing.T) {
	w := newCluster(t)
	set := func(port uint32) *skeinv1.Command {
		c := changeSettings(&skeinv1.Settings{FouPort: port})
		c.GetChangeSettings().Fields = []string{"fou_port"}
		return c
	}
	refused := func(c *skeinv1.Command, code Code, text string) {
		t.Helper()
		if _, _, err := w.propose(c); CodeOf(err) != code || !strings.Contains(err.Error(), text) {
			t.Fatalf("answered %v, want %q", err, text)
		}
	}
	if have := w.s.Settings().GetFouPort(); have != defaultFoUPort {
		t.Fatalf("a new cluster has port %d", have)
	}
	refused(set(6000), FailedPrecondition, "setting fou_port: node a runs a version that knows only port 5555: upgrade "+
		"skein on a")
	refused(set(65_536), InvalidArgument, "setting fou_port: 65536 is out of range; use 1 to 65535")
	for port, what := range map[uint32]string{51820: "WireGuard", 3478: "STUN", 7946: "gossip"} {
		refused(set(port), InvalidArgument, fmt.Sprintf("%d is the port of %s", port, what))
	}
	w.must(set(defaultFoUPort)) // changes nothing
	if c := w.s.Settings().GetFouPortChange(); c != nil {
		t.Fatalf("the same port was taken for another: %v", c)
	}

	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id("a"),
		MaxSchema: fouSchema}}})
	w.must(set(6000))
	have := w.s.Settings()
	began := time.Unix(0, w.s.Time())
	if c := have.GetFouPortChange(); have.GetFouPort() != 6000 || c.GetFormer() != 5555 || c.GetSince() != w.s.Time() {
		t.Fatalf("the change gives %v", have)
	}
	if what, need := w.s.neededSchema(); need != fouSchema {
		t.Fatalf("schema %d is needed for %s", need, what)
	}

	w.now = began.Add(3*time.Minute - time.Second)
	refused(set(7000), FailedPrecondition, "the tunnels are still changing from port 5555 to 6000, which takes 10m0s: "+
		"try again in 7m0s")
	refused(set(0), FailedPrecondition, "try again in 6m59s")
	other := changeSettings(&skeinv1.Settings{PersistentKeepaliveSeconds: 20,
		FouPortChange: &skeinv1.FouPortChange{Former: 1}})
	other.GetChangeSettings().Fields = []string{"persistent_keepalive_seconds", "fou_port_change"}
	w.must(other) // how it came to its port is the leader's to say
	if c := w.s.Settings().GetFouPortChange(); c.GetFormer() != 5555 || w.s.Settings().GetFouPort() != 6000 {
		t.Fatalf("another setting changed the port: %v", w.s.Settings())
	}

	w.now = began.Add(FoUPortEnd)
	w.must(set(0)) // the default one
	if c := w.s.Settings().GetFouPortChange(); w.s.Settings().GetFouPort() != 5555 || c.GetFormer() != 6000 {
		t.Fatalf("back: %v", w.s.Settings())
	}
}
