package client

import (
	"cmp"
	"slices"

	"github.com/skeinmesh/skein/identity"
)

// State returns the state of the session in one word: connected, suspect, failing, dialing or standby.
func (s RelayStats) State() string {
	switch {
	case s.Suspect:
		return "suspect"
	case s.Connected:
		return "connected"
	case s.LastError != "":
		return "failing"
	case s.Need != string(needNone):
		return "dialing"
	}
	return string(needNone)
}

// users counts the peers whose packets go by each relay.
func (p *Pool) users() map[identity.ID]int {
	p.mu.RLock()
	defer p.mu.RUnlock()
	users := map[identity.ID]int{}
	for _, s := range p.peers {
		if c := s.current.Load(); c != nil {
			users[c.relay.ID]++
		}
	}
	return users
}

// byNeed sorts the sessions in use first, and the nearest first among equals.
func byNeed(a, b RelayStats) int {
	rank := map[string]int{string(needWarm): 1, string(needDemand): 2, string(needTrial): 3, string(needNone): 4}
	return cmp.Or(cmp.Compare(rank[a.Need], rank[b.Need]), cmp.Compare(a.RTT, b.RTT),
		slices.Compare(a.Relay[:], b.Relay[:]))
}
