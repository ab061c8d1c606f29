package doctor

import "slices"

// Verdict says how bad a finding is.
type Verdict string

// From harmless to harmful. A Failure keeps the agent, or something that the configuration asks for, from working.
const (
	OK      Verdict = "ok"
	Note    Verdict = "note"    // it works; this is what it costs, or good to know
	Warning Verdict = "warning" // it works less well than it could, or will not for long
	Failure Verdict = "failure"
)

var order = []Verdict{OK, Note, Warning, Failure}

// Finding is the result of one check.
type Finding struct {
	Check   string  `json:"check"` // what was examined; for programs, as verdict is
	Seen    string  `json:"seen"`  // the value
	Verdict Verdict `json:"verdict"`
	Why     string  `json:"why"` // why it matters; empty for ok
	Do      string  `json:"do"`  // one command, or the key to change; empty for ok
}

// Skip is a check that could not be done.
type Skip struct {
	Check string `json:"check"`
	Why   string `json:"why"`
}

// Report is what Judge finds, in the order of the checks.
type Report struct {
	Findings []Finding `json:"findings"`
	Skipped  []Skip    `json:"skipped"`
}

// Worst is the worst verdict of all findings; OK when there are none.
func (r Report) Worst() Verdict {
	worst := 0
	for _, f := range r.Findings {
		worst = max(worst, slices.Index(order, f.Verdict))
	}
	return order[worst]
}

// Count is how many findings have a verdict.
func (r Report) Count(v Verdict) (n int) {
	for _, f := range r.Findings {
		if f.Verdict == v {
			n++
		}
	}
	return n
}
