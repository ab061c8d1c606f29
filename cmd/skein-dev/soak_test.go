package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/chaos/soak"
)

// What a soak is asked for is refused before anything is brought up.
func TestSoakOptions(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--for 0s", "--for must be above zero"},
		{"--sample 0s", "--sample must be above zero"},
		{"--burn -1", "must not be below zero"},
		{"--crowd 1", "--crowd must be 2 to 63"},
		{"--crowd 64", "--crowd must be 2 to 63"},
		{"--crowd 5 lab.yaml", "give either --crowd or a lab file"},
	} {
		dir := t.TempDir()
		cmd := newSoakCmd(&globals{labs: dir})
		cmd.SetArgs(strings.Fields(c.args))
		cmd.SetOut(new(bytes.Buffer))
		cmd.SetErr(new(bytes.Buffer))
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
}

func TestPrintSoak(t *testing.T) {
	var text bytes.Buffer
	printSoak(&text, soak.Report{
		Rounds: 3, Kills: map[string]int{"a": 2, "b": 3}, Looks: 99, Commands: 7, Refused: 1, Freezes: 4,
		Halves: 1, Burned: 61.2,
		Resources: soak.Resources{
			Mesh: []soak.Trend{{Of: "mesh", Metric: soak.Heap, Minutes: 20, From: 20 << 20, To: 21 << 20, PerHour: 3 << 20},
				{Of: "mesh", Metric: soak.Files, Minutes: 20, From: 53, To: 50, PerHour: -9}},
			Runs: []soak.Trend{{Of: "a", Metric: soak.Heap, Minutes: 10, PerHour: 1 << 20},
				{Of: "c", Metric: soak.Heap, Minutes: 12, PerHour: 5 << 20}},
			Rest: []soak.Rest{{Of: "a", Metric: soak.Files, Start: 50, End: 60, Most: 78},
				{Of: "b", Metric: soak.Files, Start: 50, End: 70, Most: 78}},
		},
	})
	const want = `5 kills in 3 rounds, 99 answers checked, 7 commands kept (1 found no leader in time)
4 times an agent was frozen, 1 times half of all were killed at once, cores burned for 61 s

Growth under faults, least squares over 20 minutes; of agents the median, of connections the sum:
         FROM      TO        PER HOUR  FASTEST OF THOSE THAT RAN ON
  heap   20.0 MiB  21.0 MiB  +3.0 MiB  +5.0 MiB (c, 12 min)
  files  53        50        −9        –

At rest, those nearest to what they may hold:
         OF  BEFORE  AFTER  MAY
  files  b   50      70     78
`
	if text.String() != want {
		t.Errorf("it says\n%s\nwant\n%s", text.String(), want)
	}
}
