package matrix

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/skeinmesh/skein/internal/marks"
)

// Begin opens the generated part of a document.
var Begin = marks.Begin("skein-dev matrix --write")

// Write puts the report into a document, between its marks.
func (r *Report) Write(path string) error {
	var b strings.Builder
	r.Markdown(&b)
	return marks.InsertFile(path, Begin, b.String())
}

// Text writes the outcomes for a terminal, a line each.
func (r *Report) Text(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "PAIR\tEXPECTED\tGOT\t\tFIRST PACKET\tDIRECT\tRULE")
	for _, o := range r.Outcomes {
		mark := "ok"
		if !o.OK {
			mark = "WRONG"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", o.Pair, o.Want, o.path(), mark, took(o.First), took(o.Direct), o.Rule)
	}
	t.Flush()
	for _, o := range r.Outcomes {
		if !o.OK {
			fmt.Fprintf(w, "\n%s is %s, not %s: %s\n", o.Pair, o.Got, o.Want, o.Why)
		}
	}
	fmt.Fprintln(w, "\n"+r.summary())
}

// Markdown writes the tables that docs/nat-traversal.md keeps.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, "Measured on %s: %s\n\n", r.At.UTC().Format("2006-01-02"), r.summary())
	fmt.Fprintln(w, "Each cell: the path that the pair got, the time until both ends used it directly, and below it the "+
		"time to the first answered packet.")
	fmt.Fprintln(w, "*b*: by birthday probing. *p*: by port prediction. *6*: over IPv6. *u*: through UDP ports of the "+
		"relay, which pairs with traffic ask for; else in its TLS session.")
	fmt.Fprintln(w)
	fmt.Fprintln(w, "| | "+strings.Join(r.Kinds, " | ")+" |")
	fmt.Fprintln(w, "|---"+strings.Repeat("|---", len(r.Kinds))+"|")
	cells := map[[2]string]Outcome{}
	for _, o := range r.Outcomes {
		cells[o.Kinds] = o
	}
	for i, a := range r.Kinds {
		row := []string{"**" + a + "**"}
		for j, b := range r.Kinds {
			if j < i {
				row = append(row, "")
				continue
			}
			row = append(row, cells[[2]string{a, b}].cell())
		}
		fmt.Fprintln(w, "| "+strings.Join(row, " | ")+" |")
	}
	fmt.Fprintln(w)
	together := slices.DeleteFunc(slices.Clone(r.Outcomes), func(o Outcome) bool { return o.Kinds[0] != Together })
	if len(together) > 0 {
		fmt.Fprintln(w, "| behind "+Together+" | path, time to direct, time to first packet |\n|---|---|")
		for _, o := range together {
			fmt.Fprintf(w, "| %s | %s |\n", o.Kinds[1], o.cell())
		}
		fmt.Fprintln(w)
	}
	for _, o := range r.Outcomes {
		if !o.OK {
			fmt.Fprintf(w, "Not as expected: %s is %s, not %s. %s\n\n", o.Pair, o.Got, o.Want, o.Why)
		}
	}
}

func (o Outcome) path() string {
	switch {
	case o.IPv6:
		return o.Got + " (IPv6)"
	case o.UDP:
		return o.Got + " (UDP)"
	case o.Got == "relay":
		return o.Got + " (TCP)"
	}
	return o.Got
}

func (o Outcome) cell() string {
	text := o.Got
	if o.Got == "direct" {
		text += " " + took(o.Direct)
	}
	switch {
	case o.UDP:
		text += " *u*"
	case o.IPv6:
		text += " *6*"
	case o.Got == "direct" && strings.Contains(o.Want, "birthday"):
		text += " *b*"
	case o.Got == "direct" && strings.Contains(o.Want, "prediction"):
		text += " *p*"
	}
	if !o.OK {
		text = "**" + text + "**"
	}
	return text + "<br>" + took(o.First)
}

// took writes a duration; a negative one never ended.
func took(d time.Duration) string {
	switch {
	case d < 0:
		return "–"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	}
	return d.Round(100 * time.Millisecond).String()
}

func (r *Report) summary() string {
	good := 0
	var first, probed, predicted []time.Duration
	for _, o := range r.Outcomes {
		if o.OK {
			good++
		}
		if o.First >= 0 {
			first = append(first, o.First)
		}
		switch {
		case o.Direct < 0 || o.Got != "direct":
		case o.Want == Direct.String():
			probed = append(probed, o.Direct)
		default:
			predicted = append(predicted, o.Direct)
		}
	}
	return fmt.Sprintf("%d of %d pairs as expected; first packet %s; direct by probing %s; direct by port prediction %s; "+
		"%d processors, %s.",
		good, len(r.Outcomes), spread(first), spread(probed), spread(predicted), r.CPUs,
		time.Duration(r.Seconds*float64(time.Second)).Round(time.Second))
}

// spread sums up times: the median, the 95th percentile and the worst.
func spread(times []time.Duration) string {
	if len(times) == 0 {
		return "–"
	}
	slices.SortFunc(times, cmp.Compare)
	at := func(percent int) string { return took(times[(len(times)*percent+99)/100-1]) }
	return fmt.Sprintf("p50 %s, p95 %s, worst %s", at(50), at(95), at(100))
}
