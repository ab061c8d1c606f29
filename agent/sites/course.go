package sites

import (
	"cmp"
	"iter"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// ElectionRests is how long an election gives the same until the record says so.
	ElectionRests = 2 * time.Second
	// SessionsBy is when a leader says that it leads, also while it does not reach the leaders of another site.
	SessionsBy = 10 * time.Second
)

// Course is what a host remembers from plan to plan, and what its record says of it. It is not safe for concurrent use;
// the zero value is that of a host that has just started.
type Course struct {
	leaders Memory // that acted
	lawful  Memory // that acted by right; see Plan.lawful
	elected Memory // whether they act yet or not
	peers   Memory
	term    termClock
	told    uint64 // the term that the record names: none before packets are passed on
	last    *Plan
}

// Plan makes the plan of now and remembers what the next ones need of it. In has what this host sees, and nothing of
// what it remembers; started is when its agent did; reached are those to whom it has a path. It returns after how long
// the host is to plan anew, 0: when something changes.
func (c *Course) Plan(in Input, started time.Time, reached func(identity.ID) bool, now time.Time) (
	*Plan, time.Duration) {
	if c.last != nil { // what it says has held until now, however long ago it was made
		c.note(c.last, reached, now)
	}
	if InUse(in.Settings) || len(c.leaders.seen) > 0 {
		in.Recent, in.Peered = c.recent(in.Self, now), c.peers.Recent(now)
		in.Lawful = func(id identity.ID) bool { return c.lawful.Within(id, HandOver, now) }
		in.Fresh = now.Sub(started) < ForwardOn
		in.Led = c.term.term > 0 || c.leaders.Within(in.Self, ForwardOn, now)
	}
	p := Make(in)
	wait := time.Duration(0)
	if p.Full || p.Topology(p.Site) == Full {
		c.term = termClock{}
	} else if wait = c.term.next(p.Term, p.reachesOthers(in.Alive, reached), now); c.term.term > 0 && !p.Forwards {
		in.Led = true // it begins to lead
		p = Make(in)
	}
	if c.told > 0 {
		c.told = c.term.term
	}
	c.last = p
	c.note(p, reached, now)
	for _, m := range []*Memory{&c.leaders, &c.elected, &c.peers} {
		if at := m.Expires(now); !p.Full && !at.IsZero() && at.After(now) {
			wait = min(cmp.Or(wait, Grace), at.Sub(now))
		}
	}
	if at, ok := p.handedOver(&c.lawful); ok && at.After(now) {
		wait = min(cmp.Or(wait, Grace), at.Sub(now))
	}
	// When it has led, it stops to pass packets on.
	if at, ok := c.leaders.last(in.Self); ok && at.Before(now) && now.Sub(at) < ForwardOn && !p.Full {
		wait = min(cmp.Or(wait, ForwardOn), at.Add(ForwardOn).Sub(now))
	}
	if in.Fresh {
		wait = min(cmp.Or(wait, ForwardOn), ForwardOn-now.Sub(started))
	}
	return p, wait
}

// note notes what a plan says. This host has not led as long as it reached nobody elsewhere: then nobody elsewhere may
// have heard that it did, and they would refuse what it brings once it leads no more.
func (c *Course) note(p *Plan, reached func(identity.ID) bool, now time.Time) {
	outside := p.reachesAny(reached)
	c.leaders.Note(func(yield func(identity.ID) bool) {
		for id := range p.Acting() {
			if (id != p.Self || outside) && !yield(id) {
				return
			}
		}
	}, now)
	c.lawful.Note(slices.Values(p.lawful), now)
	c.elected.Note(p.elected(), now)
	c.peers.Note(p.Peering(), now)
}

// recent are those that may act as leaders by a view that is a little older than this host's. One that was elected may
// begin to lead just when others hear that it is to lead no more. This host itself has to have acted.
func (c *Course) recent(self identity.ID, now time.Time) map[identity.ID]bool {
	out := c.elected.Recent(now)
	delete(out, self)
	if c.leaders.Within(self, Grace, now) {
		out[self] = true
	}
	return out
}

// elected are the leaders of all sites.
func (p *Plan) elected() iter.Seq[identity.ID] {
	return func(yield func(identity.ID) bool) {
		for _, leaders := range p.Leaders {
			for _, l := range leaders {
				if !yield(l.ID) {
					return
				}
			}
		}
	}
}

// Tell has the record say that this host leads, once its data plane passes packets on: others begin to send as soon as
// they hear it. It reports whether the record says something new.
func (c *Course) Tell() bool {
	if c.told > 0 || c.term.term == 0 {
		return false
	}
	c.told = c.term.term
	return true
}

// Told is the term that the record of this host names; 0: that it does not lead.
func (c *Course) Told() uint64 { return c.told }

// handedOver is when the first of those stops that go on until their successors act, whether these do by then or not.
func (p *Plan) handedOver(lawful *Memory) (first time.Time, ok bool) {
	for _, leaders := range p.Leaders {
		for _, l := range leaders {
			if at, seen := lawful.last(l.ID); l.HandsOver && seen && (!ok || at.Add(HandOver).Before(first)) {
				first, ok = at.Add(HandOver), true
			}
		}
	}
	return first, ok
}

// reachesOthers reports whether a host has a path to everybody of another site that it has to send to itself once it
// leads and that is alive: acting leaders, and each node of a full site. Until then it sends by those that lead
// already.
func (p *Plan) reachesOthers(alive, reached func(identity.ID) bool) bool {
	for i, id := range p.in.Members.ids {
		if n := &p.nodes[i]; n.gate && n.known && n.site != p.Site && alive(id) && !reached(id) {
			return false
		}
	}
	return true
}

// reachesAny reports whether a host has a path to anybody of another site that peers with leaders.
func (p *Plan) reachesAny(reached func(identity.ID) bool) bool {
	for i, id := range p.in.Members.ids {
		if n := &p.nodes[i]; n.gate && n.known && n.site != p.Site && reached(id) {
			return true
		}
	}
	return false
}

// termClock damps the term that the record names.
type termClock struct {
	term   uint64 // that the record names
	wanted uint64 // by the election, since
	since  time.Time
}

// next takes what the election gives, and whether this host reaches the other sites' leaders. It returns how long until
// it is to be asked again, 0: when something changes.
func (c *termClock) next(wanted uint64, ready bool, now time.Time) time.Duration {
	if wanted != c.wanted {
		c.wanted, c.since = wanted, now
	}
	if c.term == c.wanted {
		return 0
	}
	rest := ElectionRests
	if c.term == 0 && !ready { // it begins to lead
		rest = SessionsBy
	}
	if wait := rest - now.Sub(c.since); wait > 0 {
		return min(wait, ElectionRests) // readiness comes without news
	}
	c.term = c.wanted
	return 0
}
