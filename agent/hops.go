package agent

import (
	"context"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/hops"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/hop"
)

// hopsWithin is how long reading the counters may take.
const hopsWithin = 2 * time.Second

// readHops reads the counters of hops, where there have been any.
func (a *Agent) readHops(ctx context.Context) (hops.Reading, error) {
	r := a.reach.Load()
	if a.plane == nil || r.Full() && a.hops.Unused() {
		return hops.Reading{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, hopsWithin)
	defer cancel()
	n, err := a.plane.Hops(ctx)
	now := hops.Reading{At: time.Now(), Counts: n}
	if err == nil {
		a.hops.Note(now, a.started)
	}
	return now, err
}

// hopStatus tells of the packets of hops, and warns when many are refused.
func (a *Agent) hopStatus(ctx context.Context, r *skeinv1.StatusResponse) {
	now, err := a.readHops(ctx)
	if err != nil || now.Counts == (hop.Counts{}) {
		return // the plane's own trouble is told elsewhere
	}
	packets, over := a.hops.Refused()
	if packets > 0 && over > hops.Lately { // nobody has asked for long: what of it is now?
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
		before := now
		if now, err = a.readHops(ctx); err != nil {
			return
		}
		packets, over = hops.RefusedSince(before, now), now.At.Sub(before.At)
	}
	from := a.nameOf(now.Counts.RefusedOf)
	r.Hops = &skeinv1.HopCounts{Sent: now.Counts.Wrapped, Received: now.Counts.Unwrapped, Refused: now.Counts.Refused,
		Malformed: now.Counts.Malformed, Congested: now.Counts.Congested, TooLarge: now.Counts.TooLarge, RefusedFrom: from}
	if p := hops.RefusalProblem(packets, over, now.At, from); p != nil {
		r.Problems = append(r.Problems, p)
	}
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
