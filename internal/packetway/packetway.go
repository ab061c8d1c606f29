// Package packetway draws the way of a packet through hosts and network namespaces as text, from the tables of rules
// that the code itself works by. A document that holds such a drawing is written by a test and checked by it.
//
// It is pure and safe to call concurrently.
package packetway

import (
	"strings"
	"unicode/utf8"
)

// Width is how many columns a drawing has.
const Width = 110

// Step is a rule that the packet meets, or something that happens to it.
type Step struct {
	Where string // chain and hook, rule or table
	Text  string // in the words of ip and nft, or a short sentence
}

// Stop is a place that the packet passes: a network namespace, a host, a network between them.
type Stop struct {
	Name  string
	Steps []Step // in the order that the packet meets them
	// Leaves is what the packet looks like on its way to the next stop; empty for the last.
	Leaves string
}

// Draw is the drawing: a box for each stop, one below the other. A step without Where goes on in the column of the one
// above.
func Draw(way []Stop) string {
	var b strings.Builder
	for _, s := range way {
		box(&b, s)
		if s.Leaves != "" {
			b.WriteString("      │  " + strings.Join(fill(s.Leaves, Width-9), "\n      │  ") + "\n      ▼\n")
		}
	}
	return b.String()
}

func box(b *strings.Builder, s Stop) {
	const inside = Width - 4
	b.WriteString("┌─ " + s.Name + " " + strings.Repeat("─", max(0, Width-5-utf8.RuneCountInString(s.Name))) + "┐\n")
	column := 0
	for _, step := range s.Steps {
		column = max(column, utf8.RuneCountInString(step.Where))
	}
	if column > 0 {
		column += 2
	}
	for _, step := range s.Steps {
		for i, line := range fill(step.Text, inside-column) {
			where := ""
			if i == 0 {
				where = step.Where
			}
			text := pad(where, column) + line
			b.WriteString("│ " + pad(text, inside) + " │\n")
		}
	}
	b.WriteString("└" + strings.Repeat("─", Width-2) + "┘\n")
}

func pad(s string, n int) string { return s + strings.Repeat(" ", max(0, n-utf8.RuneCountInString(s))) }

// fill breaks a text at spaces; a word that is too long stays whole.
func fill(s string, width int) []string {
	var out []string
	line := ""
	for word := range strings.FieldsSeq(s) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			out, line = append(out, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(out, line)
}
