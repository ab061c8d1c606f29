package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/simtime"
)

// What the log says of a node comes before its configuration, and that before what a part wishes.
func TestLogComesFirst(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	a.cfg.Leader, a.cfg.PersistentKeepalive = true, 20
	a.wishes.Store(&part.Wishes{Site: "by-label", ForceEndpoint: "wish.example:1", PersistentKeepalive: 9})
	if own := a.host(); own.Site != "by-label" || !own.Leader || own.ForceEndpoint != "wish.example:1" ||
		own.PersistentKeepalive != 20 {
		t.Errorf("without the log: %+v", own)
	}
	a.cfg.Site = "by-file"
	if own := a.host(); own.Site != "by-file" {
		t.Errorf("the configuration's site is not taken: %+v", own)
	}
	own := a.host()
	setByLog(&own, &skeinv1.NodeSettings{SiteSet: true, Leader: "no", ForceEndpoint: "edge.example:51820",
		InternalIp: "10.0.0.7", PersistentKeepalive: 30})
	if own.Site != "" || own.Leader || own.ForceEndpoint != "edge.example:51820" ||
		own.InternalIP.String() != "10.0.0.7" || own.PersistentKeepalive != 30 {
		t.Errorf("with the log: %+v", own)
	}
}

func TestSitesArePlanned(t *testing.T) {
	h, near, far := newHost(t, "a"), newHost(t, "near"), newHost(t, "far")
	w := newWorld(t, h, near, far)
	settings := func(topology string) {
		w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
			Settings: &skeinv1.Settings{Topology: topology}, Fields: []string{"topology"}}}})
	}
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.cfg.Site, a.cfg.Leader = "dc", true
		a.replica = replica
		defer a.withGossip(t, h.key, w.state)()
		for _, other := range []*host{&near, &far} {
			r := &skeinv1.Record{NodeId: other.key.ID().String(), Epoch: 1, Seq: 1, Site: map[*host]string{&near: "dc",
				&far: "home"}[other]}
			signed, err := gossip.Sign(other.key, r)
			if err != nil {
				t.Fatal(err)
			}
			if _, errs := a.gossip.Merge([]*skeinv1.SignedRecord{signed}); len(errs) > 0 {
				t.Fatal(errs)
			}
		}
		look := func() *sites.Plan {
			t.Helper()
			a.loop.state = w.state
			a.roster.Update(w.state)
			a.planSites(time.Now())
			a.publish()
			return a.sitePlan.Load()
		}
		says := func() uint64 { return a.gossip.Records()[a.id].Record.GetLeads() }
		slot := func() uint32 { return a.gossip.Records()[a.id].Record.GetLeaderSlot() }
		problem := func() string {
			for _, p := range a.problems.list() {
				if p.GetSubject() == subjectLeader {
					return p.GetMessage()
				}
			}
			return ""
		}
		if p := look(); !p.Full || says() != 0 || p.Leads(a.id) != "" {
			t.Errorf("without the topology: %+v", p)
		}
		settings("site")
		a.netcheck.Store(&candidate.Result{NATReport: candidate.NATReport{NAT: skeinv1.NatType_NAT_TYPE_SYMMETRIC}})
		p := look()
		if p.Full || !p.Elected || says() != 0 {
			t.Fatalf("with it: %+v, the record says %d", p, says())
		}
		if got := p.Leads(a.id); got != "leader" {
			t.Errorf("the only one that was elected is %q", got)
		}
		if m := problem(); !strings.Contains(m, `shall lead site "dc", and it has no endpoint that other sites can send`) {
			t.Errorf("a leader that nobody can reach: %q", m)
		}
		time.Sleep(sites.ElectionRests)
		if p := look(); says() != 0 || !p.Forwards {
			t.Errorf("after two seconds: it forwards %v, and before the data plane does the record says %d", p.Forwards, says())
		}
		a.announceTerm(false)
		if look(); says() != 0 {
			t.Errorf("the data plane failed, and the record says %d", says())
		}
		a.announceTerm(true)
		time.Sleep(time.Second) // a record's changes take turns
		if look(); says() != 1 || slot() != 1 {
			t.Errorf("once the data plane forwards the record says %d, slot %d", says(), slot())
		}
		a.cfg.ForceEndpoint = "198.18.0.1:51820"
		if look(); problem() != "" {
			t.Error("the complaint stays after an endpoint was named")
		}
		settings("full")
		time.Sleep(time.Second) // a record's changes take turns
		if look(); says() != 0 || slot() != 0 || !a.sitePlan.Load().Peer(far.key.ID()) {
			t.Errorf("without the topology again the record says %d, slot %d", says(), slot())
		}
	})
}

// TestPlansAreMadeWhenNeeded: a round that finds nothing new keeps the plan, and so does one that finds a record which
// says nothing new to plans: of ten thousand members somebody always has measured something. One that finds another
// record, member or setting makes another plan, and so does one after the moment until which the plan holds.
func TestPlansAreMadeWhenNeeded(t *testing.T) {
	h, near, late := newHost(t, "a"), newHost(t, "near"), newHost(t, "late")
	w := newWorld(t, h, near)
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.cfg.Site, a.replica = "dc", replica
		defer a.withGossip(t, h.key, w.state)()
		round := func() *sites.Plan {
			a.loop.state = w.state
			a.roster.Update(w.state)
			a.planSites(time.Now())
			a.publish()
			return a.sitePlan.Load()
		}
		settled := func() *sites.Plan {
			for range 60 { // what it has published and elected has rested, and so has what it remembers
				round()
				time.Sleep(time.Second)
			}
			return round()
		}
		said := &skeinv1.Record{NodeId: near.key.ID().String(), Epoch: 1}
		record := func(change func(*skeinv1.Record)) func() {
			return func() {
				said.Seq++
				change(said)
				signed, err := gossip.Sign(near.key, said)
				if err != nil {
					t.Fatal(err)
				}
				if _, errs := a.gossip.Merge([]*skeinv1.SignedRecord{signed}); len(errs) > 0 {
					t.Fatal(errs)
				}
			}
		}
		for _, c := range []struct {
			what   string
			change func()
			kept   bool
		}{
			{what: "a record", change: record(func(r *skeinv1.Record) { r.Site = "dc" })},
			{what: "another one of the same member", change: record(func(r *skeinv1.Record) { r.Site = "home" })},
			{what: "one that counts the member's peers", change: record(func(r *skeinv1.Record) { r.PeersDirect = 7 }),
				kept: true},
			{what: "one of a Node", change: record(func(r *skeinv1.Record) { r.KubernetesNode = "near" })},
			{what: "a member", change: func() { w.must(w.admission(late)) }},
			{what: "the topology", change: func() {
				w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
					Settings: &skeinv1.Settings{Topology: sites.Site}, Fields: []string{"topology"}}}})
			}},
			{what: "one that measured a relay, in topology site", change: record(func(r *skeinv1.Record) {
				r.RelayLinks = []*skeinv1.RelayLink{{NodeId: h.key.ID().String(), RttMicros: 70}}
			}), kept: true},
			{what: "the time until which the plan holds", change: func() { a.loop.sites.due = time.Now() }},
		} {
			p := settled()
			if p != round() {
				t.Errorf("before %s: a round that finds nothing new makes another plan", c.what)
			}
			c.change()
			if kept := p == round(); kept != c.kept {
				t.Errorf("%s is another one; the plan stays: %t", c.what, kept)
			}
		}
	})
}

// TestAHostIsWhereItClaimsToBe: a record that gossip has published names the site of before until the plan has changed.
func TestAHostIsWhereItClaimsToBe(t *testing.T) {
	published := &skeinv1.Record{Site: "edge", Leads: 3}
	for _, c := range []struct {
		published *skeinv1.Record
		claims    string
		site      string
		leads     uint64
	}{
		{nil, "edge", "edge", 0},
		{published, "edge", "edge", 3},
		{published, "", "", 3},
		{published, "dc", "dc", 3},
	} {
		r := ownSite(c.published, &skeinv1.Record{Site: c.claims})
		if r.GetSite() != c.site || r.GetLeads() != c.leads {
			t.Errorf("published %v, claims %q: %v", c.published, c.claims, r)
		}
	}
	if published.GetSite() != "edge" {
		t.Error("the published record was changed")
	}
}
