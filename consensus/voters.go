package consensus

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// voterStep is the one change that brings Raft's configuration nearer to the agreed servers.
type voterStep struct {
	kind voterAction
	id   raft.ServerID
}

type voterAction int

const (
	nothing     voterAction = iota
	addNonvoter             // a new server: it gets the log and no vote
	promote                 // it has kept up for long enough: log that it votes
	addVoter                // its vote is logged and not yet in Raft's configuration
	remove                  // it is not a server any more
	handOver                // this leader is not a server any more: another one should remove it
	postpone                // removing it now would leave no quorum of healthy voters
)

func (a voterAction) String() string {
	return [...]string{"nothing", "add non-voter", "promote", "add voter", "remove", "hand over", "postpone removal"}[a]
}

// voterView holds all inputs of planVoters.
type voterView struct {
	self    raft.ServerID
	raft    []raft.Server
	agreed  []*skeinv1.Server
	healthy func(raft.ServerID) bool // answers and has the log
	stable  func(raft.ServerID) bool // has been healthy for the stability period
}

// planVoters returns the next step, or nothing. A server is removed because the log says so and never because it
// failed; the removal must leave a quorum of healthy voters behind.
func planVoters(v voterView) voterStep {
	agreed := make(map[raft.ServerID]*skeinv1.Server, len(v.agreed))
	for _, a := range v.agreed {
		agreed[raft.ServerID(a.NodeId)] = a
	}
	if len(agreed) == 0 {
		return voterStep{} // no cluster yet
	}
	have := make(map[raft.ServerID]raft.ServerSuffrage, len(v.raft))
	for _, s := range v.raft {
		have[s.ID] = s.Suffrage
	}
	for _, s := range v.raft {
		if _, ok := agreed[s.ID]; !ok && s.Suffrage != raft.Voter {
			return voterStep{remove, s.ID}
		}
	}
	for _, a := range v.agreed {
		id := raft.ServerID(a.NodeId)
		suffrage, ok := have[id]
		switch {
		case !ok:
			return voterStep{addNonvoter, id}
		case suffrage == raft.Voter && !a.Voter:
			return voterStep{promote, id}
		case suffrage != raft.Voter && a.Voter && v.healthy(id):
			return voterStep{addVoter, id}
		case suffrage != raft.Voter && !a.Voter && v.stable(id):
			return voterStep{promote, id}
		}
	}
	return v.removal(agreed)
}

// removal removes voters that are not servers any more, this leader last.
func (v voterView) removal(agreed map[raft.ServerID]*skeinv1.Server) voterStep {
	var gone []raft.ServerID
	var voters []raft.ServerID
	for _, s := range v.raft {
		if s.Suffrage != raft.Voter {
			continue
		}
		voters = append(voters, s.ID)
		if agreed[s.ID] == nil {
			gone = append(gone, s.ID)
		}
	}
	step := voterStep{}
	for _, id := range gone {
		left := slices.DeleteFunc(slices.Clone(voters), func(o raft.ServerID) bool { return o == id })
		healthy := 0
		for _, o := range left {
			if o == v.self || v.healthy(o) {
				healthy++
			}
		}
		switch {
		case len(left) == 0 || healthy < len(left)/2+1:
			step = voterStep{postpone, id}
		case id != v.self:
			return voterStep{remove, id}
		case step.kind == nothing:
			step = voterStep{handOver, id}
		}
	}
	return step
}

// maySend returns why a node may not send Raft's requests to this server; nil: it may. Only voters may, because a node
// that may append entries can make the log say anything. Either the agreed state or Raft's configuration may be the
// first to know of a vote: a server that is new or was away has an old configuration, and one that lags has an old
// state. A node that is not a server in the state any more loses its streams at once, even while Raft's configuration
// still names it.
func (s *Server) maySend(id identity.ID) error {
	v := s.cfg.Replica.State().Server(id)
	switch {
	case v == nil:
		return fmt.Errorf("node %s is not a server", id)
	case !v.GetVoter() && !s.inConfiguration(id):
		return fmt.Errorf("server %s has no vote", id)
	}
	return nil
}

// votes reports whether a node is a voter of both the agreed state and Raft's configuration.
func (s *Server) votes(id identity.ID) bool {
	return s.cfg.Replica.State().Server(id).GetVoter() && s.inConfiguration(id)
}

// inConfiguration reports whether a node is a voter of Raft's newest configuration.
func (s *Server) inConfiguration(id identity.ID) bool {
	return slices.ContainsFunc(s.raft.GetConfiguration().Configuration().Servers, func(v raft.Server) bool {
		return v.ID == raft.ServerID(id.String()) && v.Suffrage == raft.Voter
	})
}

// health holds what the leader knows of the other servers: whether Raft's heartbeats fail, and since when each has the
// log.
type health struct {
	sync.Mutex
	silent map[raft.ServerID]bool      // heartbeats fail
	since  map[raft.ServerID]time.Time // keeps up since
}

func (h *health) reset() {
	h.Lock()
	defer h.Unlock()
	h.silent, h.since = make(map[raft.ServerID]bool), make(map[raft.ServerID]time.Time)
}

func (h *health) failed(id raft.ServerID) {
	h.Lock()
	defer h.Unlock()
	if h.silent != nil {
		h.silent[id] = true
		delete(h.since, id)
	}
}

func (h *health) resumed(id raft.ServerID) {
	h.Lock()
	defer h.Unlock()
	delete(h.silent, id)
}

// checked notes whether a server was found to have the log.
func (h *health) checked(id raft.ServerID, ok bool, now time.Time) {
	h.Lock()
	defer h.Unlock()
	if h.since == nil {
		return
	}
	if !ok || h.silent[id] {
		delete(h.since, id)
	} else if _, known := h.since[id]; !known {
		h.since[id] = now
	}
}

func (h *health) failing(id raft.ServerID) bool {
	h.Lock()
	defer h.Unlock()
	return h.silent[id]
}

// healthyFor reports whether a server has kept up for at least a while.
func (h *health) healthyFor(id raft.ServerID, d time.Duration, now time.Time) bool {
	h.Lock()
	defer h.Unlock()
	since, ok := h.since[id]
	return ok && now.Sub(since) >= d
}
