package agent

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// projectionInput is all that a Spec follows from, with a given agreed state.
func (a *Agent) projectionInput(st *events.State) projection.Input {
	in := projection.Input{
		Self: a.id, State: st, Endpoints: map[identity.ID]projection.Endpoint{}, WantHandshake: a.wantHandshakes(),
		Complete: st.Index() > 0, Keys: &a.pairKeys, PortRewrites: a.predictor.PortRewrites(),
		Rekeys: a.keys.View(),
		Host: projection.Host{
			Numbers:    a.numbers,
			PrivateKey: a.keys.Keys().Device, Link: a.cfg.Dataplane.Link, MTU: a.tunnelMTU(),
			Port: int(a.cfg.Ports.WireGuard), ControlPort: int(a.cfg.Ports.Control),
			RouteNodeAddresses: st.Settings().GetRouteNodeAddresses(), Connected: a.links.Connected(a.cfg.Dataplane.Link),
		},
		Pods: a.pods.Routes(), InGrace: a.egresses.InGrace(),
	}
	in.Plain = a.plain.View()
	if a.egresses != nil {
		in.Gateway, in.Exported = a.egresses.Gateways().Serving(), a.egresses.Gateways().Exported()
	}
	if route := a.conf().RouteNodeAddresses; route != nil {
		in.Host.RouteNodeAddresses = *route
	}
	in.Host.AskedKeepalive = seconds(a.host().PersistentKeepalive)
	in.Host.Keepalive = keepalive(a.host().PersistentKeepalive, a.ownRecord().GetNatType(), st.Settings())
	in.Plain.Now = a.leaderTime()
	if in.Records = a.recordsNow(); in.Records[a.id] == nil { // not published yet
		in.Records[a.id] = a.claimed()
	}
	if r := a.reach.Load(); r != nil {
		in.Reach = r.Reach
	}
	for id, p := range a.currentPaths() {
		switch p.Kind {
		case path.Direct:
			in.Endpoints[id] = projection.Endpoint{Addr: a.predictor.Through(p.Endpoint), Proven: true, MTU: p.MTU}
		case path.Relay:
			if p.UDP() {
				in.Endpoints[id] = projection.Endpoint{Addr: p.Endpoint, Proven: true, MTU: p.MTU}
				break
			}
			in.Endpoints[id] = projection.Endpoint{Addr: a.proxies.Endpoint(id), Relayed: p.Settled()}
		}
	}
	return in
}

// keepalive is how often this host sends to its peers to keep a NAT's mapping: what is asked for it, else the cluster's
// setting, unless no NAT lies before it.
func keepalive(asked uint32, nat skeinv1.NatType, settings *skeinv1.Settings) time.Duration {
	switch {
	case asked > 0:
		return seconds(asked)
	case nat != skeinv1.NatType_NAT_TYPE_NONE:
		return seconds(settings.GetPersistentKeepaliveSeconds())
	}
	return 0
}

// recordsNow are the newest records.
func (a *Agent) recordsNow() map[identity.ID]*skeinv1.Record {
	all := a.gossip.Records()
	out := make(map[identity.ID]*skeinv1.Record, len(all))
	for id, e := range all {
		out[id] = e.Record
	}
	return out
}

// membersBefore are the members in the state that a resuming agent finds on its disk, sorted.
func (a *Agent) membersBefore() (out []identity.ID) {
	nodes := a.replica.State().Nodes() // sorted
	out = make([]identity.ID, 0, len(nodes))
	for _, n := range nodes {
		if id, err := identity.ParseID(n.GetId()); err == nil {
			out = append(out, id)
		}
	}
	return out
}

// apply projects and makes the kernel follow. What the kernel has already is left to the plane, which repairs what
// others change.
func (a *Agent) apply(ctx context.Context) (applied bool) {
	a.predictor.Follow(a.loop.records, time.Now())
	spec, refused, anew := a.loop.projected.Project(a.projectionInput(a.loop.state))
	if anew {
		a.loop.happened = time.Now()
	}
	a.notePlan(spec)
	a.reportRefusals(refused)
	if !a.stale.Swap(false) && spec.Equal(a.spec) {
		a.answerProbes()
		a.keys.Answer(a.spec.WireGuard.Peers)
		a.predictor.Held(spec.PortRewrites)
		return true
	}
	a.releasePort()
	report, err := a.keys.Turn(spec.WireGuard.PrivateKey, func() (dataplane.Report, error) {
		return a.plane.Apply(ctx, spec)
	})
	if err != nil {
		a.stale.Store(true)
	}
	if err != nil && len(report.Errors) == 0 { // nothing was tried
		if ctx.Err() == nil {
			a.report("data plane", failure, err.Error(), "")
		}
		return false
	}
	a.report("data plane", failure, "", "")
	a.noteReport(report)
	a.mu.Lock()
	a.spec = spec
	a.mu.Unlock()
	if report.Errors["wireguard"] == nil {
		a.answerProbes()
		a.keys.Answer(a.spec.WireGuard.Peers)
	}
	if report.Errors["nft"] == nil {
		a.predictor.Held(spec.PortRewrites)
	} else {
		a.predictor.Proxy(ctx, spec.PortRewrites)
	}
	return err == nil
}

// onBroken has the newest Spec applied again, which tells what is wrong. The data plane calls it.
func (a *Agent) onBroken(string) {
	a.stale.Store(true)
	a.wakeUp()
}

// noteReport tells what became of each subsystem. One that failed is tried again; the others have gone on.
func (a *Agent) noteReport(r dataplane.Report) {
	writes := 0
	for _, n := range r.Writes {
		writes += n
	}
	if writes > 0 {
		a.log.Debug("the kernel was changed", "writes", r.Writes)
	}
	a.writes.Add(uint64(writes))
	for _, subsystem := range plane.Subsystems {
		message := ""
		if e := r.Errors[subsystem]; e != nil {
			message = e.Error()
			a.loop.retry = time.Now().Add(tickEvery)
		}
		a.report("data plane: "+subsystem, failure, message, "it is tried again every second; the other subsystems go on")
		if n := r.Writes[subsystem]; n > 0 || message != "" {
			a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
				Body: &skeinv1.JournalEntry_Reconciled{Reconciled: &skeinv1.Reconciled{
					Subsystem: subsystem, Writes: uint32(n), Error: message,
				}}})
		}
	}
	a.applied.Store(len(r.Errors) == 0)
}

func (a *Agent) reportRefusals(refused []projection.Refusal) {
	blocks, requests := a.refusalText(refused, true), a.refusalText(refused, false)
	a.report("peers' requests", warning, requests, "these requests are ignored; correct nodeAddresses in the "+
		"configuration of these nodes, or have other sites know them under other addresses (skein site translate)")
	a.report("peers' blocks", warning, blocks, "their pods are not reached from here; give this host's network other "+
		"addresses, or move the pods to another pool (skein pool drain)")
}

// refusalText names the first few refusals of one kind.
func (a *Agent) refusalText(refused []projection.Refusal, blocks bool) string {
	const shown = 3
	var parts []string
	more := 0
	for _, r := range refused {
		switch {
		case r.Block.IsValid() != blocks:
		case len(parts) == shown:
			more++
		default:
			parts = append(parts, a.roster.Name(r.Peer)+": "+r.Reason)
		}
	}
	if more > 0 {
		parts = append(parts, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(parts, "; ")
}
