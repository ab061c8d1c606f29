package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// rpcService answers other nodes' requests.
func (a *Agent) rpcService() *consensus.Service {
	past := a.historyService()
	plan, steps := past.PlanForOthers, past.StepsForOthers
	if a.journal == nil { // this node only relays
		plan, steps = nil, nil
	}
	s := consensus.NewService(consensus.ServiceConfig{
		Plan: plan, PlanSteps: steps,
		Self: a.id, Replica: a.replica, Server: a.server.Load, Conns: a.conns, Log: a.log, FilterTest: filterTests(a).Answer,
		Holder: a.addressService().HolderOf, PeerPaths: a.peerService().PathsForOthers,
		Key: a.key, Proof: a.client.Proof, Pass: func(peer identity.ID) error {
			return mayHaveEvents(a.sitePlan.Load(), peer)
		},
	})
	a.rpc.Store(s)
	return s
}

// follow keeps the replica current on nodes where Raft does not.
func (a *Agent) follow(ctx context.Context) {
	for {
		err := a.client.Follow(ctx)
		if ctx.Err() != nil {
			return
		}
		a.report("agreed state", failure, err.Error(), "see docs/recovery.md")
		if !pause.For(ctx, 10*time.Second) {
			return
		}
	}
}

// onHeartbeat records that the log's servers are heard, so that inquire does not ask them. The heartbeat has the
// followed server's time; only the leader's is used.
func (a *Agent) onHeartbeat(server identity.ID, h *skeinv1.SubscribeResponse_Heartbeat) {
	a.heard.Set(time.Now())
	if h.GetLeader() == server.String() {
		a.noteClock(h.GetTime())
	}
}

// onDiverged reports that the servers' history differs from this node's, which then receives no more events.
func (a *Agent) onDiverged(err error) {
	message := ""
	if err != nil {
		message = err.Error()
	}
	a.report("history", failure, message, "this node keeps what it has and takes in nothing more: see \"Two nodes "+
		"disagree\" in docs/recovery.md")
}

// clockLimit is the clock offset above which status shows a problem.
const clockLimit = 30 * time.Second

// noteClock compares the leader's clock with this host's.
func (a *Agent) noteClock(leader int64) {
	if leader == 0 {
		return
	}
	d := time.Since(time.Unix(0, leader))
	a.clock.Store(int64(d))
	a.clockSeen.Store(true)
	message := ""
	if d.Abs() > clockLimit {
		message = fmt.Sprintf("this host's clock is %s off the leader's", d.Round(time.Second))
	}
	a.report("clock", warning, message, "the mesh still works, but times in `skein events` and `skein explain --at` "+
		"are wrong: start an NTP client")
}
