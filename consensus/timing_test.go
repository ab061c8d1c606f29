package consensus

import (
	"fmt"
	"testing"
	"time"
)

func TestTimingHasBuckets(t *testing.T) {
	var c timing
	for _, d := range []time.Duration{0, time.Millisecond, 2 * time.Millisecond, 300 * time.Millisecond, time.Minute} {
		c.add(d)
	}
	got := c.read()
	if got.Count != 5 || got.Sum != time.Minute+303*time.Millisecond {
		t.Errorf("%d durations of %s together", got.Count, got.Sum)
	}
	want := map[time.Duration]uint64{time.Millisecond: 2, 2500 * time.Microsecond: 3, 250 * time.Millisecond: 3,
		500 * time.Millisecond: 4, 5 * time.Second: 4}
	for bound, n := range want {
		if got.Under[bound] != n {
			t.Errorf("%d took at most %s, want %d", got.Under[bound], bound, n)
		}
	}
	if len(got.Under) != len(commitBounds) {
		t.Errorf("%d bounds", len(got.Under))
	}
}

// What a server counts of Raft follows what happens: commits at the leader, entries everywhere, a leader that is lost,
// and the silence of one that is cut off.
func TestStatsFollowWhatHappens(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		leader := c.leader()
		before := leader.raft.Stats()
		for i := range 4 {
			c.propose(leader, token(i))
		}
		c.agree()
		after := leader.raft.Stats()
		if n := after.Commits.Count - before.Commits.Count; n != 4 || after.Commits.Sum < before.Commits.Sum {
			t.Errorf("%d commits in %s are counted, want 4", n, after.Commits.Sum-before.Commits.Sum)
		}
		if after.CommitIndex < before.CommitIndex+4 || after.AppliedIndex != after.CommitIndex ||
			after.LogIndex < after.CommitIndex || after.Silence != 0 || after.State != "Leader" {
			t.Errorf("before %+v, after %+v", before, after)
		}
		follower := c.others(leader)[0]
		if s := follower.raft.Stats(); s.State != "Follower" || s.Silence < 0 || s.Silence > time.Second ||
			s.Commits.Count > 0 || s.LeaderChanges == 0 {
			t.Errorf("a follower: %+v", s)
		}
		saw := follower.raft.Stats().LeaderChanges
		leader.crash()
		c.eventually("another server leads", func() error {
			for _, n := range c.others(leader) {
				if n.raft.IsLeader() {
					return nil
				}
			}
			return fmt.Errorf("none does")
		})
		if s := follower.raft.Stats(); s.LeaderChanges != saw+1 || s.Term <= after.Term {
			t.Errorf("the leader died: %d changes, want %d; term %d after %d", s.LeaderChanges, saw+1, s.Term, after.Term)
		}
		var cut *node
		for _, n := range c.others(leader) {
			if !n.raft.IsLeader() {
				cut = n
			}
		}
		c.net.cut(ids(cut), ids(c.others(cut)...))
		time.Sleep(5 * time.Second) // virtual
		if s := cut.raft.Stats(); s.Silence < 4*time.Second {
			t.Errorf("a server that is cut off has heard its leader %s ago", s.Silence)
		}
	})
}
