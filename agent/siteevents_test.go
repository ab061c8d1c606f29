package agent

import (
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// planFor is the plan of a node in a mesh of two sites with three nodes each, two of which lead.
func planFor(self identity.ID, topology string, terms map[identity.ID]uint64) *sites.Plan {
	in := sites.Input{Self: self, Settings: &skeinv1.Settings{Topology: topology},
		Records: map[identity.ID]*skeinv1.Record{},
		Alive:   func(identity.ID) bool { return true }}
	var nodes []*skeinv1.Node
	for i := range 6 {
		id := identity.ID{byte(i + 1)}
		nodes = append(nodes, &skeinv1.Node{Id: id.String(), Settings: &skeinv1.NodeSettings{SiteSet: true,
			Site: []string{"a", "b"}[i/3], Leader: []string{"yes", "yes", ""}[i%3]}})
		in.Records[id] = &skeinv1.Record{Leads: terms[id]}
	}
	in.Members = sites.NewMembers(nodes, nil, nil)
	return sites.Make(in)
}

func TestWhomEventsComeFrom(t *testing.T) {
	id := func(i byte) identity.ID { return identity.ID{i} }
	nobody := func(identity.ID) bool { return false }
	both := map[identity.ID]uint64{id(1): 1, id(2): 1, id(4): 1, id(5): 1}
	member := planFor(id(3), sites.Site, both)
	bound := sites.Order(member.Leaders["a"], id(3))
	if len(bound) != 2 {
		t.Fatalf("the leaders are %v", bound)
	}
	for name, v := range map[string]struct {
		plan   *sites.Plan
		server bool
		dead   func(identity.ID) bool
		want   siteEvents
	}{
		"no plan yet":               {nil, false, nobody, siteEvents{}},
		"every node peers with all": {planFor(id(3), sites.Full, nil), false, nobody, siteEvents{}},
		"one that does not lead":    {member, false, nobody, siteEvents{from: bound}},
		"its leader's path has died": {member, false, func(o identity.ID) bool { return o == bound[0] },
			siteEvents{from: bound[1:]}},
		"the paths of both have died": {member, false, func(identity.ID) bool { return true }, siteEvents{}},
		"a leader":                    {planFor(id(1), sites.Site, both), false, nobody, siteEvents{passes: true}},
		"one that is about to lead": {planFor(id(2), sites.Site, map[identity.ID]uint64{id(1): 1}), false, nobody,
			siteEvents{passes: true}},
		"a server":            {member, true, nobody, siteEvents{}},
		"a server that leads": {planFor(id(1), sites.Site, both), true, nobody, siteEvents{}},
		"one that does not act passed": {planFor(id(3), sites.Site, map[identity.ID]uint64{id(2): 1}), false, nobody,
			siteEvents{from: []identity.ID{id(2)}}},
	} {
		have := eventsBy(v.plan, v.server, v.dead)
		if have.passes != v.want.passes || !slices.Equal(have.from, v.want.from) {
			t.Errorf("%s: %+v, want %+v", name, have, v.want)
		}
	}
}

func TestWhoGetsEvents(t *testing.T) {
	id := func(i byte) identity.ID { return identity.ID{i} }
	both := map[identity.ID]uint64{id(1): 1, id(2): 1, id(4): 1, id(5): 1}
	for name, v := range map[string]struct {
		plan *sites.Plan
		peer identity.ID
		ok   bool
	}{
		"a node of the leader's site":         {planFor(id(1), sites.Site, both), id(3), true},
		"the site's other leader":             {planFor(id(1), sites.Site, both), id(2), true},
		"a node of another site":              {planFor(id(1), sites.Site, both), id(6), false},
		"a leader of another site":            {planFor(id(1), sites.Site, both), id(4), false},
		"nobody knows the node":               {planFor(id(1), sites.Site, both), id(9), false},
		"of one that does not lead":           {planFor(id(3), sites.Site, both), id(1), false},
		"of one that is about to lead":        {planFor(id(2), sites.Site, map[identity.ID]uint64{id(1): 1}), id(3), false},
		"where no site speaks by a leader":    {planFor(id(1), sites.Full, nil), id(3), false},
		"of one that has not made a plan yet": {nil, id(3), false},
	} {
		if err := mayHaveEvents(v.plan, v.peer); (err == nil) != v.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A leader whose direct path has just died is not asked, though a relay may reach it. One that was idle is.
func TestLeadersWhosePathHasDied(t *testing.T) {
	now := time.Now()
	for name, v := range map[string]struct {
		path path.Path
		dead bool
	}{
		"idle":                {path.Path{}, false},
		"direct":              {path.Path{Kind: path.Direct, Alive: true}, false},
		"by a relay, as ever": {path.Path{Kind: path.Relay, Alive: true, Since: now}, false},
		"just died": {path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead,
			Since: now.Add(-time.Second)}, true},
		"died, and a relay reaches it": {path.Path{Kind: path.Relay, Alive: true, Rule: path.RuleDirectDead,
			Since: now.Add(-time.Minute)}, false},
		"died, and no relay reaches it": {path.Path{Kind: path.Relay, Rule: path.RuleDirectDead,
			Since: now.Add(-time.Minute)}, true},
	} {
		if have := died(v.path, now); have != v.dead {
			t.Errorf("%s: dead %t", name, have)
		}
	}
}

func TestEventSource(t *testing.T) {
	s := identity.ID{1}
	for want, v := range map[string]struct {
		status consensus.FollowStatus
		server bool
	}{
		metrics.FromRaft:   {consensus.FollowStatus{Server: s}, true},
		metrics.FromServer: {consensus.FollowStatus{Server: s}, false},
		metrics.FromLeader: {consensus.FollowStatus{Server: s, Passed: true}, false},
		metrics.FromNobody: {consensus.FollowStatus{Server: s, Err: errRevoked}, false},
	} {
		if have := eventSource(v.status, v.server); have != want {
			t.Errorf("%+v: %s, want %s", v.status, have, want)
		}
	}
}
