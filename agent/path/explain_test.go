package path

import (
	"errors"
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs, run with -update if that is meant:\n%s", file, got)
	}
}

// What a user reads about a peer, in the cases that users ask about.
func TestExplain(t *testing.T) {
	for name, c := range map[string]struct {
		a, b skeinv1.NatType
		then func(*sim)
	}{
		"direct":  {natPortRestricted, natRestricted, func(*sim) {}},
		"futile":  {natPortRestricted, natSymmetric, func(*sim) {}},
		"blocked": {natBlocked, natNone, func(*sim) {}},
		"learned": {natRestricted, natSymmetric, func(*sim) {}},
		"silent":  {natPortRestricted, natPortRestricted, func(s *sim) { s.cut = cutAll }},
		"one-way": {natPortRestricted, natNone, func(s *sim) {
			s.cut = func(from, _ int, _ netip.AddrPort) bool { return from == 0 }
		}},
		"died": {natPortRestricted, natPortRestricted, func(s *sim) {
			s.run(30 * time.Second)
			s.traffic(time.Minute)
			s.cut = cutAll
		}},
		"no-relay": {natSymmetric, natSymmetric, func(s *sim) {
			s.run(time.Second)
			s.input(s.nodes[0], Input{Kind: InputRelay})
		}},
		"not-sent": {natNone, natNone, func(s *sim) {
			s.cut = cutAll
			s.run(30 * time.Second)
			s.input(s.nodes[0], Input{Kind: InputSendFailed, Endpoint: s.nodes[1].inner,
				Error: "sendto: network is unreachable"})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, 3, c.a, c.b)
			s.start(true)
			c.then(s)
			s.run(10 * time.Second)
			golden(t, name, Explain(s.nodes[0].m, s.now).String())
		})
	}
	golden(t, "unknown", Explain(NewMachine(nodeIDs[0], nodeIDs[1], simStart), simStart.Add(time.Second)).String())
}

func TestExplainAt(t *testing.T) {
	j := &memory{}
	peer := nodeIDs[1]
	at := func(sec int64, e *skeinv1.JournalEntry) { e.Time = sec * 1e9; j.Append(e) }
	decide := func(to string) *skeinv1.JournalEntry {
		return &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathDecision{PathDecision: &skeinv1.PathDecision{
			Peer: peer.String(), To: to, Rule: "r" + to}}}
	}
	input := func(peer, kind string) *skeinv1.JournalEntry {
		return &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathInput{PathInput: &skeinv1.PathInput{Peer: peer,
			Kind: kind}}}
	}
	at(10, input("", "self"))
	at(11, input(nodeIDs[0].String(), "record"))
	at(12, input(peer.String(), "record"))
	at(12, input(peer.String(), "trace"))
	at(13, decide("relay:x"))
	at(20, decide("direct:y"))
	at(30, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_AgentStarted{AgentStarted: &skeinv1.AgentStarted{}}})
	at(31, decide("relay:z"))
	for _, c := range []struct {
		at      int64
		path    string
		history int
		restart bool
	}{{5, "", 0, false}, {12, "", 2, false}, {15, "relay:x", 3, false}, {20, "direct:y", 4, false},
		{30, "direct:y", 5, true}, {99, "relay:z", 6, false}} {
		p, err := ExplainAt(j, peer, time.Unix(c.at, 0))
		if err != nil || p.Path != c.path || len(p.History) != c.history || p.Restarts != c.restart {
			t.Errorf("at %d: %+v with %d entries, %v; want %+v", c.at, p, len(p.History), err, c)
		}
	}
	if _, err := ExplainAt(broken{}, peer, time.Unix(1, 0)); err == nil || !strings.Contains(err.Error(), peer.String()) {
		t.Errorf("error %v", err)
	}
}

type broken struct{}

func (broken) Read(time.Time, time.Time, func(*skeinv1.JournalEntry) bool) ([]*skeinv1.JournalEntry, error) {
	return nil, errors.New("disk on fire")
}

func TestReplayRefusesNonsense(t *testing.T) {
	_, err := replay([]*skeinv1.JournalEntry{{Seq: 7,
		Body: &skeinv1.JournalEntry_PathInput{PathInput: &skeinv1.PathInput{Peer: "x", Kind: kindTrace, Detail: "{"}}}})
	if err == nil || !strings.Contains(err.Error(), "journal entry 7") {
		t.Errorf("error %v", err)
	}
}
