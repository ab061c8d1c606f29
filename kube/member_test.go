package kube

import (
	"testing"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// A MeshNode shows the NAT, the transport mode and the endpoint that the member's own record has.
func TestMeshNodeShowsTheRecord(t *testing.T) {
	w := newPodWorld(t)
	id := w.ids["a"]
	record := &skeinv1.Record{NatType: skeinv1.NatType_NAT_TYPE_SYMMETRIC, TransportMode: "mixed", Candidates: []*skeinv1.Candidate{
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: "192.168.1.7:51820", Priority: 100},
		{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "203.0.113.7:4711", Priority: 50},
	}}
	s := &part.Snapshot{State: w.log.State, Alive: func(identity.ID) bool { return true },
		Records: map[identity.ID]gossip.Entry{id: {Record: record}}}
	status := memberStatus(s, s.State.Node(id), homes{})
	for field, want := range map[string]any{"nat": "symmetric", "mode": "mixed", "endpoint": "203.0.113.7:4711", "alive": true} {
		if status[field] != want {
			t.Errorf("%s is %v, want %v", field, status[field], want)
		}
	}
}
