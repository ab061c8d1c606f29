package path

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// TestThenAt: one pass over the journal gives for every peer the same as ExplainAt, and the contents of records.
func TestThenAt(t *testing.T) {
	j := &memory{}
	a, b := nodeIDs[0], nodeIDs[1]
	at := func(sec int64, e *skeinv1.JournalEntry) { e.Time = sec * 1e9; j.Append(e) }
	decide := func(peer, to, rule string) *skeinv1.JournalEntry {
		d := &skeinv1.PathDecision{Peer: peer, To: to, Rule: rule, Reason: "Because."}
		return &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathDecision{PathDecision: d}}
	}
	input := func(peer, kind, detail string) *skeinv1.JournalEntry {
		in := &skeinv1.PathInput{Peer: peer, Kind: kind, Detail: detail}
		return &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathInput{PathInput: in}}
	}
	at(10, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_NatObserved{NatObserved: &skeinv1.NatObserved{}}})
	at(11, input("", "self", `{"Kind":1,"Node":{"NAT":1,"Site":"dc"}}`))
	at(12, input(a.String(), "record", `{"Kind":2,"Node":{"NAT":5,"Site":"cloud"}}`))
	at(13, input(b.String(), "record", `{"Kind":2,"Node":{"NAT":4,"Site":"home"}}`))
	at(14, decide(a.String(), "relay:x", "relay-first"))
	at(15, decide(b.String(), "direct:192.0.2.7:51820", "direct-proven"))
	at(16, input(b.String(), "traffic", `{"Kind":9}`))
	at(20, input(a.String(), "record", `{"Kind":2,"Node":{"NAT":5,"Site":"moved"}}`))
	at(21, decide(b.String(), "direct:192.0.2.7:51820", RuleDirectDead))
	at(22, input(b.String(), "record", `{`))
	at(23, decide("nobody", "relay", "idle"))
	at(30, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_AgentStarted{AgentStarted: &skeinv1.AgentStarted{}}})
	at(31, decide(a.String(), "none", "no-record"))
	for _, c := range []struct {
		at           int64
		paths        string // of a and b
		alive        [2]bool
		sites        string // of this node, a and b
		restartB     bool
		sinceOfPathB int64
	}{
		{5, "/", [2]bool{}, "//", false, 0},
		{13, "/", [2]bool{}, "dc/cloud/home", false, 0},
		{15, "relay:x/direct:192.0.2.7:51820", [2]bool{true, true}, "dc/cloud/home", false, 15},
		{21, "relay:x/direct:192.0.2.7:51820", [2]bool{true, false}, "dc/moved/home", false, 15},
		// The last record does not parse.
		{29, "relay:x/direct:192.0.2.7:51820", [2]bool{true, false}, "dc/moved/", false, 15},
		{99, "none/direct:192.0.2.7:51820", [2]bool{false, false}, "dc/moved/", true, 15},
	} {
		moment := time.Unix(c.at, 0)
		got, err := ThenAt(j, moment)
		if err != nil {
			t.Fatal(err)
		}
		sites := []string{"", got.Nodes[a].Site, got.Nodes[b].Site}
		if got.Self != nil {
			sites[0] = got.Self.Site
		}
		if have := strings.Join(sites, "/"); have != c.sites {
			t.Errorf("at %d: sites %s, want %s", c.at, have, c.sites)
		}
		pa, pb := got.Paths[a], got.Paths[b]
		alive := [2]bool{pa.Alive(), pb.Alive()}
		if have := pa.Path + "/" + pb.Path; have != c.paths || alive != c.alive || pb.Restarts != c.restartB {
			t.Errorf("at %d: %s, alive %v, restart %t; want %+v", c.at, have, alive, pb.Restarts, c)
		}
		if c.sinceOfPathB != 0 && !pb.Since.Equal(time.Unix(c.sinceOfPathB, 0)) {
			t.Errorf("at %d: since %s", c.at, pb.Since)
		}
		if !got.Begins.Equal(time.Unix(10, 0)) {
			t.Errorf("at %d: the journal begins at %s", c.at, got.Begins)
		}
		for id, p := range got.Paths {
			one, err := ExplainAt(j, id, moment)
			one.History = nil
			if d := cmp.Diff(one, p); d != "" || err != nil {
				t.Errorf("at %d: ExplainAt of %s says otherwise: %v\n%s", c.at, id, err, d)
			}
		}
	}
	if _, err := ThenAt(broken{}, time.Unix(1, 0)); err == nil || !strings.Contains(err.Error(), "disk on fire") {
		t.Errorf("error %v", err)
	}
	if got, err := ThenAt(&memory{}, time.Unix(1, 0)); err != nil || !got.Begins.IsZero() {
		t.Errorf("of an empty journal %+v, %v", got, err)
	}
}

// TestPastAlive: see also checker.step and sim.used, which hold it to what machines say.
func TestPastAlive(t *testing.T) {
	for _, c := range []struct {
		path, rule string
		want       bool
	}{
		{"", "", false},
		{"none", "no-answer", false},
		{"relay", "idle", true},
		{"relay:0123456789abcdef", "no-answer", true},
		{"relay:0123456789abcdef", RuleDirectDead, true},
		{"relay:0123456789abcdef,192.0.2.1:4000", ruleRelayUDP, true},
		{"relay:0123456789abcdef,192.0.2.1:4000", "direct-silent", true},
		{"relay:0123456789abcdef,192.0.2.1:4000", "no-answer", false},
		{"direct:192.0.2.1:51820", "direct-proven", true},
		{"direct:192.0.2.1:51820", "direct-adopted", true},
		{"direct:192.0.2.1:51820", RuleDirectDead, false},
		{"direct:192.0.2.1:51820", "peer-away", false},
	} {
		if got := (Past{Path: c.path, Rule: c.rule}).Alive(); got != c.want {
			t.Errorf("%q by %q: alive %t", c.path, c.rule, got)
		}
	}
}
