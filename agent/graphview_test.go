package agent

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestGraphNeedsAClusterAndThePast(t *testing.T) {
	h := newHost(t, "dc1")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.phase.Store(PhaseJoining)
	_, err := a.services().Graph(t.Context(), &skeinv1.GraphRequest{})
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "skein status") {
		t.Errorf("error %v", err)
	}
	a.replica = newReplica(t, w)
	a.phase.Store(PhaseRunning)
	_, err = a.services().Graph(t.Context(), &skeinv1.GraphRequest{AtTime: time.Now().Add(time.Hour).UnixNano()})
	if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "is in the future") {
		t.Errorf("error %v", err)
	}
}
