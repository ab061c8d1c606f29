package bench

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"
	"unicode/utf8"
)

// Report is all that a run has measured.
type Report struct {
	At      time.Time `json:"at"`
	CPUs    int       `json:"cpus"`
	Quick   bool      `json:"quick"`
	Seconds float64   `json:"seconds"`
	Figures []Figure  `json:"figures"`
}

func newReport(quick bool) *Report {
	return &Report{At: time.Now(), CPUs: runtime.NumCPU(), Quick: quick}
}

// Reached is true when every figure that has a target reached it.
func (r *Report) Reached() bool {
	for _, f := range r.Figures {
		if f.Verdict != Reached && f.Verdict != Beside {
			return false
		}
	}
	return true
}

func (r *Report) counts() (reached, all int) {
	for _, f := range r.Figures {
		if f.Verdict == Beside {
			continue
		}
		all++
		if f.Verdict == Reached {
			reached++
		}
	}
	return reached, all
}

func (r *Report) summary() string {
	reached, all := r.counts()
	kind := "the whole bench"
	if r.Quick {
		kind = "a quick look (--quick)"
	}
	return fmt.Sprintf("%d of %d targets reached; %s on %d processors in %s.", reached, all, kind, r.CPUs,
		time.Duration(r.Seconds*float64(time.Second)).Round(time.Second))
}

func (f Figure) mark() string {
	switch f.Verdict {
	case Reached:
		return "ok"
	case Missed:
		return "MISSED"
	case Failed:
		return "FAILED"
	case Partly:
		return "in part"
	}
	return ""
}

// Text writes the table for a terminal.
func (r *Report) Text(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "FIGURE\tTARGET\tGOT\t\tLOAD\tHOW")
	for _, f := range r.Figures {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%.1f\t%s\n", f.Name, f.Target, f.Got, f.mark(), f.Load, f.How)
	}
	t.Flush()
	for _, f := range r.Figures {
		if f.Verdict == Reached || len(f.Detail) == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s: %s\n", strings.TrimSpace(f.Name), f.mark())
		for _, d := range f.Detail {
			fmt.Fprintf(w, "    %s\n", d)
		}
	}
	fmt.Fprintln(w, "\n"+r.summary())
}

// Markdown writes the report as docs/bench.md keeps it.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, `# Measured

For anyone who wants to know how fast skein is, and how large. Written by `+"`make bench WRITE=docs/bench.md`"+` on %s. %s

"Load" is the kernel's one-minute mean of processes ready to run when the figure was taken; on a machine that
does other work too, times are longer than they need to be. Hosts are network namespaces on one machine: between
them lies no distance, and all agents share its processors.

`, r.At.UTC().Format("2006-01-02"), r.summary())
	Table(w, r.Figures)
}

// WriteFile writes the report to a file. Sections of the file, which others write, stay below it.
func (r *Report) WriteFile(file string) error {
	var text strings.Builder
	r.Markdown(&text)
	old, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if i := strings.Index(string(old), "\n## "); i >= 0 {
		text.WriteString(string(old[i:]))
	}
	return os.WriteFile(file, []byte(text.String()), 0o644)
}

// Table writes figures as docs/bench.md has them, below that how each was taken, and what is known of those that missed
// their targets.
func Table(w io.Writer, figures []Figure) {
	fmt.Fprint(w, "| | figure | target | got | | load |\n|---|---|---|---|---|---|\n")
	cell := strings.NewReplacer("|", `\|`, "\n", " ")
	for i, f := range figures {
		fmt.Fprintf(w, "| %d | %s | %s | %s | %s | %.1f |\n", i+1, cell.Replace(strings.TrimSpace(f.Name)), f.Target,
			cell.Replace(f.Got), f.mark(), f.Load)
	}
	fmt.Fprintln(w)
	for i, f := range figures {
		note := strings.Join(strings.Fields(f.How), " ")
		if f.Verdict == Missed && len(f.Detail) > 0 {
			note = strings.Trim(note+". Missed by "+strings.Join(f.Detail, "; "), ". ")
		}
		if note != "" {
			fill(w, fmt.Sprintf("%d. ", i+1), note)
		}
	}
}

// fill writes an item of a list in lines of at most 120 columns.
func fill(w io.Writer, mark, text string) {
	const columns = 120
	indent := strings.Repeat(" ", len(mark))
	line := mark
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
			line += word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns:
			fmt.Fprintln(w, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	fmt.Fprintln(w, line)
}
