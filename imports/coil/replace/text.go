package replace

import (
	"strings"

	"github.com/skeinmesh/skein/internal/printable"
)

// mostText is how many characters of a text from outside are shown.
const mostText = 400

// shown is a text of the apiserver without what a terminal would obey, and not too long.
func shown(s string) string {
	s = printable.Line(s)
	if r := []rune(s); len(r) > mostText {
		s = string(r[:mostText]) + "…"
	}
	return s
}

// word is a name for a command that a user may copy into a shell: without what no name in Kubernetes has.
func word(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '.':
			return r
		}
		return -1
	}, s)
}
