package sites

import (
	"cmp"
	"iter"
	"slices"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	// ElectionRests is how long the result of an election must stay the same before the record names it.
	ElectionRests = 2 * time.Second
	// SessionsBy is how long after its election a leader says that it leads at the latest, even if it has no path yet to
	// the leaders of another site.
	SessionsBy = 10 * time.Second
)

// Course is what a host remembers between plans, and the term that its record names. It is not safe for concurrent use;
// the zero value is that of a host that has just started.
type Course struct {
	leaders Memory // that acted, and said so in their records
	lawful  Memory // that acted by right; see Plan.lawful
	elected Memory // whether they act yet or not
	peers   Memory
	term    termClock
	told    uint64 // the term that the record names; 0 until this host's data plane forwards
	last    *Plan
}

// Plan makes the plan for now and remembers what later plans need. In holds what this host sees; Plan adds what it
// remembers. started is when the agent started; reached reports whether this host has a path to a node. The duration
// says after how long to plan again; 0 means not before something changes.
func (c *Course) Plan(in Input, started time.Time, reached func(identity.ID) bool, now time.Time) (
	*Plan, time.Duration) {
	if c.last != nil { // the last plan was in force until now, however old it is
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
		in.Led = true // this host begins to lead, and forwards before its record says so
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
	// A former leader stops forwarding ForwardOn after it led last.
	if at, ok := c.leaders.last(in.Self); ok && at.Before(now) && now.Sub(at) < ForwardOn && !p.Full {
		wait = min(cmp.Or(wait, ForwardOn), at.Add(ForwardOn).Sub(now))
	}
	if in.Fresh {
		wait = min(cmp.Or(wait, ForwardOn), ForwardOn-now.Sub(started))
	}
	return p, wait
}

// note remembers the leaders and peers of a plan. This host counts as a leader only once it has a path to another site:
// until then no other site may have heard that it leads, and would refuse the packets that it still forwards after it
// has stopped to lead.
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

// recent returns the nodes that may act as leaders in a view slightly older than this host's. Nodes that were only
// elected are included, since one may begin to lead just when others learn that it must not. This host itself must have
// acted.
func (c *Course) recent(self identity.ID, now time.Time) map[identity.ID]bool {
	out := c.elected.Recent(now)
	delete(out, self)
	if c.leaders.Within(self, Grace, now) {
		out[self] = true
	}
	return out
}

// elected yields the leaders of all sites, whether they act or not.
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

// Tell makes the record say that this host leads. The agent calls it once its data plane forwards, because others send
// as soon as they read the record. It reports whether the record changes.
func (c *Course) Tell() bool {
	if c.told > 0 || c.term.term == 0 {
		return false
	}
	c.told = c.term.term
	return true
}

// Told is the term that this host's record names; 0: it does not lead.
func (c *Course) Told() uint64 { return c.told }

// handedOver returns when the first of the former leaders that are handing over (Leader.HandsOver) stops, whether its
// successors act by then or not.
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

// reachesOthers reports whether this host has a path to every live node of another site to which a leader sends
// directly: acting leaders, and each node of a full site. Until then it sends through the leaders that act already.
func (p *Plan) reachesOthers(alive, reached func(identity.ID) bool) bool {
	for i, id := range p.in.Members.ids {
		if n := &p.nodes[i]; n.gate && n.known && n.site != p.Site && alive(id) && !reached(id) {
			return false
		}
	}
	return true
}

// reachesAny reports whether this host has a path to at least one node of another site that peers with leaders.
func (p *Plan) reachesAny(reached func(identity.ID) bool) bool {
	for i, id := range p.in.Members.ids {
		if n := &p.nodes[i]; n.gate && n.known && n.site != p.Site && reached(id) {
			return true
		}
	}
	return false
}

// termClock delays changes of the term that the record names, so that a short-lived election result is not published.
type termClock struct {
	term   uint64 // named by the record
	wanted uint64 // named by the election, and the same since `since`
	since  time.Time
}

// next takes the term that the election gives, and whether this host has paths to the other sites' leaders. It returns
// how long until the next call; 0: until something changes.
func (c *termClock) next(wanted uint64, ready bool, now time.Time) time.Duration {
	if wanted != c.wanted {
		c.wanted, c.since = wanted, now
	}
	if c.term == c.wanted {
		return 0
	}
	rest := ElectionRests
	if c.term == 0 && !ready { // this host begins to lead
		rest = SessionsBy
	}
	if wait := rest - now.Sub(c.since); wait > 0 {
		return min(wait, ElectionRests) // no event announces readiness, so it is polled
	}
	c.term = c.wanted
	return 0
}
