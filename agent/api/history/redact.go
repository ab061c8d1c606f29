package history

import (
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
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
	api.RedactPlainPeer(c.GetPlainPeerSet().GetPlainPeer())
	api.RedactPlainPeer(c.GetCommandAnswered().GetAnswer().GetPlainPeer())
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
		api.RedactPlainPeer(p)
	}
	for _, a := range c.GetAnswers() {
		api.RedactPlainPeer(a.GetPlainPeer())
	}
	return c
}
