package agent

import (
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// redact takes the secrets out of an event that is shown: the gossip keys, the seed of the
// preshared keys, and what is sealed for carriers of plain peers. Hashes of tokens stay; they tell nothing.
func redact(e *skeinv1.Event) *skeinv1.Event {
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_CommandAnswered:
		if b.CommandAnswered.GetAnswer().GetPlainPeer() == nil {
			return e
		}
	case *skeinv1.Event_ClusterCreated, *skeinv1.Event_GossipKeyRotated, *skeinv1.Event_PlainPeerSet:
	default:
		return e
	}
	c := proto.CloneOf(e)
	if k := c.GetClusterCreated().GetCluster(); k != nil {
		k.PskSeed = nil
	}
	if k := c.GetGossipKeyRotated().GetKeys(); k != nil {
		k.Primary, k.Accepted = nil, nil
	}
	redactPlainPeer(c.GetPlainPeerSet().GetPlainPeer())
	redactPlainPeer(c.GetCommandAnswered().GetAnswer().GetPlainPeer())
	return c
}

// redactState does the same for a state.
func redactState(s *skeinv1.State) *skeinv1.State {
	c := proto.CloneOf(s)
	if c.GetCluster() != nil {
		c.Cluster.PskSeed = nil
	}
	c.GossipKeys = nil
	for _, p := range c.GetPlainPeers() {
		redactPlainPeer(p)
	}
	for _, a := range c.GetAnswers() {
		redactPlainPeer(a.GetPlainPeer())
	}
	return c
}

// redactPlainPeer leaves the carriers of a plain peer and takes their secrets, which are sealed, out.
func redactPlainPeer(p *skeinv1.PlainPeer) {
	for _, c := range p.GetCarriers() {
		c.Sealed = nil
	}
}
