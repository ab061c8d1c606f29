package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"

	"github.com/skeinmesh/skein/chaos/soak"
)

// printHeld writes what agents and the kernel held in a soak, and by how much it grew.
func printHeld(w io.Writer, r soak.Resources) {
	if r.NotCounted != "" {
		fmt.Fprintf(w, "connections were not counted: %s\n", r.NotCounted)
	}
	if len(r.Mesh) == 0 {
		fmt.Fprintln(w, "Too short to tell by how much anything grows.")
	} else {
		fmt.Fprintf(w, "\nGrowth under faults, least squares over %.0f minutes; of agents the median, of connections the "+
			"sum:\n", r.Mesh[0].Minutes)
		t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
		fmt.Fprint(t, "  \tFROM\tTO\tPER HOUR\tFASTEST OF THOSE THAT RAN ON\n")
		for _, m := range r.Mesh {
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\n", m.Metric, held(m.Metric, m.From), held(m.Metric, m.To),
				growth(m.Metric, m.PerHour), fastest(m.Metric, r.Runs))
		}
		t.Flush()
	}
	if len(r.Rest) > 0 {
		fmt.Fprint(w, "\nAt rest, those nearest to what they may hold:\n")
		t := tabwriter.NewWriter(w, 2, 0, 2, ' ', 0)
		fmt.Fprint(t, "  \tOF\tBEFORE\tAFTER\tMAY\n")
		for _, x := range soak.Nearest(r.Rest) {
			fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\n", x.Metric, x.Of, held(x.Metric, x.Start), held(x.Metric, x.End),
				held(x.Metric, x.Most))
		}
		t.Flush()
	}
}

// held writes so much of a resource.
func held(m soak.Metric, v float64) string {
	if m == soak.Heap || m == soak.RSS {
		return fmt.Sprintf("%.1f MiB", v/(1<<20))
	}
	return fmt.Sprintf("%.0f", v)
}

func growth(m soak.Metric, perHour float64) string {
	sign := "+"
	if perHour < 0 {
		sign = "−"
	}
	return sign + held(m, math.Abs(perHour))
}

// fastest is what grew most of all that ran long enough.
func fastest(m soak.Metric, runs []soak.Trend) string {
	of := slices.DeleteFunc(slices.Clone(runs), func(t soak.Trend) bool { return t.Metric != m })
	if len(of) == 0 {
		return "–"
	}
	t := slices.MaxFunc(of, func(a, b soak.Trend) int { return cmp.Compare(a.PerHour, b.PerHour) })
	return fmt.Sprintf("%s (%s, %.0f min)", growth(m, t.PerHour), t.Of, t.Minutes)
}
