package kube

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
)

// DataNodeLabel is on the Nodes of DataNodes and on no other.
const DataNodeLabel = "topology.kubernetes.io/region"

// DataNodes are Node objects behind which no host stands, from number first on. Each holds a record as long as one that
// is given, signed by a member that the mesh does not have.
func DataNodes(first, count int, like *skeinv1.Record, key *identity.Key) (items []any, err error) {
	for i := first; i < first+count; i++ {
		name := fmt.Sprintf("data-%d", i)
		r := proto.CloneOf(like)
		r.NodeId, r.KubernetesNode = key.ID().String(), name
		s, err := gossip.Sign(key, r)
		if err != nil {
			return nil, err
		}
		value, err := annotationtier.Encode(s)
		if err != nil {
			return nil, err
		}
		items = append(items, map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{
			"name": name, "annotations": map[string]string{annotationtier.Annotation: value},
			"labels": map[string]string{DataNodeLabel: "r", "kubernetes.io/hostname": name},
		}})
	}
	return items, nil
}
