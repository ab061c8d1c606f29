package consensus

import (
	"context"
	"slices"
	"time"

	"github.com/hashicorp/raft"
)

// watchLeader has a silent leader replaced in turn. The library looks at random moments, one to three times the
// time-out after the last word, and a follower that still believes in the leader refuses the others' pre-votes: what
// counts is the slowest of a majority. Here each voter looks exactly when the time-out is over, one after the
// other, so that the one that completes a majority finds the rest ready and no two stand at once. The time-out
// itself is the same, and no shorter than the leader's own lease.
func (s *Server) watchLeader(ctx context.Context) {
	defer s.running.Done()
	patience := s.cfg.Election // as Raft has it
	for {
		wait, want := s.cfg.Election/turns, s.cfg.Election
		if due := s.leaderDue(); !due.IsZero() {
			if left := time.Until(due); left > 0 {
				wait, want = left, patient*s.cfg.Election
			}
		}
		if want != patience && s.setPatience(want) {
			patience = want
		}
		if !pause(ctx, wait) {
			return
		}
	}
}

// patient is how much longer than due the library waits by itself, so that it does not get in between.
const patient = 3

// turns is how many voters look one after the other within one more time-out. A turn of 150 ms is longer than a
// round trip to nearly everywhere.
const turns = 4

// leaderDue is when this server shall stop believing in its leader unless it is heard; zero: it has none.
func (s *Server) leaderDue() time.Time {
	if s.raft.State() != raft.Follower {
		return time.Time{}
	}
	_, leader := s.raft.LeaderWithID()
	if leader == "" {
		return time.Time{}
	}
	turn := turnOf(raft.ServerID(s.cfg.ID.String()), leader, s.raft.GetConfiguration().Configuration().Servers)
	if turn < 0 {
		return time.Time{}
	}
	return s.raft.LastContact().Add(s.cfg.Election + time.Duration(turn)*s.cfg.Election/turns)
}

// turnOf is a voter's place among those that may follow the leader, the same on all of them; -1: it has no vote.
func turnOf(self, leader raft.ServerID, servers []raft.Server) int {
	var ids []raft.ServerID
	for _, v := range servers {
		if v.Suffrage == raft.Voter && v.ID != leader {
			ids = append(ids, v.ID)
		}
	}
	slices.Sort(ids)
	return slices.Index(ids, self)
}

// setPatience tells Raft its time-out. When it becomes shorter, a follower looks at once how long ago it heard its leader.
func (s *Server) setPatience(d time.Duration) bool {
	c := s.raft.ReloadableConfig()
	c.HeartbeatTimeout, c.ElectionTimeout = d, d
	if err := s.raft.ReloadConfig(c); err != nil {
		s.log.Warn("Raft's time-out cannot be set; a dead leader is noticed later", "err", err)
		return false
	}
	return true
}
