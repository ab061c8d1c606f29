package agent

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// siteEvents is this node's part in passing the log's events on in its site. It is not changed.
type siteEvents struct {
	from   []identity.ID // the leaders that it may have them from, the best first; none: servers alone
	passes bool          // it passes them on, or will once it acts as a leader
}

// eventsBy is whom a node has the events from by its plan: the leaders that act, in the order in which it uses them,
// without those that it finds dead. A node that leads, or is to, has them from servers, and so has every node of a site
// that is full.
func eventsBy(p *sites.Plan, server bool, dead func(identity.ID) bool) siteEvents {
	if p == nil || p.Full || server || p.Topology(p.Site) != sites.Site {
		return siteEvents{}
	}
	if p.Elected || p.Forwards {
		return siteEvents{passes: true}
	}
	var e siteEvents
	for id := range p.Order(p.Self) {
		acts := slices.ContainsFunc(p.Leaders[p.Site], func(l sites.Leader) bool { return l.ID == id && l.Acting })
		if acts && !dead(id) {
			e.from = append(e.from, id)
		}
	}
	return e
}

// mayHaveEvents tells why a node does not get the events from this one, by the plan of this one; nil: it gets them.
func mayHaveEvents(p *sites.Plan, peer identity.ID) error {
	if p == nil || p.Full || p.Topology(p.Site) != sites.Site {
		return errors.New("this node's site does not speak through leaders")
	}
	if !slices.ContainsFunc(p.Leaders[p.Site], func(l sites.Leader) bool { return l.ID == p.Self && l.Acting }) {
		return fmt.Errorf("this node does not lead %s", siteText(p.Site))
	}
	if site, known := p.SiteOf(peer); !known || site != p.Site {
		return fmt.Errorf("node %s is not of %s, which this node leads", peer, siteText(p.Site))
	}
	return nil
}

// followLeaders has the events come from whom the newest plan says, and from nobody whose path has died.
func (a *Agent) followLeaders(now time.Time) {
	paths := a.currentPaths()
	next := eventsBy(a.sitePlan.Load(), a.isServer(), func(id identity.ID) bool { return died(paths[id], now) })
	if old := a.siteEvents.Load(); old != nil && old.passes == next.passes && slices.Equal(old.from, next.from) {
		return
	}
	a.siteEvents.Store(&next)
	if a.client != nil {
		a.client.LeadersChanged()
	}
}

// died tells of a path that was lost, and is not about to come back, so far as is known. An idle pair has no path
// and is not dead.
func died(p path.Path, now time.Time) bool {
	return p.FollowsDead() && (!p.Alive || now.Sub(p.Since) < sitemesh.ShunFor)
}

// eventLeaders and passesEvents are what the client of the log asks.
func (a *Agent) eventLeaders() []identity.ID {
	if e := a.siteEvents.Load(); e != nil {
		return e.from
	}
	return nil
}

func (a *Agent) passesEvents() bool {
	e := a.siteEvents.Load()
	return e != nil && e.passes
}

// passing is how many nodes have the events from this one, as a leader of their site.
func (a *Agent) passing() int {
	if s := a.rpc.Load(); s != nil {
		return s.Passing()
	}
	return 0
}

func eventSource(st consensus.FollowStatus, server bool) string {
	switch {
	case server:
		return metrics.FromRaft
	case st.Server.IsZero() || st.Err != nil:
		return metrics.FromNobody
	case st.Passed:
		return metrics.FromLeader
	}
	return metrics.FromServer
}

func (a *Agent) eventSource() string {
	if a.client == nil { // it is starting
		return metrics.FromNobody
	}
	return eventSource(a.client.Status(), a.isServer())
}

// eventStatus tells whom this node has the events from, and how many have them from it.
func (a *Agent) eventStatus(r *skeinv1.StatusResponse) {
	r.EventsStreams = uint32(a.passing())
	if s := a.eventSource(); s != metrics.FromServer && s != metrics.FromLeader {
		return
	}
	st := a.client.Status()
	r.EventsFrom, r.EventsFromName, r.EventsByLeader = st.Server.String(), a.roster.Name(st.Server), st.Passed
}
