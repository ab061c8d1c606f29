// Package printable makes text from elsewhere safe to show: without what a terminal would obey.
//
// Its functions may be called concurrently.
package printable

import (
	"strings"
	"unicode"
)

// Lines is s without characters that are not printable; lines stay lines.
func Lines(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, s)
}

// Line is the same in one line.
func Line(s string) string { return strings.ReplaceAll(Lines(s), "\n", " ") }
