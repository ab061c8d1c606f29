package consensus

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestWhyAServerDoesNotVote(t *testing.T) {
	const stability = 5 * time.Second
	for want, v := range map[string]voteView{
		"": {logged: true, added: true, voter: true, leads: true},
		"its vote is agreed, but Raft's configuration does not have it yet":  {logged: true, added: true},
		"Raft's configuration has its vote, but the log does not say so yet": {added: true, voter: true},
		"it is not in Raft's configuration yet":                              {leads: true},
		"it does not answer the leader's heartbeats":                         {leads: true, added: true, silent: true},
		"it has not shown yet that it has the whole log":                     {leads: true, added: true},
		"it has kept up with the log for 2.1s, and votes after 5s": {leads: true, added: true, keepsUp: true,
			upFor: 2149 * time.Millisecond, stability: stability},
	} {
		if got := v.missing(); got != want {
			t.Errorf("%+v: %q, want %q", v, got, want)
		}
	}
	if got := (voteView{added: true, keepsUp: true}).missing(); got != "" {
		t.Errorf("a follower does not know how far another one is, and says %q", got)
	}
}

// A new server votes when it has kept up for the stability period, and until then the leader says how far it is. One
// that is cut off begins anew.
func TestNewServerIsToldToWaitForItsVote(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		leader, second := c.leader(), c.add("s2", true)
		c.join(second)
		joined := time.Now()
		wait := func(what string, f func(votes bool, why string) error) {
			t.Helper()
			c.eventually(what, func() error {
				votes, why := leader.raft.Vote(leader.replica.State().Server(second.id))
				if !votes && why == "" {
					t.Error("the leader does not know why a server does not vote")
				}
				return f(votes, why)
			})
		}
		says := func(text string) func(bool, string) error {
			return func(votes bool, why string) error {
				if votes || !strings.Contains(why, text) {
					return fmt.Errorf("votes %t, %q", votes, why)
				}
				return nil
			}
		}
		wait("the leader counts the time", says("and votes after 5s"))
		if votes, why := second.raft.Vote(second.replica.State().Server(second.id)); votes || why != "" {
			t.Errorf("the new server itself: votes %t, %q", votes, why)
		}
		c.net.cut(ids(leader), ids(second))
		wait("the leader notices that it is gone", says("does not answer"))
		c.net.heal()
		back := time.Now()
		wait("it votes", func(votes bool, why string) error {
			if !votes {
				return fmt.Errorf("not yet: %s", why)
			}
			return nil
		})
		if took := time.Since(back); took < leader.raft.cfg.Stability {
			t.Errorf("it votes %s after the connection was repaired, and %s after it joined: want %s without a break", took,
				time.Since(joined), leader.raft.cfg.Stability)
		}
		if votes, why := second.raft.Vote(second.replica.State().Server(second.id)); !votes || why != "" {
			t.Errorf("the new server itself, promoted: votes %t, %q", votes, why)
		}
	})
}
