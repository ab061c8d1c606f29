package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/internal/cli"
)

// printProto writes a message as JSON: the fields of the API, in lowerCamelCase, with all values.
func printProto(w io.Writer, m proto.Message) error {
	b, err := protojson.MarshalOptions{EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode as JSON: %w", err)
	}
	return cli.PrintJSON(w, json.RawMessage(b))
}

// tableWidth is what every table fits into.
const tableWidth = 100

// leastColumn is how narrow a column may become.
const leastColumn = 8

// table lays out rows in columns that fit: the last is cut first, then whichever is widest.
type table struct {
	head []string
	rows [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) print(w io.Writer) {
	all := append([][]string{t.head}, t.rows...)
	width := make([]int, len(t.head))
	for _, r := range all {
		for i, c := range r {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	t.fit(width)
	paint := painter(w)
	for i, r := range all {
		var line strings.Builder
		for j, c := range r {
			c = cut(c, width[j])
			line.WriteString(paint(c, i == 0))
			line.WriteString(strings.Repeat(" ", width[j]-utf8.RuneCountInString(c)+2))
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// fit narrows columns until a line fits, as far as that goes.
func (t *table) fit(width []int) {
	over := -2 - tableWidth
	for _, n := range width {
		over += n + 2
	}
	last := len(width) - 1
	for ; over > 0; over-- {
		at := last
		if !t.mayNarrow(last, width[last]) {
			at = -1
			for i, n := range width {
				if t.mayNarrow(i, n) && (at < 0 || n >= width[at]) {
					at = i
				}
			}
		}
		if at < 0 {
			return
		}
		width[at]--
	}
}

// mayNarrow leaves alone what is typed again elsewhere.
func (t *table) mayNarrow(i, width int) bool {
	switch t.head[i] {
	case "ID", "IPV4", "IPV6", "PREFIX", "KEPT ADDRESS":
		return false
	}
	return width > max(leastColumn, len(t.head[i]))
}

func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// wrap breaks a text into lines that fit, at spaces; every line but the first is indented.
func wrap(s string, indent int) string {
	var out strings.Builder
	for width := tableWidth; utf8.RuneCountInString(s) > width; width = tableWidth - indent {
		head := string([]rune(s)[:width+1])
		at := strings.LastIndex(strings.TrimRight(head, " "), " ")
		if at <= 0 || out.Len() == 0 && at <= indent {
			break // one long word
		}
		out.WriteString(strings.TrimRight(s[:at], " ") + "\n" + strings.Repeat(" ", indent))
		s = strings.TrimLeft(s[at:], " ")
	}
	return out.String() + s
}

// printLines writes each line so that it fits, or none if there are no lines.
func printLines(w io.Writer, lines []string, none string) {
	for _, l := range lines {
		fmt.Fprintln(w, wrap(l, 4))
	}
	if len(lines) == 0 {
		fmt.Fprintln(w, none)
	}
}

// labelsText is labels as k=v, in order.
func labelsText(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return dash(strings.Join(out, " "))
}

// painter colours words that say how things stand, on a terminal only.
func painter(w io.Writer) func(s string, head bool) string {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("NO_COLOR") != "" {
		return func(s string, _ bool) string { return s }
	}
	return func(s string, head bool) string {
		switch {
		case head:
			return "\x1b[1m" + s + "\x1b[0m"
		case s == "direct" || s == "yes" || s == "connected":
			return "\x1b[32m" + s + "\x1b[0m"
		case s == "relay":
			return "\x1b[33m" + s + "\x1b[0m"
		case s == "down" || s == "none" || s == "error":
			return "\x1b[31m" + s + "\x1b[0m"
		}
		return s
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func since(ns int64) string {
	if ns == 0 {
		return "never"
	}
	return short(time.Since(time.Unix(0, ns)))
}

// short is a duration in at most two units.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + short(-d)
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return fmt.Sprintf("%.1fms", float64(d)/1e6)
	case d < time.Minute:
		return fmt.Sprintf("%.0fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", int(d.Minutes()), int(d.Seconds())%60)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

func rtt(ns int64) string {
	if ns == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fms", float64(ns)/1e6)
}

func size(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	f, i := float64(n)/1024, 0
	for f >= 1024 && i < len(units)-1 {
		f, i = f/1024, i+1
	}
	return fmt.Sprintf("%.1f%ciB", f, units[i])
}
