package consensus

import (
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Vote reports whether an agreed server votes, in the log and in Raft's configuration as this server knows it. If not,
// why says what is missing; only the leader knows how far a new server is, so why is empty on other servers.
func (s *Server) Vote(v *skeinv1.Server) (votes bool, why string) {
	id, now := raft.ServerID(v.GetNodeId()), time.Now()
	view := voteView{logged: v.GetVoter(), leads: s.IsLeader(), silent: s.health.failing(id), stability: s.cfg.Stability}
	for _, r := range s.raft.GetConfiguration().Configuration().Servers {
		if r.ID == id {
			view.added, view.voter = true, r.Suffrage == raft.Voter
		}
	}
	view.keepsUp, view.upFor = s.health.keepsUp(id, now)
	return view.logged && view.voter, view.missing()
}

// voteView is what a server knows of another one's vote.
type voteView struct {
	logged       bool // the log says that it votes
	added, voter bool // in Raft's configuration
	leads        bool // this server leads: what follows is known
	silent       bool
	keepsUp      bool
	upFor        time.Duration
	stability    time.Duration
}

// missing is why the server does not vote yet; empty if it does, or if that is not known here.
func (v voteView) missing() string {
	switch {
	case v.logged && v.voter:
		return ""
	case v.logged:
		return "its vote is agreed, but Raft's configuration does not have it yet"
	case v.voter:
		return "Raft's configuration has its vote, but the log does not say so yet"
	case !v.leads:
		return ""
	case !v.added:
		return "it is not in Raft's configuration yet"
	case v.silent:
		return "it does not answer the leader's heartbeats"
	case !v.keepsUp:
		return "it has not shown yet that it has the whole log"
	}
	return fmt.Sprintf("it has kept up with the log for %s, and votes after %s",
		v.upFor.Truncate(100*time.Millisecond), v.stability)
}

// keepsUp reports whether a server has the log, and since how long.
func (h *health) keepsUp(id raft.ServerID, now time.Time) (bool, time.Duration) {
	h.Lock()
	defer h.Unlock()
	since, ok := h.since[id]
	return ok, now.Sub(since)
}
