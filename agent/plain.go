package agent

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/carrier"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

const plainRetry = time.Second // until an expired plain peer that could not be removed is tried again

// leaderTime is the present by the leader's clock, as far as this node knows it.
func (a *Agent) leaderTime() time.Time {
	now := time.Now()
	if a.clockSeen.Load() {
		now = now.Add(-time.Duration(a.clock.Load()))
	}
	return now
}

// expirePlainPeers removes plain peers whose time is over, while this server leads.
func (a *Agent) expirePlainPeers(ctx context.Context, lead consensus.Lead) {
	for ctx.Err() == nil {
		st := lead.State()
		next := st.NextPlainExpiry()
		if next == nil {
			_ = a.replica.Wait(ctx, st.Index())
			continue
		}
		left := time.Until(time.Unix(0, next.GetExpiresAt()))
		if left <= 0 {
			_, err := lead.Propose(ctx, &skeinv1.Command{RequestId: consensus.NewRequestID(), Issuer: a.id.String(),
				Body: &skeinv1.Command_RemovePlainPeer{
					RemovePlainPeer: &skeinv1.RemovePlainPeer{Name: next.GetName(), Reason: "expired",
						CreatedIndex: next.GetCreatedIndex()}}})
			if err == nil {
				continue
			}
			if ctx.Err() == nil {
				a.log.Warn("a plain peer has expired and cannot be removed; it will be tried again", "peer",
					next.GetName(), "error", err)
			}
			left = plainRetry
		}
		due, cancel := context.WithTimeout(ctx, left)
		_ = a.replica.Wait(due, st.Index()) // until its time is over, or the log says something new
		cancel()
	}
}

// newPlainPeers is what answers plain peers on this node.
func (a *Agent) newPlainPeers() *carrier.Peers {
	return carrier.New(carrier.Config{
		Self: a.id, Port: a.cfg.Ports.Plain, Link: a.numbers.PlainLink, Mark: a.numbers.MarkWG, MTU: a.linkMTU,
		Key: func() identity.WireGuardKey { return a.keys.Keys().Device }, Source: a.overlayAddrs,
		Connected: func() []netip.Prefix { return a.links.Connected(a.cfg.Dataplane.Link) },
		State:     a.replica.State, Records: a.gossip.Records, Now: a.leaderTime,
		Ask: func(ctx context.Context, id identity.ID) error {
			_, err := a.egressBy(a.conns, id).Clock(ctx, &skeinv1.ClockRequest{})
			return err
		},
		Wake: a.wakeUp, Report: partHost{a: a}.Report, Log: a.log,
	})
}

// heldPlain are the plain peers that this node holds.
func (a *Agent) heldPlain() []*skeinv1.PlainPeerView {
	if !a.plain.View().Carrying {
		return nil
	}
	return slices.DeleteFunc(a.plainPeerService().Views(), func(v *skeinv1.PlainPeerView) bool {
		return v.GetHolder() != a.id.String()
	})
}
