package main

import (
	"fmt"
	"runtime"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/marks"
)

// begin opens the generated part of the document.
var begin = marks.Begin("make conformance WRITE=…")

// report is all that was found.
type report struct {
	at      time.Time
	version string // of Kubernetes
	took    time.Duration
	jobs    int
	results []result
}

// cannot has the reason for each test that cannot run on a lab of one machine.
var cannot = map[string]string{}

func (r report) passed() (n int) {
	for _, one := range r.results {
		if one.state == passed {
			n++
		}
	}
	return n
}

func (r report) summary() string {
	return fmt.Sprintf("%d of %d of Kubernetes %s's network conformance tests passed in %s, %d at a time on %d processors",
		r.passed(), len(r.results), r.version, r.took.Round(time.Second), r.jobs, runtime.NumCPU())
}

// failure names the tests that should have passed.
func (r report) failure() error {
	var bad []string
	for _, one := range r.results {
		if one.state != passed && cannot[one.name] == "" {
			bad = append(bad, fmt.Sprintf("%s: %s", one.state, one.name))
		}
	}
	if bad == nil {
		return nil
	}
	return fmt.Errorf("%d tests have not passed:\n%s", len(bad), strings.Join(bad, "\n"))
}

// table is the generated part of the document.
func (r report) table() string {
	var b strings.Builder
	fmt.Fprintf(&b, "On %s: %s.\n\n| test | result | seconds |\n|---|---|---|\n", r.at.Format(time.DateOnly), r.summary())
	for _, one := range r.results {
		state := one.state
		if why := cannot[one.name]; why != "" {
			state += ": " + why
		}
		fmt.Fprintf(&b, "| %s | %s | %.1f |\n", shorter(one.name), state, one.took.Seconds())
	}
	return b.String()
}

// listed are the names in a document's table, without what all names have.
func listed(document string) []string {
	text, _ := marks.Text(document, begin)
	var names []string
	for line := range strings.Lines(text) {
		cells := strings.Split(line, " | ")
		if name, ok := strings.CutPrefix(cells[0], "| "); ok && len(cells) == 3 && name != "test" {
			names = append(names, name)
		}
	}
	return names
}
