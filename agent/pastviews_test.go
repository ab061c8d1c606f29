package agent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/planlog"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/printable"
)

// A change of a plan names the decisions that were made before it about the peers whose lines it has, and no others.
func TestStepsNameTheirReasons(t *testing.T) {
	home, cloud := identity.ID{1}, identity.ID{2}
	names := map[identity.ID]string{home: "home1", cloud: "cloud1"}
	at := func(second int64) time.Time { return time.Unix(second, 0) }
	decided := func(second int64, peer, rule string) *skeinv1.JournalEntry {
		return &skeinv1.JournalEntry{Time: at(second).UnixNano(), Body: &skeinv1.JournalEntry_PathDecision{
			PathDecision: &skeinv1.PathDecision{Peer: peer, Rule: rule, Reason: "So it is."}}}
	}
	started := &skeinv1.JournalEntry{Time: at(7).UnixNano(), Body: &skeinv1.JournalEntry_AgentStarted{
		AgentStarted: &skeinv1.AgentStarted{}}}
	steps := []planlog.Step{
		{Version: planlog.Version{Time: at(2), Index: 5}, Before: planlog.Version{Index: 5},
			Removed: []string{"peer home1 endpoint a\n"}, Added: []string{"peer home1 endpoint b\n"}},
		{Version: planlog.Version{Time: at(4), Index: 7}, Before: planlog.Version{Index: 5},
			Added: []string{"target 10.4.0.9/32\n"}},
		{Version: planlog.Version{Time: at(8), Index: 7}, Before: planlog.Version{Index: 7},
			Added: []string{"peer cloud1 endpoint c\n"}},
	}
	out := stepViews(steps, []*skeinv1.JournalEntry{
		decided(1, home.String(), "direct-proven"), decided(1, cloud.String(), "relay-first"),
		decided(3, home.String(), "direct-dead"), decided(3, "rubbish", "x"), started, decided(8, cloud.String(), "birthday"),
	}, func(id identity.ID) string { return names[id] })
	want := [][]string{
		{"home1: direct-proven: So it is."}, nil, {"the agent started", "cloud1: birthday: So it is."},
	}
	for i, s := range out {
		if !slices.Equal(s.GetBecause(), want[i]) {
			t.Errorf("step %d: because %q, want %q", i, s.GetBecause(), want[i])
		}
	}
	if len(out) != 3 || out[1].GetFromIndex() != 5 || out[1].GetIndex() != 7 ||
		out[0].GetAdded()[0] != "peer home1 endpoint b" {
		t.Errorf("%v", out)
	}
}

// What another node tells cannot move a terminal's cursor, nor turn text round.
func TestPrintable(t *testing.T) {
	if got := printable.Lines("peer \x1b[2Jhome1\r\n\u202eä 1\u009b"); got != "peer [2Jhome1\nä 1" {
		t.Errorf("%q", got)
	}
}

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
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtTime: time.Now().Add(time.Hour).UnixNano()}, "still to come"},
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtIndex: 1, AtTime: 1}, "want one of them"},
	} {
		_, err := a.services().Who(t.Context(), c.request)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %v, want %q", c.request, err, c.want)
		}
	}
}
