package redteam

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/marks"
)

// Begin opens the generated part of a document.
var Begin = marks.Begin("skein-dev redteam --write")

// Outcome is what became of an attempt.
type Outcome struct {
	Name    string  `json:"name"`
	From    Place   `json:"from"`
	Guard   Guard   `json:"guard"`
	Flood   bool    `json:"flood,omitempty"`
	Gained  string  `json:"gained,omitempty"`  // empty: nothing
	Refusal string  `json:"refusal,omitempty"` // what the attacker was told
	Counted string  `json:"counted,omitempty"` // at the victim, where attempts are judged by a number
	Invalid string  `json:"invalid,omitempty"` // why it could not be made: it then shows nothing
	Before  *Cost   `json:"before,omitempty"`  // of a flood
	During  *Cost   `json:"during,omitempty"`
	Seconds float64 `json:"seconds"`
}

// Report is what a run came to.
type Report struct {
	At       time.Time `json:"at"`
	Seconds  float64   `json:"seconds"`
	Short    bool      `json:"short"`
	Alone    Cost      `json:"alone"`  // the honest pair before the first attempt
	Beside   Cost      `json:"beside"` // the pair beside all attempts that are not floods
	Outcomes []Outcome `json:"outcomes"`
}

// String is for a terminal.
func (c Cost) String() string {
	return fmt.Sprintf("%.1f %% of %d packets lost, RTT p50 %s, p99 %s", 100*c.Loss(), c.Sent, round(c.Median),
		round(c.P99))
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }

// result says what was gained, in a line.
func (o Outcome) result() string {
	switch {
	case o.Invalid != "":
		return "not tried: " + brief(o.Invalid)
	case o.Gained != "":
		return "GAINED: " + o.Gained
	case o.Counted != "":
		return "nothing: " + o.Counted
	case o.Refusal != "":
		return "nothing: refused: " + brief(o.Refusal)
	}
	return "nothing"
}

// brief shortens what an attacker was told.
func brief(s string) string {
	const most = 160
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "…"
	}
	return s
}

// cost says what the pair lost beside a flood.
func (o Outcome) cost() string {
	if o.During == nil || o.Before == nil {
		return ""
	}
	return fmt.Sprintf("%.1f %% lost (before: %.1f %%), RTT %s (%s)", 100*o.During.Loss(), 100*o.Before.Loss(),
		round(o.During.Median), round(o.Before.Median))
}

// tooDear tells of a flood that cost the pair more than it may.
func (o Outcome) tooDear() bool {
	return o.During != nil && o.Before != nil && o.During.Loss()-o.Before.Loss() >= MaxLoss
}

func (o Outcome) String() string {
	s := fmt.Sprintf("%s: %s: %s", o.From, o.Name, o.result())
	if c := o.cost(); c != "" {
		s += "; beside it " + c
	}
	return s
}

// Err is nil when every attempt was made, nothing was gained, and no pair suffered.
func (r *Report) Err() error {
	var errs []error
	for _, o := range r.Outcomes {
		switch {
		case o.Invalid != "" || o.Gained != "":
			errs = append(errs, errors.New(o.String()))
		case o.tooDear():
			errs = append(errs, fmt.Errorf("%s: %s: the honest pair lost too much beside it: %s", o.From, o.Name, o.cost()))
		}
	}
	if r.Beside.Loss()-r.Alone.Loss() >= MaxLoss {
		errs = append(errs, fmt.Errorf("beside the attempts the honest pair lost too much: %s; alone: %s", r.Beside, r.Alone))
	}
	return errors.Join(errs...)
}

// Gained counts the attempts that gained something.
func (r *Report) Gained() (n int) {
	for _, o := range r.Outcomes {
		if o.Gained != "" {
			n++
		}
	}
	return n
}

// Text writes the report for a terminal.
func (r *Report) Text(w io.Writer) {
	for _, o := range r.Outcomes {
		if o.Gained != "" || o.Invalid != "" || o.tooDear() {
			fmt.Fprintln(w, o.String())
		}
	}
	fmt.Fprintf(w, "%d attempts, %d gained something; %.0f s\n", len(r.Outcomes), r.Gained(), r.Seconds)
	fmt.Fprintf(w, "the honest pair alone: %s\nbeside attempts that are not floods: %s\n", r.Alone, r.Beside)
}

// Markdown writes the table that a document keeps.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, "%d attempts on %s, %d processors; %d gained something. ",
		len(r.Outcomes), r.At.UTC().Format("2006-01-02"), runtime.NumCPU(), r.Gained())
	fmt.Fprintf(w, "An honest pair that is relayed sends %d packets of %d bytes a second both ways. Alone: %s. ",
		time.Second/pairEvery, pairSize, r.Alone)
	fmt.Fprintf(w, "Beside the attempts that are not floods: %s.\n\n", r.Beside)
	fmt.Fprint(w, "| attempt | from | stopped by | gained | beside it |\n|---|---|---|---|---|\n")
	for _, o := range r.Outcomes {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", cell(o.Name), o.From, cell(string(o.Guard)), cell(o.result()),
			cell(o.cost()))
	}
}

func cell(s string) string {
	return strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;").Replace(s)
}

// Write puts the table into a document, between its marks.
func (r *Report) Write(path string) error {
	var b strings.Builder
	r.Markdown(&b)
	return marks.InsertFile(path, Begin, b.String())
}
