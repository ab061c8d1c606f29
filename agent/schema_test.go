package agent

import (
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// TestUpgradedServersLearnPools: a cluster that was made by a version which knew no pools gets them when its server,
// upgraded, says what it folds now, and not before.
func TestUpgradedServersLearnPools(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	old := w.state.Proto()
	old.Nodes[0].MaxSchema = 1
	state, err := events.FromProto(old)
	if err != nil {
		t.Fatal(err)
	}
	decide := func(c *skeinv1.Command) error {
		c.Time = w.now.UnixNano()
		evs, _, err := events.Decide(state, c)
		for _, e := range evs {
			if err := state.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
		return err
	}
	pool := func() *skeinv1.Command {
		return &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
			Name: "default", BlockSizeBits: 5, Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16"}}}}}}
	}
	if err := decide(pool()); events.CodeOf(err) != events.FailedPrecondition {
		t.Fatalf("a server that cannot fold pools got one: %v", err)
	}
	news := schemaNews(state.Node(h.key.ID()))
	if news == nil {
		t.Fatal("an upgraded node has nothing to tell")
	}
	if err := decide(news); err != nil {
		t.Fatal(err)
	}
	if schemaNews(state.Node(h.key.ID())) != nil || schemaNews(nil) != nil {
		t.Error("it is told again")
	}
	if err := decide(pool()); err != nil {
		t.Error(err)
	}
}
