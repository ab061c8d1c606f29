package agent

import (
	"context"
	"net/netip"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/prediction"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// openPrediction makes what predicts ports. It comes after the prober and the plane.
func (a *Agent) openPrediction(ctx context.Context) {
	have, err := a.plane.Rewrites(ctx)
	if err != nil {
		a.log.Warn("port rewrites of a former run cannot be read", "error", err)
	}
	a.predictor = prediction.Open(prediction.Config{
		Self: a.id, StateDir: a.cfg.StateDir, Prober: a.prober, Port: a.cfg.Ports.WireGuard, Mark: a.numbers.MarkWG,
		Paths: func() *path.Manager { return a.paths }, Settings: a.settings.Load, Record: a.ownRecord,
		Records: func() map[identity.ID]gossip.Entry { return a.gossip.Records() },
		Signal:  a.sendSignal, Attest: a.pool.Attest,
		Newest:  func(ctx context.Context) (netip.AddrPort, error) { return a.discovery.STUN.NewestMapping(ctx) },
		Changed: a.wakeUp, Log: a.log.With("component", "birthday"),
	}, have)
}

// predictionSettings fills in the paths' settings about port prediction, as the cluster and this host's configuration
// have them.
func (a *Agent) predictionSettings(set *skeinv1.Settings, s *path.Settings) {
	own := a.conf()
	s.NoPrediction = own.NatTraversal.PortGuessing == "disabled"
	s.BirthdayBoth = set.GetBirthdayAttack() == "enabled"
	for _, id := range a.roster.Members() {
		if p, ok := own.Peers[a.roster.Name(id)]; ok && p.BirthdayAttack != "" {
			if s.BirthdayPeers == nil {
				s.BirthdayPeers = map[string]bool{}
			}
			s.BirthdayPeers[id.String()] = p.BirthdayAttack == "enabled"
		}
	}
}

// votes tells the servers: whoever could forge their word decides about the log already.
func (a *Agent) votes(id identity.ID) bool { return a.replica.State().Server(id).GetVoter() }
