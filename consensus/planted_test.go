package consensus

import (
	"context"
	"testing"
	"time"

	"github.com/skeinmesh/skein/events"
)

// A leader that hears no other server may be deposed already, so what it reads from its state may be history. It must
// not refuse anything then: a node would be told that a pool is exhausted when it is not.
func TestDeposedLeaderRefusesNothing(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		old := c.leader()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if _, err := old.decide(ctx, revokeToken(1)); events.CodeOf(err) != events.NotFound {
			t.Fatalf("a leader with followers says %v of a token that is not there", err)
		}
		c.net.cut(ids(old), ids(c.others(old)...))
		if a, err := old.decide(ctx, revokeToken(1)); err == nil || events.CodeOf(err) != "" {
			t.Errorf("a leader without followers says %v %v of a token that may be there by now", a, err)
		}
		c.net.heal()
	})
}
