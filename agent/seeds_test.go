package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip/candidate/reflexive"
)

// A host behind a NAT sends keepalives to all its peers, a public one does not, and what is asked for the host counts
// first.
func TestKeepaliveOfAHost(t *testing.T) {
	for _, c := range []struct {
		asked uint32
		nat   skeinv1.NatType
		want  time.Duration
	}{
		{0, skeinv1.NatType_NAT_TYPE_NONE, 0},
		{0, skeinv1.NatType_NAT_TYPE_UNKNOWN, 25 * time.Second},
		{0, skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE, 25 * time.Second},
		{0, skeinv1.NatType_NAT_TYPE_SYMMETRIC, 25 * time.Second},
		{10, skeinv1.NatType_NAT_TYPE_SYMMETRIC, 10 * time.Second},
		{10, skeinv1.NatType_NAT_TYPE_NONE, 10 * time.Second},
	} {
		if have := keepalive(c.asked, c.nat, events.NewState().Settings()); have != c.want {
			t.Errorf("asked for %d s, %s: %s, want %s", c.asked, c.nat, have, c.want)
		}
	}
}

// Where two steps find the same address the earlier one has it: what was configured, what the router grants, what STUN
// servers see, what the cloud says, and the host's own addresses at last.
func TestDiscoverySteps(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	a.cfg.NatTraversal.IMDS = config.On
	a.reflexive = &reflexive.Step{}
	steps, err := a.discoverySteps()
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, s := range steps {
		have = append(have, s.Source())
	}
	if got, want := strings.Join(have, " "), "config portmap stun imds interface"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
