package kube

import (
	"slices"
	"testing"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/kube/kubetest"
)

// A MeshNode shows the NAT, the transport mode and the endpoint that the member's own record has.
func TestMeshNodeShowsTheRecord(t *testing.T) {
	w := newPodWorld(t)
	id := w.ids["a"]
	record := &skeinv1.Record{NatType: skeinv1.NatType_NAT_TYPE_SYMMETRIC, TransportMode: "mixed",
		Candidates: []*skeinv1.Candidate{
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: "192.168.1.7:51820", Priority: 100},
			{Type: skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX, Address: "203.0.113.7:4711", Priority: 50},
		}}
	s := &part.Snapshot{State: w.log.State, Alive: func(identity.ID) bool { return true },
		Records: map[identity.ID]gossip.Entry{id: {Record: record}}}
	status := memberStatus(s, s.State.Node(id), homes{})
	for field, want := range map[string]any{"nat": "symmetric", "mode": "mixed", "endpoint": "203.0.113.7:4711",
		"alive": true} {
		if status[field] != want {
			t.Errorf("%s is %v, want %v", field, status[field], want)
		}
	}
}

// One of the admin nodes that are Nodes takes resources to the log: the first by ID that is alive. Agents never do.
func TestOneNodeControls(t *testing.T) {
	l := kubetest.New(t)
	ids := l.Admit("b", "c", "agent")
	for _, id := range ids[1:3] {
		if err := l.Give(&skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: id.String(),
			Admin: true}}}); err != nil {
			t.Fatal(err)
		}
	}
	alive, records := map[identity.ID]bool{}, map[identity.ID]gossip.Entry{}
	for _, id := range ids {
		alive[id], records[id] = true, gossip.Entry{Record: &skeinv1.Record{KubernetesNode: id.String()}}
	}
	who := func() (out []identity.ID) {
		for _, id := range ids {
			may, does := mayControl(&part.Snapshot{Self: id, State: l.State, Records: records, Alive: func(id identity.ID) bool {
				return alive[id]
			}})
			if may != (id != ids[3]) || does && !may {
				t.Errorf("%s: may %t, does %t", id, may, does)
			}
			if does && alive[id] {
				out = append(out, id)
			}
		}
		return out
	}
	admins := slices.Clone(ids[:3])
	slices.SortFunc(admins, func(a, b identity.ID) int { return slices.Compare(a[:], b[:]) })
	if have := who(); !slices.Equal(have, admins[:1]) {
		t.Errorf("%v, want %s", have, admins[0])
	}
	alive[admins[0]] = false
	if have := who(); !slices.Equal(have, admins[1:2]) {
		t.Errorf("with the first one away: %v, want %s", have, admins[1])
	}
	records[admins[1]] = gossip.Entry{Record: &skeinv1.Record{}}
	alive[admins[1]] = false
	if have := who(); !slices.Equal(have, admins[2:]) {
		t.Errorf("with two away: %v, want %s", have, admins[2])
	}
}
