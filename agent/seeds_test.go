package agent

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
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
