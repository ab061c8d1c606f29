package egressns

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/dataplane/hold"
)

var update = flag.Bool("update", false, "write golden files anew")

// TestWay draws the path of a packet and of its answer.
func TestWay(t *testing.T) {
	var b strings.Builder
	for _, back := range []bool{false, true} {
		fmt.Fprintf(&b, "%s\n", map[bool]string{false: "a client's packet:", true: "the answer:"}[back])
		for _, s := range Way(back) {
			fmt.Fprintf(&b, "  %-16s %s%-18s %s\n", s.Where, strings.Repeat("  ", s.Depth), s.Chain, s.Text)
		}
	}
	const golden = "testdata/way.golden"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("got:\n%s\nwant (-update writes it):\n%s", b.String(), want)
	}
	in := map[string]bool{}
	for _, r := range Rules() {
		in[r.Chain] = true
	}
	for _, c := range chains(hold.Native) {
		if !in[c.name] {
			t.Errorf("Rules lacks chain %s", c.name)
		}
	}
}
