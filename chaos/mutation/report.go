package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/marks"
)

// begin opens the generated part of a document.
var begin = marks.Begin("make mutations WRITE=…")

// report is all that was found.
type report struct {
	at      time.Time
	took    time.Duration // of the bugs
	results []result
	runs    []history
}

// history is what consensus' test tells of one run.
type history struct {
	Seed       uint64         `json:"seed"`
	Operations int            `json:"operations"`
	Unknown    int            `json:"unknown"`
	Refused    int            `json:"refused"`
	Sent       int            `json:"sent"`
	Events     int            `json:"events"`
	Faults     map[string]int `json:"faults"`
	Seconds    float64        `json:"checkSeconds"`
	Virtual    float64        `json:"virtualSeconds"`
}

// histories runs the cluster with so many seeds.
func (p *mutator) histories(ctx context.Context, seeds int) (out []history, err error) {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-v", "-timeout", "60m", "-run", "^"+histories.test+
		"$", histories.pkg)
	cmd.Dir = p.root
	cmd.Env = append(os.Environ(), fmt.Sprint("SKEIN_TEST_SEEDS=", seeds))
	text, err := cmd.CombinedOutput()
	for line := range bytes.Lines(text) {
		if _, encoded, ok := bytes.Cut(line, []byte("history: ")); ok {
			var h history
			if err := json.Unmarshal(encoded, &h); err != nil {
				return nil, fmt.Errorf("read %q: %w", line, err)
			}
			out = append(out, h)
		}
	}
	if err != nil {
		return out, fmt.Errorf("%s: %w\n%s", histories, err, tail(text))
	}
	if len(out) != seeds {
		return out, fmt.Errorf("%s told of %d runs, not of %d", histories, len(out), seeds)
	}
	return out, nil
}

func (r result) text() string {
	var b strings.Builder
	mark := "found"
	switch {
	case r.err != nil:
		mark = "ERROR"
	case !r.ok():
		mark = "NOT FOUND"
	}
	fmt.Fprintf(&b, "%-9s  %s\n", mark, r.bug.name)
	if r.err != nil {
		fmt.Fprintf(&b, "           %v\n", r.err)
	}
	for _, f := range r.findings {
		how := "found after " + took(f.took)
		if !f.found {
			how = "passes"
		}
		fmt.Fprintf(&b, "           %s: %s\n", f.check, how)
	}
	return b.String()
}

func took(d time.Duration) string {
	if d < time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func (r *report) failure() error {
	var missed []string
	for _, one := range r.results {
		if !one.ok() {
			missed = append(missed, one.bug.name)
		}
	}
	if missed != nil {
		return fmt.Errorf("%d of %d bugs are not found by each of their checks, which are too weak: %s", len(missed),
			len(r.results), strings.Join(missed, "; "))
	}
	return nil
}

func (r *report) summary() string {
	good, checks := 0, 0
	for _, one := range r.results {
		if one.ok() {
			good++
		}
		checks += len(one.findings)
	}
	return fmt.Sprintf("%d of %d mutations found, by %d checks, in %s on %d processors", good, len(r.results), checks,
		r.took.Round(time.Second), runtime.NumCPU())
}

func (r *report) runsText() string {
	var sum history
	faults, most := map[string]int{}, 0.0
	for _, h := range r.runs {
		sum.Operations, sum.Unknown, sum.Refused, sum.Sent, sum.Events = sum.Operations+h.Operations, sum.Unknown+h.Unknown,
			sum.Refused+h.Refused, sum.Sent+h.Sent, sum.Events+h.Events
		sum.Virtual, most = sum.Virtual+h.Virtual, max(most, h.Seconds)
		for f, n := range h.Faults {
			faults[f] += n
		}
	}
	var kinds []string
	for _, f := range slices.Sorted(maps.Keys(faults)) {
		kinds = append(kinds, fmt.Sprintf("%s %d", f, faults[f]))
	}
	return fmt.Sprintf("%d seeds, all linearizable: %d operations (%d refused, %d of unknown outcome) from %d requests "+
		"that were sent, %d events in the logs, %s of the clusters' time; "+
		"faults: %s. The longest check of a run's histories took %s.", len(r.runs), sum.Operations, sum.Refused, sum.Unknown,
		sum.Sent, sum.Events,
		time.Duration(sum.Virtual*float64(time.Second)).Round(time.Second), strings.Join(kinds, ", "),
		took(time.Duration(most*float64(time.Second))))
}

// markdown writes what the document keeps.
func (r *report) markdown(w io.Writer) {
	fmt.Fprintf(w, "On %s: %s.\n\n", r.at.UTC().Format("2006-01-02"), r.summary())
	fmt.Fprintln(w, "| mutation | what goes wrong | found by, after |\n|---|---|---|")
	for _, one := range r.results {
		var by []string
		for _, f := range one.findings {
			how := took(f.took)
			if !f.found {
				how = "**not found**"
			}
			by = append(by, fmt.Sprintf("%s `%s` %s", strings.TrimPrefix(f.check.pkg, "./"), f.check.test, how))
		}
		if one.err != nil {
			by = append(by, "**error**")
		}
		fmt.Fprintf(w, "| %s | %s | %s |\n", one.bug.name, one.bug.why, strings.Join(by, "<br>"))
	}
	if len(r.runs) > 0 {
		fmt.Fprintf(w, "\nPorcupine, without a bug: %s\n", r.runsText())
	}
}

// insert puts the report into a document, between its marks.
func (r *report) insert(path string) error {
	var b strings.Builder
	r.markdown(&b)
	return marks.InsertFile(path, begin, b.String())
}
