package owners

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/marks"
)

// Begin opens the generated part of a document.
var Begin = marks.Begin("skein-dev owners --write")

// Report is what a run came to.
type Report struct {
	At         time.Time       `json:"at"`
	Seed       uint64          `json:"seed"`
	Seconds    float64         `json:"seconds"`
	Schedules  int             `json:"schedules"`
	Packets    int             `json:"packets"` // judged
	Missed     int             `json:"missed"`  // that the observer had no room for
	Violations []Violation     `json:"violations"`
	Recovery   []time.Duration `json:"recovery_nanos"` // after each schedule
	Sudden     []Moved         `json:"sudden"`         // changes of owner after a fault
	Planned    []Moved         `json:"planned"`        // by command, with the former owner's help
	Faults     map[Kind]int    `json:"faults"`
}

// Moved is a change of owner and where it came from.
type Moved struct {
	Change
	Schedule int    `json:"schedule"`
	Faults   string `json:"faults"` // whom they hit
}

func (r *Report) add(s Schedule, v []Violation) {
	for i := range v {
		v[i].Text += fmt.Sprintf(" (schedule %d of seed %d: %s)", s.Number, s.Seed, s)
	}
	r.Violations = append(r.Violations, v...)
}

// count notes the faults of a schedule that has run.
func (r *Report) count(s Schedule) {
	if r.Faults == nil {
		r.Faults = map[Kind]int{}
	}
	for _, f := range s.Faults {
		r.Faults[f.Kind]++
	}
}

func (r *Report) change(s Schedule, faults string, c Change, planned bool) {
	m := Moved{c, s.Number, faults}
	if planned {
		r.Planned = append(r.Planned, m)
	} else {
		r.Sudden = append(r.Sudden, m)
	}
}

// darkness describes how long slots were dark around changes.
func darkness(list []Moved) string {
	if len(list) == 0 {
		return "none"
	}
	var took []time.Duration
	for _, m := range list {
		took = append(took, m.Dark)
	}
	return fmt.Sprintf("%d: p50 %s, p99 %s, worst %s", len(took), quantile(took, 50), quantile(took, 99),
		quantile(took, 100))
}

// quantile by the nearest rank, to the millisecond.
func quantile(list []time.Duration, percent int) time.Duration {
	list = slices.Sorted(slices.Values(list))
	return list[max((len(list)*percent+99)/100, 1)-1].Round(time.Millisecond)
}

// worst tells of the longest darkness.
func worst(list []Moved) string {
	if len(list) == 0 {
		return ""
	}
	m := slices.MaxFunc(list, func(a, b Moved) int { return int(a.Dark - b.Dark) })
	return fmt.Sprintf("schedule %d, %s from %s to %s, dark for %s; faults: %s", m.Schedule, m.Slot, m.From, m.To,
		m.Dark.Round(time.Millisecond), m.Faults)
}

func (r *Report) lines() [][2]string {
	recovery := "none"
	if len(r.Recovery) > 0 {
		recovery = fmt.Sprintf("p50 %s, worst %s", quantile(r.Recovery, 50), quantile(r.Recovery, 100))
	}
	var kinds []string
	for _, k := range Kinds {
		if n := r.Faults[k]; n > 0 {
			kinds = append(kinds, fmt.Sprintf("%s %d", k, n))
		}
	}
	out := [][2]string{
		{"schedules", fmt.Sprintf("%d of seed %d, in %.0f s", r.Schedules, r.Seed, r.Seconds)},
		{"faults", strings.Join(kinds, ", ")},
		{"packets judged", fmt.Sprintf("%d; %d missed by the observer", r.Packets, r.Missed)},
		{"violations", fmt.Sprint(len(r.Violations))},
		{"changes of owner after a fault, time without a packet", darkness(r.Sudden)},
		{"the same by command", darkness(r.Planned)},
		{"worst case after a fault", worst(r.Sudden)},
		{"worst case by command", worst(r.Planned)},
		{"all well after the last fault's end", recovery},
	}
	return slices.DeleteFunc(out, func(l [2]string) bool { return l[1] == "" })
}

// Text writes the report for a terminal.
func (r *Report) Text(w io.Writer) {
	for _, l := range r.lines() {
		fmt.Fprintf(w, "%s: %s\n", l[0], l[1])
	}
	for _, v := range r.Violations {
		fmt.Fprintf(w, "VIOLATION at %s: slot %s: %s\n", v.At.Format(time.RFC3339Nano), v.Slot, v.Text)
	}
}

// Markdown writes the table that a document keeps.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, "Run on %s, %d processors.\n\n| | |\n|---|---|\n", r.At.UTC().Format("2006-01-02"), runtime.NumCPU())
	for _, l := range r.lines() {
		fmt.Fprintf(w, "| %s | %s |\n", l[0], strings.ReplaceAll(l[1], "|", `\|`))
	}
	for _, v := range r.Violations {
		fmt.Fprintf(w, "\nVIOLATION: slot %s: %s\n", v.Slot, v.Text)
	}
	fmt.Fprintf(w, "\n`skein-dev owners --schedules %d --seed %d` repeats it.\n", r.Schedules, r.Seed)
}

// Write puts the report into a document, between its marks.
func (r *Report) Write(path string) error {
	var b strings.Builder
	r.Markdown(&b)
	return marks.InsertFile(path, Begin, b.String())
}
