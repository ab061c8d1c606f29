package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Verdict is how a figure stands to its target.
type Verdict string

// Verdicts.
const (
	Reached Verdict = "reached"
	Missed  Verdict = "missed"
	Failed  Verdict = "not measured"
	Partly  Verdict = "measured in part" // what was measured holds; the rest cannot be taken on this host
	Beside  Verdict = ""                 // told beside a figure, without a target of its own
)

// Figure is one line of the report.
type Figure struct {
	Name    string  `json:"figure"`
	Target  string  `json:"target"`
	Got     string  `json:"got"`
	How     string  `json:"how"`
	Verdict Verdict `json:"verdict"`
	Load    float64 `json:"load"` // processes ready to run, one-minute mean, when it was taken
	// Detail is more about a miss, for the log and not for the table.
	Detail []string `json:"detail,omitempty"`
}

// notMeasured is a figure that could not be taken.
func notMeasured(name, target string, err error) Figure {
	return Figure{Name: name, Target: target, Got: "not measured: " + firstLine(err.Error()), Verdict: Failed,
		Load: loadAverage(), Detail: strings.Split(err.Error(), "\n")}
}

func verdict(reached bool) Verdict {
	if reached {
		return Reached
	}
	return Missed
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// sample is a set of durations with the names of what took them.
type sample struct {
	took []time.Duration
	what []string
}

func (s *sample) add(d time.Duration, what string) {
	s.took, s.what = append(s.took, d), append(s.what, what)
}

// quantile by the nearest rank, of a set that is not empty.
func (s *sample) quantile(percent int) time.Duration {
	sorted := slices.Sorted(slices.Values(s.took))
	return sorted[max((len(sorted)*percent+99)/100, 1)-1]
}

// text shows a sample with the quantile that is promised.
func (s *sample) text(percent int) string {
	out := fmt.Sprintf("p50 %s", ms(s.quantile(50)))
	if percent < 100 {
		out += fmt.Sprintf(", p%d %s", percent, ms(s.quantile(percent)))
	}
	return out + fmt.Sprintf(", worst %s (n=%d)", ms(s.quantile(100)), len(s.took))
}

// slowest lists what lay above a limit, the worst first.
func (s *sample) slowest(limit time.Duration) []string {
	order := make([]int, len(s.took))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return int(s.took[b] - s.took[a]) })
	var out []string
	for _, i := range order {
		if s.took[i] <= limit || len(out) == 12 {
			break
		}
		out = append(out, fmt.Sprintf("%s: %s", s.what[i], ms(s.took[i])))
	}
	return out
}

// figure holds a sample to a limit at a quantile.
func (s *sample) figure(name string, percent int, limit time.Duration, how string) Figure {
	target := "≤ " + ms(limit)
	if percent < 100 {
		target += fmt.Sprintf(" at p%d", percent)
	}
	if len(s.took) == 0 {
		return notMeasured(name, target, fmt.Errorf("no run came to a result"))
	}
	return Figure{Name: name, Target: target, Got: s.text(percent), How: how,
		Verdict: verdict(s.quantile(percent) <= limit), Load: loadAverage(), Detail: s.slowest(limit)}
}

// ms shows a duration to the millisecond, or to the second where that is enough.
func ms(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", d.Seconds())
	case d >= 10*time.Millisecond || d == 0:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}

// loadAverage is the kernel's one-minute mean of processes ready to run; 0 where it does not tell.
func loadAverage() float64 {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	var one float64
	if _, err := fmt.Sscan(string(b), &one); err != nil {
		return 0
	}
	return one
}

// Times is a set of durations that a bench of another package measures.
type Times struct{ all sample }

// Add takes a duration down, with the name of what took it.
func (t *Times) Add(d time.Duration, what string) { t.all.add(d, what) }

// Median is the middle one, of a set that is not empty.
func (t *Times) Median() time.Duration { return t.all.quantile(50) }

// Text shows the set with a quantile.
func (t *Times) Text(percent int) string { return t.all.text(percent) }

// Figure holds the set to a limit at a quantile.
func (t *Times) Figure(name string, percent int, limit time.Duration, how string) Figure {
	return t.all.figure(name, percent, limit, how)
}

// NewFigure is a line of a report by another package's bench. Without a target it is told beside the others.
func NewFigure(name, target, got string, reached bool, how string) Figure {
	f := Figure{Name: name, Target: target, Got: got, How: how, Load: loadAverage()}
	if target != "" {
		f.Verdict = verdict(reached)
	}
	return f
}

// NotMeasured is a figure that could not be taken.
func NotMeasured(name, target string, err error) Figure { return notMeasured(name, target, err) }
