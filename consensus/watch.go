package consensus

import (
	"context"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
)

// watchLeader has a silent leader replaced in turn. The library looks at random moments, one to three times the
// time-out after the last word, and a follower that still believes in the leader refuses the others' pre-votes: what
// counts is the slowest of a majority. Here each voter looks exactly when the time-out is over, one after the
// other, so that the one that completes a majority finds the rest ready and no two stand at once. The time-out
// itself is the same, and no shorter than the leader's own lease.
func (s *Server) watchLeader(ctx context.Context) {
	defer s.running.Done()
	patience := timeouts{s.cfg.Election, s.cfg.Election} // as Raft has it
	for {
		news := s.leader.wait()                                      // before the look, so that none is missed
		late := s.cfg.Lag.Late(time.Now()).Round(s.cfg.Election / 4) // Raft is told of each change
		wait := s.cfg.Election / turns
		want := timeouts{s.cfg.Election, s.cfg.Election + min(4*late, mostVotes*s.cfg.Election)}
		if due := s.leaderDue(late); !due.IsZero() {
			if left := time.Until(due); left > 0 {
				wait, want = left, timeouts{patient * s.cfg.Election, patient * s.cfg.Election}
			}
		}
		s.transport.out.keep(s.others())
		if want != patience && s.setPatience(want) {
			patience = want
		}
		var again <-chan time.Time
		if s.raft.State() != raft.Leader { // one that leads is told when it no longer does
			again = time.After(wait)
		}
		select {
		case <-again:
		case <-news:
		case <-ctx.Done():
			return
		}
	}
}

// patient is how much longer than due the library waits by itself, so that it does not get in between.
const patient = 3

// turns is how many voters look one after the other within one more time-out. A turn of 150 ms is longer than a
// round trip to nearly everywhere.
const turns = 4

// timeouts are Raft's: how long a leader may be silent, and how long a candidate waits for votes at least. On hosts
// that are late votes come late, and each election that is given up makes those of the one before worthless.
type timeouts struct{ leader, votes time.Duration }

// mostVotes is by how many time-outs a candidate that is late waits longer for votes, at most.
const mostVotes = 4

// others are the servers that this one may have to send to.
func (s *Server) others() (ids []identity.ID) {
	for _, v := range s.raft.GetConfiguration().Configuration().Servers {
		if id, err := identity.ParseID(string(v.ID)); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// leaderDue is when this server shall stop believing in its leader unless it is heard; zero: it has none. What was sent
// to a process that is late may still wait for it to look.
func (s *Server) leaderDue(late time.Duration) time.Time {
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
	patience := s.cfg.Election + min(late, s.cfg.Election)
	return s.raft.LastContact().Add(patience + time.Duration(turn)*s.cfg.Election/turns)
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

// setPatience tells Raft its time-outs. When the leader's becomes shorter, a follower looks at once how long ago it
// heard it.
func (s *Server) setPatience(t timeouts) bool {
	c := s.raft.ReloadableConfig()
	c.HeartbeatTimeout, c.ElectionTimeout = t.leader, t.votes
	if err := s.raft.ReloadConfig(c); err != nil {
		s.log.Warn("Raft's time-out cannot be set; a dead leader is noticed later", "error", err)
		return false
	}
	return true
}
