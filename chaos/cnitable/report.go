package cnitable

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/skeinmesh/skein/internal/marks"
)

// Begin opens the generated part of a document.
var Begin = marks.Begin("skein-dev cni --write")

// Write puts the report into a document, between its marks.
func (r *Report) Write(path string) error {
	var b strings.Builder
	r.Markdown(&b)
	return marks.InsertFile(path, Begin, b.String())
}

// word is a code as tables have it.
func word(code uint32) string {
	switch code {
	case 0:
		return "ok"
	case unknownCode:
		return "failed"
	}
	return fmt.Sprint(code)
}

func (r *Report) cell(row Row, version string) string {
	c, ok := row.Cells[version]
	if !ok {
		return "–"
	}
	text := word(c.Code)
	if c.Tool {
		text += " *c*"
	}
	if c.Why != "" {
		text = "**" + text + "**"
	}
	return text
}

// summary counts.
func (r *Report) summary() string {
	cells, right, tool := 0, 0, 0
	for _, row := range r.Rows {
		for _, c := range row.Cells {
			cells++
			if c.Why == "" {
				right++
			}
			if c.Tool {
				tool++
			}
		}
	}
	return fmt.Sprintf("%d of %d as expected, %d of them by cnitool too; %d lines, %d versions; %d processors, %.0fs.",
		right, cells, tool, len(r.Rows), len(r.Versions), r.CPUs, r.Seconds)
}

// Text writes the table for a terminal.
func (r *Report) Text(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "VERB\tFAULT\t"+strings.Join(r.Versions, "\t"))
	for _, row := range r.Rows {
		line := row.Verb + "\t" + row.Fault
		for _, v := range r.Versions {
			line += "\t" + strings.NewReplacer("**", "!", " *c*", "").Replace(r.cell(row, v))
		}
		fmt.Fprintln(t, line)
	}
	t.Flush()
	r.wrong(func(row Row, version string, c Cell) {
		fmt.Fprintf(w, "\n%s, %s, %s: %s\n", row.Verb, row.Fault, version, c.Why)
	})
	fmt.Fprintln(w, "\n"+r.summary())
}

func (r *Report) wrong(f func(Row, string, Cell)) {
	for _, row := range r.Rows {
		for _, v := range r.Versions {
			if c := row.Cells[v]; c.Why != "" {
				f(row, v, c)
			}
		}
	}
}

// Markdown writes the table that docs/cni.md keeps.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, "Tried on %s: %s\n\n", r.At.UTC().Format("2006-01-02"), r.summary())
	fmt.Fprintln(w, "*ok* or the code of the error. *c*: by cnitool too, which succeeded or failed alike. After each, "+
		"two DELs succeeded and nothing of the attachments was left: no link, no route, no lease.")
	fmt.Fprintln(w)
	fmt.Fprintln(w, "| verb | fault | "+strings.Join(r.Versions, " | ")+" | what it says, in the newest version |")
	fmt.Fprintln(w, "|---|---"+strings.Repeat("|---", len(r.Versions))+"|---|")
	for _, row := range r.Rows {
		cells := []string{row.Verb, row.Fault}
		for _, v := range r.Versions {
			cells = append(cells, r.cell(row, v))
		}
		cells = append(cells, row.says())
		fmt.Fprintln(w, "| "+strings.Join(cells, " | ")+" |")
	}
	fmt.Fprintln(w)
	r.wrong(func(row Row, version string, c Cell) {
		fmt.Fprintf(w, "Not as expected: %s, %s, %s: %s\n\n", row.Verb, row.Fault, version, c.Why)
	})
}

// says is the message, without what differs from run to run, and the note.
func (row Row) says() string {
	text := mask(row.Says)
	if d := mask(row.Details); d != "" {
		text += "; " + d
	}
	if row.Note != "" {
		text = strings.TrimSpace(text + " (" + row.Note + ")")
	}
	return strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;").Replace(text)
}
