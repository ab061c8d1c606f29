package agent

import (
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sitemesh"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// wantHandshakes lists the members that are to be sent a keepalive, and so a handshake where there is no session.
// First, those that asked for it. Second, those that were not peers of this node for a while: with them its device lost
// the session, and the other end, which may have had this node as a peer all the time, does not know; it would send
// into the void for 15 s. Third, those that this node has known since before it started, that answer, and with whom the
// device has had no handshake: a userspace device loses all sessions with the agent.
func (a *Agent) wantHandshakes() map[identity.ID]bool {
	if a.plane == nil {
		return nil
	}
	all := a.stats.Load()
	handshake := func(id identity.ID) time.Time { // zero: none, or it is not known
		m, ok := a.roster.Get(id)
		if !ok {
			return time.Time{}
		}
		p, _ := all.Of(a.keys.DeviceKey(id, m.WireGuard))
		return p.LastHandshake
	}
	out := a.handshakes.Requested(time.Now())
	for _, id := range a.handshakes.Parted(time.Now(), handshake) {
		out[id] = true
	}
	if all == nil && a.plane.Driver() == "kernel" {
		return out // it may have kept its sessions
	}
	for id := range knownPeers(a.before, a.reach.Load()) {
		if id != a.id && handshake(id).IsZero() && a.gossip.Alive(id) {
			out[id] = true
		}
	}
	return out
}

// knownPeers are the peers among some members, which are sorted. Most of a large mesh are none.
func knownPeers(members []identity.ID, r *sitemesh.Reach) iter.Seq[identity.ID] {
	if r.Full() {
		return slices.Values(members)
	}
	return func(yield func(identity.ID) bool) {
		for id := range r.Peers() {
			if _, known := roster.Find(members, id); known && !yield(id) {
				return
			}
		}
	}
}

// askForHandshake asks a peer to begin a session: by a relay, since without one the tunnel carries nothing.
func (a *Agent) askForHandshake(peer identity.ID) {
	s := &skeinv1.Signal{From: a.id.String(), Body: &skeinv1.Signal_HandshakeRequest_{
		HandshakeRequest: &skeinv1.Signal_HandshakeRequest{}}}
	b, err := proto.Marshal(s)
	if err == nil {
		err = a.control.SendRelayed(peer, control.ChannelSignal, b)
	}
	a.log.Info("a peer answers no handshake, and is asked to begin one", "peer", a.roster.Name(peer), "error", err)
}

// alive tells whether the way to a peer is.
func (a *Agent) alive(id identity.ID) bool { return a.currentPaths()[id].Alive }
