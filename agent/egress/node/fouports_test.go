package node

import (
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
)

// The tunnels' ports at times after a change, for a process that saw the change, for one started since, and for one
// whose host's clock is wrong.
func TestPortsOfTunnels(t *testing.T) {
	event := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	changed := stateOf(t, event, &skeinv1.Settings{FouPort: 6000,
		FouPortChange: &skeinv1.FouPortChange{Former: 5555, Since: event.UnixNano()}})
	before := stateOf(t, event.Add(-time.Hour), nil)
	both, next, last := dataplane.FoUPorts{Send: 5555, Also: 6000}, dataplane.FoUPorts{Send: 6000, Also: 5555},
		dataplane.FoUPorts{Send: 6000, Gone: 5555}
	for _, c := range []struct {
		name  string
		start bool          // the process begins with the state
		clock time.Duration // of the host, fast
		after time.Duration // since the first look, which is after ago since the event
		ago   time.Duration
		want  dataplane.FoUPorts
		wake  time.Duration
	}{
		{name: "seen", want: both, wake: 2 * time.Minute},
		{name: "seen, a minute later", after: time.Minute, want: both, wake: time.Minute},
		{name: "turned", after: 2 * time.Minute, want: next, wake: 8 * time.Minute},
		{name: "over", after: 10 * time.Minute, want: last},
		{name: "seen by a fast clock", clock: 3 * time.Hour, want: both, wake: 2 * time.Minute},
		{name: "seen by a slow clock", clock: -3 * time.Hour, after: 10 * time.Minute, want: last},
		{name: "started", start: true, ago: 3 * time.Minute, want: next, wake: 7 * time.Minute},
		{name: "started long after", start: true, ago: time.Hour, want: last},
		{name: "started with a slow clock", start: true, clock: -3 * time.Hour, ago: time.Hour, want: both,
			wake: 2 * time.Minute},
	} {
		var f fouPorts
		first := event.Add(c.ago + c.clock)
		if !c.start {
			if p, wake := f.follow(before, true, first); p != (dataplane.FoUPorts{Send: dataplane.FoUPort}) || wake != 0 {
				t.Errorf("%s: before the change %+v, %s", c.name, p, wake)
			}
		}
		f.follow(changed, c.start, first)
		if p, wake := f.follow(changed, false, first.Add(c.after)); p != c.want || wake != c.wake {
			t.Errorf("%s: %+v, and again in %s; want %+v, %s", c.name, p, wake, c.want, c.wake)
		}
	}
	// The log continues: its times count for a process that was away.
	var f fouPorts
	if p, _ := f.follow(stateOf(t, event.Add(time.Hour), changed.Settings()), false, event); p != last {
		t.Errorf("an hour later by the log: %+v", p)
	}
}

// stateOf is a state with settings, whose last event is of a time.
func stateOf(t *testing.T, at time.Time, set *skeinv1.Settings) *events.State {
	t.Helper()
	p := events.NewState().Proto()
	p.Time, p.Settings, p.Index = at.UnixNano(), set, 1
	s, err := events.FromProto(p)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
