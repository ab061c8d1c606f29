package agent

import (
	"reflect"
	"testing"

	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/relay/client"
)

// The control net gets all that it can use. Each function that is missing has a default, so that nothing else would
// fail: without Via, for instance, control packets that a leader passes on count as users' traffic, and the path to it
// is kept busy.
func TestControlConfigIsWhole(t *testing.T) {
	h, leader, far := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	a := newTestAgent(h, newWorld(t, h, leader, far).state)
	a.cfg.Ports.Control, a.lag = 1, &lag.Meter{}
	a.pool = client.NewPool(client.PoolConfig{Self: a.id, Key: a.key, Log: quiet()})
	t.Cleanup(func() { a.pool.Close() })
	cfg := controlConfig(a)
	for v, i := reflect.ValueOf(cfg), 0; i < v.NumField(); i++ {
		if v.Field(i).IsZero() {
			t.Fatalf("%s is not set", v.Type().Field(i).Name)
		}
	}
	to, by := far.key.ID(), leader.key.ID()
	a.reach.Store(&sitemesh.Reach{Reach: sites.NewReach("", map[identity.ID]bool{by: true},
		map[identity.ID]sites.Next{to: {Via: by}}, nil, nil)})
	if via := cfg.Via(to); via != by {
		t.Errorf("packets to a node behind a leader are passed on by %s, want %s", via, by)
	}
	if via := cfg.Via(by); via != by {
		t.Errorf("packets to a peer are passed on by %s", via)
	}
}
