package owners

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/marks"
)

func TestReport(t *testing.T) {
	r := &Report{Seed: 5, Schedules: 2, Packets: 1000, Recovery: []time.Duration{time.Second}}
	s := Schedule{Number: 1, Seed: 5, Faults: []Fault{{Kind: Kill, Role: Leader}, {Kind: Pause, Role: Gateway}}}
	r.count(s)
	for i := range 100 {
		r.change(s, "gw1: kill -9", Change{Slot: "a/b#0", From: "gw1", To: "gw2",
			Dark: time.Duration(i+1) * time.Millisecond}, i%2 == 0)
	}
	r.add(s, Judge("a/b#0", given("AB"), seen("ABA")))
	var text strings.Builder
	r.Text(&text)
	for _, want := range []string{"2 of seed 5", "kill -9 1, pause 1", "50: p50 50ms, p99 100ms, worst 100ms",
		"50: p50 49ms, p99 99ms", "violations: 1", "two owners (schedule 1 of seed 5: the leader: kill -9",
		"worst case after a fault: schedule 1, a/b#0 from gw1 to gw2, dark for 100ms; faults: gw1: kill -9"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	file := filepath.Join(t.TempDir(), "x.md")
	if err := os.WriteFile(file, []byte(Begin+"\n"+marks.End), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Write(file); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(file); !strings.Contains(string(b), "| violations | 1 |") ||
		!strings.Contains(string(b), "VIOLATION") {
		t.Errorf("%s", b)
	}
}

func TestTheLabHasWhatTheRunNames(t *testing.T) {
	for name, m := range map[string]mesh{"full": full, "small": small} {
		t.Run(name, func(t *testing.T) {
			spec, err := lab.Parse("owners.yaml", m.source)
			if err != nil {
				t.Fatal(err)
			}
			for _, list := range [][]string{m.servers, m.gateways, m.clients, {target}} {
				for _, n := range list {
					if _, ok := spec.Node(n); !ok {
						t.Errorf("no node %s", n)
					}
				}
			}
			var names []lab.Ref
			slots, used := 0, map[string]bool{}
			for _, e := range spec.Egresses {
				ref := lab.Ref{Namespace: e.GetNamespace(), Name: e.GetName()}
				names, slots = append(names, ref), slots+int(e.GetReplicas())
				for _, p := range m.senders() {
					if p.egress == ref {
						used[SlotName(ref, events.SlotFor("default/"+p.name, e.GetReplicas()))] = true
					}
				}
			}
			if len(used) != slots {
				t.Errorf("clients use %v, not each of the %d slots", used, slots)
			}
			if !slices.Equal(names, m.egresses) {
				t.Errorf("egresses %v, want %v", names, m.egresses)
			}
		})
	}
}
