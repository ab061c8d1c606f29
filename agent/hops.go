package agent

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/identity"
)

const (
	hopsWithin     = 2 * time.Second  // reading the counters may take
	refusedOver    = 10 * time.Second // a rate is told over no less
	refusedLately  = time.Minute      // one over more says nothing of now
	refusedMatters = 1                // packets a second: a packet here and there is refused whenever sites change
	subjectHops    = "hops"
)

// hopReading is what the counters of hops said at a moment.
type hopReading struct {
	at time.Time
	n  hop.Counts
}

// hopWatch tells how fast packets of hops are refused. The counters are read when a user asks for status or metrics,
// and never at other times; it keeps those readings.
type hopWatch struct {
	mu     sync.Mutex
	kept   [2]hopReading // the older first, refusedOver or more between them
	newest hopReading
}

// note takes a reading of counters that began at some moment.
func (w *hopWatch) note(r hopReading, began time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.kept[0].at.IsZero() {
		w.kept = [2]hopReading{{at: began}, {at: began}}
	}
	if r.at.Sub(w.kept[1].at) >= refusedOver {
		w.kept[0], w.kept[1] = w.kept[1], r
	}
	w.newest = r
}

// refused is how many packets were refused lately, and over which time; 0: the readings are too near for a rate.
func (w *hopWatch) refused() (packets uint64, over time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if over = w.newest.at.Sub(w.kept[0].at); w.kept[0].at.IsZero() || over < refusedOver {
		return 0, 0
	}
	return refusedSince(w.kept[0], w.newest), over
}

// refusedSince is what was refused between two readings. The kernel counts anew whenever its guards change.
func refusedSince(before, now hopReading) uint64 {
	if now.n.Refused < before.n.Refused {
		return now.n.Refused
	}
	return now.n.Refused - before.n.Refused
}

// unused reports whether no packet of a hop has been seen yet.
func (w *hopWatch) unused() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.newest.n == hop.Counts{}
}

// readHops reads the counters of hops, where there have been any.
func (a *Agent) readHops(ctx context.Context) (hopReading, error) {
	r := a.reach.Load()
	if a.plane == nil || r.full() && a.hops.unused() {
		return hopReading{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, hopsWithin)
	defer cancel()
	n, err := a.plane.Hops(ctx)
	now := hopReading{time.Now(), n}
	if err == nil {
		a.hops.note(now, a.started)
	}
	return now, err
}

// hopStatus tells of the packets of hops, and warns when many are refused.
func (a *Agent) hopStatus(ctx context.Context, r *skeinv1.StatusResponse) {
	now, err := a.readHops(ctx)
	if err != nil || now.n == (hop.Counts{}) {
		return // the plane's own trouble is told elsewhere
	}
	packets, over := a.hops.refused()
	if packets > 0 && over > refusedLately { // nobody has asked for long: what of it is now?
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
		before := now
		if now, err = a.readHops(ctx); err != nil {
			return
		}
		packets, over = refusedSince(before, now), now.at.Sub(before.at)
	}
	from := a.nameOf(now.n.RefusedOf)
	r.Hops = &skeinv1.HopCounts{Sent: now.n.Wrapped, Received: now.n.Unwrapped, Refused: now.n.Refused,
		Malformed: now.n.Malformed, Congested: now.n.Congested, TooLarge: now.n.TooLarge, RefusedFrom: from}
	if p := refusalProblem(packets, over, now.at, from); p != nil {
		r.Problems = append(r.Problems, p)
	}
}

// refusalProblem warns of refused packets of hops; nil: they are too few.
func refusalProblem(packets uint64, over time.Duration, now time.Time, from string) *skeinv1.Problem {
	if over <= 0 || float64(packets)/over.Seconds() < refusedMatters {
		return nil
	}
	text := fmt.Sprintf("%d packets that others passed on to this node were refused in the last %s",
		packets, over.Round(time.Second))
	if from != "" {
		text += "; " + from + " brought the last one"
	}
	return &skeinv1.Problem{Subject: subjectHops, Severity: warning, Message: text, Since: now.Add(-over).UnixNano(),
		Advice: "compare SITE and LEADER of skein nodes here and there: the other node sees sites in another way, or " +
			"brings what it may not. Seconds after a change of sites this should be over"}
}

// nameOf is the name of the member that has an overlay address; empty: none has.
func (a *Agent) nameOf(at netip.Addr) string {
	if !at.IsValid() || a.replica == nil {
		return ""
	}
	for _, n := range a.replica.State().Nodes() {
		if n.GetIpv4() == at.String() || n.GetIpv6() == at.String() {
			return n.GetName()
		}
	}
	return ""
}

// leaderChanges counts how often others led a site than before.
type leaderChanges struct{ own, other atomic.Uint64 }

// note takes the plan that follows another.
func (c *leaderChanges) note(before, now *sites.Plan) {
	own, other := changedLeaders(before, now)
	c.own.Add(own)
	c.other.Add(other)
}

// changedLeaders counts the sites that others lead by one plan than by the plan before it: this node's own, and others.
// Another topology, or another site of this node, is no change of leaders.
func changedLeaders(before, now *sites.Plan) (own, other uint64) {
	if before == nil || before.Full || now.Full || !before.SameTopology(now) || before.Site != now.Site {
		return 0, 0
	}
	for site, leaders := range now.Leaders {
		former, ok := before.Leaders[site]
		switch {
		case !ok || slices.Equal(carrying(former), carrying(leaders)):
		case site == now.Site:
			own++
		default:
			other++
		}
	}
	return own, other
}

// carrying are the leaders that carry a site's traffic.
func carrying(leaders []sites.Leader) (out []identity.ID) {
	for _, l := range leaders {
		if l.Acting && !l.Reserve {
			out = append(out, l.ID)
		}
	}
	slices.SortFunc(out, func(x, y identity.ID) int { return cmp.Compare(x.String(), y.String()) })
	return out
}
