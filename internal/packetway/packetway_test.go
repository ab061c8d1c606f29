package packetway

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/skeinmesh/skein/internal/golden"
)

func TestDraw(t *testing.T) {
	got := Draw([]Stop{
		{Name: "pod", Steps: []Step{{"rule 1900", "from all lookup 117"}, {"", "nothing there"}, {"rule 2100, the one with " +
			"a long name", strings.Repeat("words and ", 20)}}, Leaves: "10.64.1.5 → 192.0.2.1, " +
			strings.Repeat("and so on ", 20)},
		{Name: "nothing here", Leaves: "x"},
		{Name: strings.Repeat("ä", 120), Steps: []Step{{"", strings.Repeat("y", 130)}}},
	})
	golden.Lines(t, "drawing", strings.Split(strings.TrimSuffix(got, "\n"), "\n"))
	for l := range strings.Lines(Draw([]Stop{{Name: "a", Steps: []Step{{"b", "c d"}}}})) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(l, "\n")); n != Width {
			t.Errorf("%d columns: %s", n, l)
		}
	}
}
