package agent

import (
	"context"

	"github.com/skeinmesh/skein/agent/rekey"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// subjectKey is the problem that the log does not have this host's key.
const subjectKey = "WireGuard key"

// attachKeys gives changes of keys what they need, before anything can come from a peer.
func (a *Agent) attachKeys() {
	a.keys.Attach(rekey.Host{
		ID: a.id, Cluster: func() identity.ClusterID { return a.cluster }, StateDir: a.cfg.StateDir,
		Link: a.cfg.Dataplane.Link, ControlPort: a.cfg.Ports.Control, Table: a.numbers.RekeyNftTable,
		Log: a.log, Roster: a.roster, State: a.replica.State, Tunnels: func() bool { return a.plane != nil },
		Peers:  func(ctx context.Context) ([]dataplane.PeerStatus, error) { return a.plane.Peers(ctx) },
		Peered: func(id identity.ID) bool { return a.reach.Load().Peer(id) },
		Send:   a.sendSignal, SendTunnelled: a.sendSignalTunnelled, SendRelayed: a.sendSignalRelayed,
		Propose: a.propose, Wake: a.wakeUp, Agreed: a.keyAgreed,
		Report: func(text, advice string) { a.report(subjectKey, warning, text, advice) },
	})
}

// keyAgreed has control packets and probes take keys that follow from this host's next key. The loop calls it.
func (a *Agent) keyAgreed() {
	a.packetKeys.Clear()
	for id := range a.loop.members {
		if m, ok := a.roster.Get(id); ok && id != a.id {
			a.loop.unprobed[id] = m
		}
	}
}

// RotateNodeKey gives this host another WireGuard key.
func (s services) RotateNodeKey(ctx context.Context,
	r *skeinv1.RotateNodeKeyRequest) (*skeinv1.RotateNodeKeyResponse, error) {
	return s.a.keys.Rotate(ctx, r.GetForce())
}
