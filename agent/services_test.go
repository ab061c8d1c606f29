package agent

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestWhoNeedsOneMomentOfThePast(t *testing.T) {
	h := newHost(t, "dc1")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	a.phase.Store(PhaseRunning)
	for _, c := range []struct {
		request *skeinv1.WhoRequest
		want    string
	}{
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtTime: time.Now().Add(time.Hour).UnixNano()}, "is in the future"},
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtIndex: 1, AtTime: 1}, "give one of them"},
	} {
		_, err := a.services().Who(t.Context(), c.request)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %v, want %q", c.request, err, c.want)
		}
	}
}
