package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// A clock that is wrong by hours must stop nothing; the user is told.

func TestClockIsCompared(t *testing.T) { simtime.Test(t, testClockIsCompared) }

func testClockIsCompared(t *testing.T) {
	h := newHost(t, "a")
	a := newTestAgent(h, newWorld(t, h).state)
	for _, c := range []struct {
		off  time.Duration // this host's clock minus the leader's
		want string
	}{
		{0, ""},
		{20 * time.Second, ""},
		{3 * time.Hour, "this host's clock is 3h0m0s off the leader's"},
		{3 * time.Hour, "this host's clock is 3h0m0s off the leader's"},
		{-26 * time.Hour, "this host's clock is -26h0m0s off the leader's"},
		{-time.Second, ""},
	} {
		leader := identity.ID{1}
		a.onHeartbeat(leader, &skeinv1.SubscribeResponse_Heartbeat{Leader: leader.String(),
			Time: time.Now().Add(-c.off).UnixNano()})
		// a server that follows
		a.onHeartbeat(identity.ID{2}, &skeinv1.SubscribeResponse_Heartbeat{Leader: leader.String(), Time: 1})
		have := ""
		for _, p := range a.problems.list() {
			have = p.GetMessage()
			if p.GetSubject() != "clock" || p.GetSeverity() != warning || !strings.Contains(p.GetAdvice(), "NTP") {
				t.Errorf("the problem is %v", p)
			}
		}
		if have != c.want {
			t.Errorf("%s off: %q, want %q", c.off, have, c.want)
		}
		if time.Duration(a.clock.Load()) != c.off || !a.clockSeen.Load() {
			t.Errorf("%s off: the status says %s", c.off, time.Duration(a.clock.Load()))
		}
	}
	a.noteClock(0) // a seed that does not tell
	if d := time.Duration(a.clock.Load()); d != -time.Second {
		t.Errorf("a time that was not told became an offset of %s", d)
	}
}

// Tokens expire by the leader's clock, wherever the joiner's stands.
func TestTokenExpiresByTheLeadersClock(t *testing.T) {
	a, b, c := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	w := newWorld(t, a)
	command := w.admission(b)
	command.Time = w.now.Add(40 * time.Hour).UnixNano() // what the joiner believes
	w.now = w.now.Add(59 * time.Minute)
	w.must(command)
	command = w.admission(c)
	command.Time = w.now.Add(-40 * time.Hour).UnixNano()
	w.now = w.now.Add(2 * time.Minute)
	var refused *events.Error
	if err := w.decide(command); !errors.As(err, &refused) || refused.Code != events.PermissionDenied ||
		!strings.Contains(refused.Message, "expired at 2026-03-01T13:00:00Z") {
		t.Errorf("have %v", err)
	}
}

// A restart supersedes the records of earlier ones by its epoch, which is a counter on disk.
func TestEpochsCountStarts(t *testing.T) {
	dir := t.TempDir()
	for want := range uint64(3) {
		if have, err := gossip.NextEpoch(dir); err != nil || have != want+1 {
			t.Fatalf("start %d has epoch %d, %v", want+1, have, err)
		}
	}
	h := newHost(t, "a")
	r := &skeinv1.Record{NodeId: h.key.ID().String(), Epoch: 4, Seq: 1, Time: time.Unix(0, 0).UnixNano()}
	wg, _ := h.wg.Public()
	r.WireguardKey = wg[:]
	s, err := gossip.Sign(h.key, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gossip.Verify(s, roster.New(newWorld(t, h).state)); err != nil {
		t.Errorf("a record from 1970 is refused: %v", err)
	}
}
