package consensus

import (
	"context"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/identity"
)

// watchLeader makes voters replace a silent leader in turn. The library checks at random moments, one to three times
// the time-out after the leader's last message, and a follower that has not noticed the silence refuses the others'
// pre-votes: an election waits for the slowest of a majority. Here each voter checks exactly when the time-out is over,
// one after another: the voter that completes a majority finds the others ready, and no two become candidates at once.
// The time-out itself is the same, and no shorter than the leader's own lease.
func (s *Server) watchLeader(ctx context.Context) {
	defer s.running.Done()
	patience := timeouts{s.cfg.Election, s.cfg.Election} // Raft's present time-outs
	for {
		news := s.leader.wait()                                      // before the check, so that no news is missed
		late := s.cfg.Lag.Late(time.Now()).Round(s.cfg.Election / 4) // rounded, because each change reconfigures Raft
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
		if s.raft.State() != raft.Leader { // a leader gets news when it no longer leads
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

// patient is by which factor the library's own time-out is longer meanwhile, so that it does not interfere.
const patient = 3

// turns is how many voters check one after another within one more time-out. A turn of 150 ms is longer than a round
// trip to nearly everywhere.
const turns = 4

// timeouts are Raft's: how long a leader may be silent, and how long a candidate waits for votes at least. On late
// hosts votes come late, and an abandoned election makes the votes that were cast in it worthless.
type timeouts struct{ leader, votes time.Duration }

// mostVotes is by how many time-outs a late candidate waits longer for votes, at most.
const mostVotes = 4

// others returns the servers that this one may have to send to, itself included.
func (s *Server) others() (ids []identity.ID) {
	for _, v := range s.raft.GetConfiguration().Configuration().Servers {
		if id, err := identity.ParseID(string(v.ID)); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// leaderDue returns when this server must stop believing in its leader unless it hears from it; zero: it has no leader.
// A late process gets more time, since the leader's messages may wait for it to wake.
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

// turnOf returns a voter's place among those that may follow the leader, the same on all of them; -1: it has no vote.
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

// setPatience sets Raft's time-outs. When the leader's becomes shorter, a follower checks at once how long ago it heard
// from the leader.
func (s *Server) setPatience(t timeouts) bool {
	c := s.raft.ReloadableConfig()
	c.HeartbeatTimeout, c.ElectionTimeout = t.leader, t.votes
	if err := s.raft.ReloadConfig(c); err != nil {
		s.log.Warn("Raft's time-out cannot be set; a dead leader is noticed later", "error", err)
		return false
	}
	return true
}
