package graph

import (
	"fmt"
	"strings"
	"unicode"
)

// clean replaces what is no printable character: controls, line breaks, marks that change the direction of text,
// and bytes that are not UTF-8. What is left may be quoted for any format; XML has no way to write some of the
// others at all.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '\uFFFD'
	}, s)
}

// cells is how many columns of a fixed-width font a text takes, at most.
func cells(s string) (n int) {
	for _, r := range s {
		n += wide(r)
	}
	return n
}

// wide is the columns of one character: East Asian characters and emoji have two.
func wide(r rune) int {
	for _, span := range [...][2]rune{
		{0x1100, 0x115f}, {0x2e80, 0xd7ff}, {0xf900, 0xfaff}, {0xfe30, 0xfe6f}, {0xff00, 0xff60}, {0x1f000, 0x3ffff},
	} {
		if r >= span[0] && r <= span[1] {
			return 2
		}
	}
	return 1
}

// cut shortens a text to so many columns.
func cut(s string, most int) string {
	if cells(s) <= most {
		return s
	}
	var out strings.Builder
	for _, r := range s {
		if most -= wide(r); most < 1 {
			break
		}
		out.WriteRune(r)
	}
	return out.String() + "…"
}

// fold breaks a text into lines of at most so many columns, at spaces where there are any.
func fold(s string, most int) []string {
	var out []string
	line := ""
	for _, word := range strings.Fields(s) {
		word = cut(word, most)
		if line != "" && cells(line)+1+cells(word) > most {
			out, line = append(out, line), ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	if line != "" {
		out = append(out, line)
	}
	return out
}

var xmlQuoter = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", `"`, "&#34;", "'", "&#39;")

// xmlText is a text as XML has it, in an element or an attribute.
func xmlText(s string) string { return xmlQuoter.Replace(clean(s)) }

// In DOT's quoted strings a backslash begins an escape of Graphviz (\N is the node's name), and & an HTML entity.
var dotQuoter = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "&", "&amp;")

// dotText is lines as a quoted string of DOT.
func dotText(lines ...string) string {
	quoted := make([]string, len(lines))
	for i, l := range lines {
		quoted[i] = dotQuoter.Replace(clean(l))
	}
	return `"` + strings.Join(quoted, `\n`) + `"`
}

// put writes a line. What comes from names has been quoted.
func put(b *strings.Builder, format string, args ...any) { fmt.Fprintf(b, format+"\n", args...) }
