package kube

import (
	"testing"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// A MeshNode's Leader tells who leads its site where sites have leaders, and else who wishes to; its site is as the log
// has it.
func TestMeshNodeLeads(t *testing.T) {
	w := newPodWorld(t)
	wishes, leads := w.ids["a"], w.ids["b"]
	records := map[identity.ID]gossip.Entry{
		wishes: {Record: &skeinv1.Record{Site: "dc", LeaderWish: true}}, leads: {Record: &skeinv1.Record{Site: "dc",
			Leads: 3}},
	}
	shown := func(id identity.ID, field string) any {
		s := &part.Snapshot{State: w.log.State, Records: records, Alive: func(identity.ID) bool { return true }}
		return memberStatus(s, s.State.Node(id), homes{})[field]
	}
	if shown(wishes, "leader") != true || shown(leads, "leader") != false {
		t.Error("without leaders it does not tell who wishes to lead")
	}
	for _, c := range []*skeinv1.Command{
		{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
			Settings: &skeinv1.Settings{SiteTopology: map[string]string{"dc": "site"}}, Fields: []string{"site_topology"}}}},
		{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: wishes.String(),
			Settings: &skeinv1.NodeSettings{SiteSet: true, Site: "dc"}, SettingsFields: []string{"site"}}}},
	} {
		if err := w.log.Give(c); err != nil {
			t.Fatal(err)
		}
	}
	if shown(wishes, "leader") != false || shown(leads, "leader") != true || shown(wishes, "site") != "dc" {
		t.Error("with leaders it does not tell who leads")
	}
}
