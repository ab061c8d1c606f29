package consensus

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// The log's time decides when tokens expire and blocks may be given again. It comes from the leader's clock, and clocks
// jump: docs/decisions/0042.
const (
	// two clocks that differ by less agree; also how far the log's time may at once go beyond real time
	clockBound   = 45 * time.Second
	clockRestart = 7 * 24 * time.Hour // the same, when it is not known how much time has passed since the last event
	clockAsk     = 5 * time.Second    // between two readings of the other voters' clocks
	clockStale   = 30 * time.Second   // an older reading does not count
)

// clocks holds readings of the other servers' clocks. Each is kept with the monotonic time of the reading, so that it
// is independent of this server's own clock.
type clocks struct {
	sync.Mutex
	of map[raft.ServerID]reading
}

type reading struct {
	clock int64     // Unix nanoseconds
	at    time.Time // when it showed that; monotonic
}

// note records the clock in a server's answer. The reading counts as taken midway between question and answer.
func (c *clocks) note(id raft.ServerID, clock int64, asked, answered time.Time) {
	if clock <= 0 { // an earlier version sends no time
		return
	}
	c.Lock()
	defer c.Unlock()
	if c.of == nil {
		c.of = make(map[raft.ServerID]reading)
	}
	c.of[id] = reading{clock, asked.Add(answered.Sub(asked) / 2)}
}

// now returns what the other voters' clocks show now, as far as that is known.
func (c *clocks) now(self raft.ServerID, servers []raft.Server, now time.Time) map[raft.ServerID]int64 {
	c.Lock()
	defer c.Unlock()
	out := make(map[raft.ServerID]int64)
	for _, v := range servers {
		if r, ok := c.of[v.ID]; ok && v.Suffrage == raft.Voter && v.ID != self && now.Sub(r.at) <= clockStale {
			out[v.ID] = r.clock + int64(now.Sub(r.at))
		}
	}
	return out
}

// verdict is the result of comparing a clock with the other voters' clocks.
type verdict int32

const (
	unjudged  verdict = iota // too few clocks are known, or they disagree: it may be right
	confirmed                // it agrees with a majority of the known clocks, itself included
	wrong                    // a majority is ahead of it by more than clockBound, or a majority is behind it by more
)

func (v verdict) String() string { return [...]string{"unjudged", "confirmed", "wrong"}[v] }

// judgeClock compares a clock with others. If there is only one other and it differs, either may be right.
func judgeClock(own int64, others []int64) verdict {
	agree, ahead, behind := 1, 0, 0
	for _, o := range others {
		switch d := time.Duration(o - own); {
		case d > clockBound:
			ahead++
		case d < -clockBound:
			behind++
		default:
			agree++
		}
	}
	all := len(others) + 1
	switch {
	case 2*ahead > all || 2*behind > all:
		return wrong
	case all > 1 && 2*agree > all:
		return confirmed
	}
	return unjudged
}

// levelVoter returns a voter whose clock the other clocks confirm, to hand leadership to. own is the leader's clock.
func levelVoter(own int64, others map[raft.ServerID]int64) (raft.ServerID, bool) {
	var ids []raft.ServerID
	for id := range others {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		rest := []int64{own}
		for _, o := range ids {
			if o != id {
				rest = append(rest, others[o])
			}
		}
		if judgeClock(others[id], rest) == confirmed {
			return id, true
		}
	}
	return "", false
}

// pace bounds how the log's time follows the leader's clock: at half to twice the speed of real time, counted from the
// log's time at one moment, and at once by slack. So a clock that jumps ahead makes little expire too early, and if the
// log is ahead or the clock was set back, nothing lasts for ever.
type pace struct {
	base  int64         // the log's time
	at    time.Time     // when the log's time was base; monotonic
	slack time.Duration // how far beyond real time the log may go at once
}

// next returns the time of the next event. A clock that a majority confirms is followed forward by any distance.
func (p pace) next(newest, clock int64, v verdict, now time.Time) int64 {
	passed := max(now.Sub(p.at), 0)
	t := max(clock, p.base+int64(passed/2), newest)
	if p.base == 0 || v == confirmed { // 0: there is no event yet
		return t
	}
	most := p.base
	for _, d := range []time.Duration{passed, passed, p.slack} {
		if most > math.MaxInt64-int64(d) {
			return t
		}
		most += int64(d)
	}
	return max(min(t, most), newest)
}

// keepPace starts the pace at the log's present time. How much real time has passed since its last event is known if
// this process received the event, and not if the event was read from disk.
func (t *term) keepPace(newest int64) {
	s := t.server
	t.pace = pace{base: newest, at: s.cfg.Replica.lastEvent(), slack: clockBound}
	if !s.live.Swap(true) || t.pace.at.IsZero() {
		t.pace.at, t.pace.slack = time.Now(), clockRestart
	}
}

// clockVerdict compares this server's clock with the other voters' clocks.
func (s *Server) clockVerdict() verdict {
	others := s.otherClocks()
	all := make([]int64, 0, len(others))
	for _, v := range others {
		all = append(all, v)
	}
	return judgeClock(s.cfg.Now().UnixNano(), all)
}

func (s *Server) otherClocks() map[raft.ServerID]int64 {
	return s.clocks.now(raft.ServerID(s.cfg.ID.String()), s.raft.GetConfiguration().Configuration().Servers, time.Now())
}

// watchClocks reads the other voters' clocks every clockAsk, so that a server knows them before it leads.
func (s *Server) watchClocks(ctx context.Context) {
	defer s.running.Done()
	tick := time.NewTicker(clockAsk)
	defer tick.Stop()
	for {
		var voters []*skeinv1.Server
		for _, v := range s.cfg.Replica.State().Servers() {
			if v.GetVoter() {
				voters = append(voters, v)
			}
		}
		s.askServers(ctx, voters, func(raft.ServerID, *skeinv1.ReadEventsResponse, error) {})
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// askServers asks other servers, all at once, how far their logs are, and notes their clocks.
func (s *Server) askServers(ctx context.Context, servers []*skeinv1.Server,
	each func(raft.ServerID, *skeinv1.ReadEventsResponse, error)) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.CareInterval)
	defer cancel()
	var wg sync.WaitGroup
	for _, v := range servers {
		id, err := identity.ParseID(v.NodeId)
		if err != nil || id == s.cfg.ID {
			continue
		}
		wg.Go(func() {
			asked := time.Now()
			r, err := s.cfg.Conns.Cluster(id).ReadEvents(ctx, &skeinv1.ReadEventsRequest{After: math.MaxUint64, Limit: 1})
			if err == nil {
				s.clocks.note(raft.ServerID(v.NodeId), r.GetTime(), asked, time.Now())
			}
			each(raft.ServerID(v.NodeId), r, err)
		})
	}
	wg.Wait()
}

// clockRefusal returns why this leader decides nothing now; nil: it decides. Callers then look for another leader.
func (t *term) clockRefusal() error {
	if t.server.clockVerdict() != wrong {
		return nil
	}
	return errWrongClock
}

// errWrongClock is not final: another leader will decide.
var errWrongClock error = &NotLeaderError{wrongClock: true}

// yieldClock hands leadership to a voter with a better clock, if this server's is wrong.
func (t *term) yieldClock() {
	s := t.server
	if s.clockVerdict() != wrong {
		return
	}
	id, ok := levelVoter(s.cfg.Now().UnixNano(), s.otherClocks())
	if !ok {
		t.log.Error("this leader's clock is far from the other voters': it decides nothing, and no voter can take over",
			"next", "set the clocks of the servers")
		return
	}
	t.log.Error("this leader's clock is far from the other voters': it hands over", "to", id, "next",
		"set this host's clock: start an NTP client")
	if err := s.wait(s.raft.LeadershipTransferToServer(id, raft.ServerAddress(id))); err != nil {
		t.log.Warn("handing over failed; it will be tried again", "to", id, "error", err)
	}
}
