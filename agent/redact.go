package agent

import (
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// redact takes the secrets out of an event that is shown: the gossip keys and the seed of the
// preshared keys. Hashes of tokens stay; they tell nothing.
func redact(e *skeinv1.Event) *skeinv1.Event {
	switch e.GetBody().(type) {
	case *skeinv1.Event_ClusterCreated, *skeinv1.Event_GossipKeyRotated:
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
	return c
}

// redactState does the same for a state.
func redactState(s *skeinv1.State) *skeinv1.State {
	c := proto.CloneOf(s)
	if c.GetCluster() != nil {
		c.Cluster.PskSeed = nil
	}
	c.GossipKeys = nil
	return c
}
