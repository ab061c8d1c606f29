package client

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestPlan(t *testing.T) {
	const ms, now = time.Millisecond, time.Hour
	is := func(id byte, rtt time.Duration, change ...func(*standing)) standing {
		s := standing{id: identity.ID{id}, rtt: rtt, at: now - time.Minute, healthy: rtt > 0}
		for _, c := range change {
			c(&s)
		}
		return s
	}
	warm := func(s *standing) { s.warm = true }
	idle := func(s *standing) { s.healthy = false }
	dead := func(since time.Duration) func(*standing) {
		return func(s *standing) { s.healthy, s.failed, s.since = false, true, now-since }
	}
	trial := func(ago time.Duration) func(*standing) { return func(s *standing) { s.trial = now - ago } }
	order := func(n int64) func(*standing) { return func(s *standing) { s.order = n } }
	used := func(ago time.Duration) func(*standing) { return func(s *standing) { s.used = now - ago } }
	for _, c := range []struct {
		name string
		all  []standing
		want string
	}{
		{"none", nil, ""},
		{"two are always warm", []standing{is(1, 0), is(2, 0, dead(time.Second))}, "1 warm, 2 warm"},
		{"at the start", []standing{is(1, 0), is(2, 0), is(3, 0), is(4, 0)}, "1 trial, 2 trial, 3 standby, 4 standby"},
		{"the nearest two", []standing{is(1, 30*ms), is(2, 10*ms), is(3, 20*ms)}, "1 standby, 2 warm, 3 warm"},
		{"a little better is not worth a change", []standing{is(1, 22*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, idle)},
			"1 warm, 2 warm, 3 standby"},
		{"much better is, once it answers", []standing{is(1, 40*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, idle)},
			"1 warm, 2 warm, 3 warm"},
		{"then the other goes", []standing{is(1, 40*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, warm)},
			"1 standby, 2 warm, 3 warm"},
		{"a lost one is replaced, and tried on", []standing{is(1, 5*ms, warm, dead(time.Second)), is(2, 10*ms, warm),
			is(3, 20*ms, idle)}, "1 warm, 2 warm, 3 warm"},
		{"until it is back", []standing{is(1, 5*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, warm)}, "1 warm, 2 warm, 3 " +
			"standby"},
		{"a peer's need", []standing{is(1, 5*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, idle, used(59*time.Second)),
			is(4, 20*ms, idle, used(61*time.Second))}, "1 warm, 2 warm, 3 on-demand, 4 standby"},
		{"held ports", []standing{is(1, 5*ms, warm), is(2, 10*ms, warm), is(3, 20*ms, func(s *standing) { s.bound = true })},
			"1 warm, 2 warm, 3 on-demand"},
		{"unknown ones get a trial", []standing{is(1, 5*ms, warm), is(2, 10*ms, warm), is(3, 0)}, "1 warm, 2 warm, 3 trial"},
		{"those that failed after the others, the oldest first", []standing{is(1, 5*ms, warm), is(2, 0, dead(6*time.Second)),
			is(3, 0, dead(7*time.Second)), is(4, 0)}, "1 warm, 2 standby, 3 trial, 4 trial"},
		{"those that have just failed not at all", []standing{is(1, 5*ms, warm), is(2, 0, dead(4*time.Second)),
			is(3, 0, dead(3*time.Second))}, "1 warm, 2 standby, 3 standby"},
		{"a trial goes on for some tries", []standing{is(1, 0, dead(time.Second), trial(9*time.Second)),
			is(2, 0, dead(time.Second), trial(11*time.Second)), is(3, 0), is(4, 0), is(5, 0)},
			"1 trial, 2 standby, 3 trial, 4 trial, 5 standby"},
		{"where two answer, failed ones seldom", []standing{is(1, 5*ms, warm), is(2, 6*ms, warm), is(3, 0, dead(time.Minute)),
			is(4, 0, dead(3*time.Minute))}, "1 warm, 2 warm, 3 standby, 4 trial"},
		{"two as near as can be: no others are tried", []standing{is(1, 5*ms, warm), is(2, 2*ms, warm), is(3, 0)},
			"1 warm, 2 warm, 3 standby"},
		{"but one that was admitted sooner", []standing{is(1, 5*ms, warm, order(2)), is(2, 2*ms, warm, order(3)),
			is(3, 0, order(1))}, "1 warm, 2 warm, 3 trial"},
		{"as near as each other: those admitted first", []standing{is(1, 11*ms, order(3)), is(2, 14*ms, order(1)),
			is(3, 10*ms, order(2))}, "1 standby, 2 warm, 3 warm"},
		{"one that is warm stays near for longer", []standing{is(1, 19*ms, order(1), warm), is(2, 10*ms, order(3)),
			is(3, 11*ms, order(2))}, "1 warm, 2 standby, 3 warm"},
		{"but not for ever", []standing{is(1, 26*ms, order(1), warm), is(2, 10*ms, order(3)), is(3, 11*ms, order(2))},
			"1 standby, 2 warm, 3 warm"},
		{"at the start, too", []standing{is(1, 0, order(3)), is(2, 0, order(2)), is(3, 0, order(1))},
			"1 standby, 2 trial, 3 trial"},
		{"old figures are taken anew", []standing{is(1, 5*ms, warm), is(2, 6*ms, warm), is(3, 50*ms, idle, func(s *standing) {
			s.at = now - remeasure - 1
		})}, "1 warm, 2 warm, 3 trial"},
	} {
		needs := plan(c.all, now, 0)
		var got []string
		for _, id := range slices.SortedFunc(maps.Keys(needs), func(a, b identity.ID) int {
			return slices.Compare(a[:], b[:])
		}) {
			got = append(got, fmt.Sprintf("%d %s", id[0], needs[id]))
		}
		if text := strings.Join(got, ", "); text != c.want {
			t.Errorf("%s: %s; want %s", c.name, text, c.want)
		}
	}
}

// An overloaded node tries no further relays as long as two answer.
func TestPlanOfALateNode(t *testing.T) {
	const now = time.Hour
	is := func(id byte, healthy bool) standing {
		s := standing{id: identity.ID{id}, healthy: healthy}
		if healthy {
			s.rtt, s.at = time.Millisecond, now
		}
		return s
	}
	if needs := plan([]standing{is(1, true), is(2, true), is(3, false)}, now,
		time.Second); needs[identity.ID{3}] != needNone {
		t.Errorf("a third relay: %s", needs[identity.ID{3}])
	}
	if needs := plan([]standing{is(1, true), is(2, false), is(3, false)}, now,
		time.Second); needs[identity.ID{2}] != needTrial {
		t.Errorf("a second relay: %s", needs[identity.ID{2}])
	}
}
