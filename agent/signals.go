package agent

import (
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/joining"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// onPacket takes a packet of the control net.
func (a *Agent) onPacket(from identity.ID, channel byte, b []byte) {
	switch channel {
	case control.ChannelGossip:
		select {
		case a.gossipIn <- gossip.Packet{From: from, Data: b, At: time.Now()}:
		default: // memberlist is far behind: a lost packet, as UDP has them
		}
	case control.ChannelSignal:
		a.handleSignal(from, b)
	}
}

func (a *Agent) sendSignal(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendPacket, peer, s)
}

// sendSignalRelayed sends a signal beside the tunnel.
func (a *Agent) sendSignalRelayed(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendRelayed, peer, s)
}

// sendSignalTunnelled sends a signal by the tunnel alone.
func (a *Agent) sendSignalTunnelled(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendTunnelled, peer, s)
}

func (a *Agent) signalBy(send func(identity.ID, byte, []byte) error, peer identity.ID, s *skeinv1.Signal) error {
	s.From = a.id.String()
	b, err := proto.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode a signal: %w", err)
	}
	return send(peer, control.ChannelSignal, b)
}

func (a *Agent) handleSignal(from identity.ID, b []byte) {
	s, err := joining.DecodeSignal(from, b)
	if err != nil {
		a.log.Debug("signal refused", "from", from.String(), "error", err)
		return
	}
	if b := s.GetBirthday(); b != nil {
		a.predictor.TakeSignal(from, b)
	}
	if s.GetHandshakeRequest() != nil && a.handshakes.Request(from, time.Now()) {
		a.wakeUp()
	}
	if r := s.GetRekey(); r != nil {
		a.keys.Take(from, r)
	}
	if p := s.GetPunch(); p != nil && a.paths != nil {
		a.paths.Punch(from, p)
	}
}
