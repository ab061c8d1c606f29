package consensus

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const changeTimeout = 5 * time.Second // for one change of Raft's configuration

// care keeps Raft's configuration equal to the agreed servers while this server leads: at once when the state changes,
// and every interval, in case a change was missed.
func (t *term) care(ctx context.Context) {
	s := t.server
	tick := time.NewTicker(s.cfg.CareInterval)
	defer tick.Stop()
	if t.fresh(ctx) == nil {
		return
	}
	var seen []*skeinv1.Server
	for ctx.Err() == nil {
		s.checkServers(ctx, seen)
		t.yieldClock()
		if err := t.finishRecovery(ctx); err != nil { // else servers that are lost would be added again
			t.log.Error("the servers that the recovery left out are still in the state; trying again", "error", err)
		} else {
			for t.careOnce(ctx) {
			}
		}
		t.introduceRoles(ctx)
		seen = s.cfg.Replica.State().Servers()
		changed := make(chan struct{})
		watch, stop := context.WithCancel(ctx)
		go func() { defer close(changed); s.waitServers(watch, len(seen)) }()
		select {
		case <-tick.C:
		case <-changed:
		case <-ctx.Done():
		}
		stop()
		<-changed
	}
}

// introduceRoles adds to the log of a cluster that is older than roles that commands need a role from now on. This
// leader applies the rule already.
func (t *term) introduceRoles(ctx context.Context) {
	state := t.server.cfg.Replica.State()
	if state.Cluster() == nil || state.Settings().GetRolesSince() != 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	_, err := t.propose(ctx, &skeinv1.Command{Issuer: t.server.cfg.ID.String(),
		Body: &skeinv1.Command_IntroduceRoles{IntroduceRoles: &skeinv1.IntroduceRoles{}}})
	if err != nil && ctx.Err() == nil {
		t.log.Warn("cannot record that commands need a role from now on; it will be tried again", "error", err)
	}
}

// waitServers returns when the number of agreed servers changes.
func (s *Server) waitServers(ctx context.Context, n int) {
	for {
		state := s.cfg.Replica.State()
		if len(state.Servers()) != n || s.cfg.Replica.Wait(ctx, state.Index()) != nil {
			return
		}
	}
}

// checkServers asks every other server how far its replica is. One that has what this leader had
// before the question keeps up.
func (s *Server) checkServers(ctx context.Context, servers []*skeinv1.Server) {
	want := s.fsm.at.Load()
	s.askServers(ctx, servers, func(id raft.ServerID, r *skeinv1.ReadEventsResponse, err error) {
		s.health.checked(id, err == nil && r.Last >= want, time.Now())
	})
}

// careOnce takes one step and reports whether there may be more.
func (t *term) careOnce(ctx context.Context) bool {
	s, now := t.server, time.Now()
	configuration := s.raft.GetConfiguration()
	step := planVoters(voterView{
		self: raft.ServerID(s.cfg.ID.String()), raft: configuration.Configuration().Servers,
		agreed:  s.cfg.Replica.State().Servers(),
		healthy: func(id raft.ServerID) bool { return s.health.healthyFor(id, 0, now) },
		stable:  func(id raft.ServerID) bool { return s.health.healthyFor(id, s.cfg.Stability, now) },
	})
	if step.kind == nothing || ctx.Err() != nil {
		return false
	}
	if step.kind == postpone {
		t.log.Warn("a server is to be removed, but without it no quorum of healthy voters would be left: waiting",
			"server", step.id)
		return false
	}
	t.log.Info("voter care", "step", step.kind.String(), "server", step.id)
	if err := t.execute(ctx, step, configuration.Index()); err != nil {
		if ctx.Err() == nil {
			t.log.Warn("voter care failed; it will be tried again", "step", step.kind.String(), "server", step.id, "error", err)
		}
		return false
	}
	return step.kind != handOver
}

// execute carries a step out. A change of Raft's configuration names the configuration it was planned
// on, so that it fails if that is not the newest.
func (t *term) execute(ctx context.Context, step voterStep, index uint64) error {
	r, address := t.server.raft, raft.ServerAddress(step.id)
	switch step.kind {
	case addNonvoter:
		return t.server.wait(r.AddNonvoter(step.id, address, index, changeTimeout))
	case addVoter:
		return t.server.wait(r.AddVoter(step.id, address, index, changeTimeout))
	case remove:
		if err := t.server.wait(r.RemoveServer(step.id, index, changeTimeout)); err != nil {
			return err
		}
		t.keepKeyFrom(ctx, step.id)
		return nil
	case handOver:
		return t.server.wait(r.LeadershipTransfer())
	case promote:
		ctx, cancel := context.WithTimeout(ctx, changeTimeout)
		defer cancel()
		_, err := t.propose(ctx, &skeinv1.Command{Issuer: t.server.cfg.ID.String(),
			Body: &skeinv1.Command_PromoteServer{PromoteServer: &skeinv1.PromoteServer{NodeId: string(step.id)}}})
		return err
	}
	return fmt.Errorf("unknown step %d", step.kind)
}

// keepKeyFrom makes a new gossip key once a revoked server no longer gets Raft's log: it still got the entry that
// revoked it, with the key that was made then. If the leader's term ends before that, the next rotation makes a new
// key.
func (t *term) keepKeyFrom(ctx context.Context, gone raft.ServerID) {
	id, err := identity.ParseID(string(gone))
	if err != nil || t.server.cfg.Replica.State().Revoked(id) == nil {
		return // it has only given up its role, and is still a member
	}
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	if _, err = t.propose(ctx, &skeinv1.Command{Issuer: t.server.cfg.ID.String(),
		Body: &skeinv1.Command_RotateGossipKey{RotateGossipKey: &skeinv1.RotateGossipKey{}}}); err != nil {
		t.log.Warn("a revoked server may know the gossip key that is used", "server", gone, "error", err,
			"next", "skein cluster rotate gossip-key")
	}
}
