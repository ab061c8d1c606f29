package agent

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/dataplane"
)

// What is noted from start to start: each former set of numbers until it is removed, the present ones never among them.
func TestNumbersAreNoted(t *testing.T) {
	zero, one, two := dataplane.NumbersOf(0), dataplane.NumbersOf(1), dataplane.NumbersOf(2)
	var none numbersNote
	for _, c := range []struct {
		what string
		have numbersNote
		now  dataplane.Numbers
		left []dataplane.Numbers
	}{
		{"a first start", none, zero, nil},
		{"the same again", numbersNote{Numbers: zero}, zero, nil},
		{"others", numbersNote{Numbers: zero}, one, []dataplane.Numbers{zero}},
		{"others again before the first are removed", numbersNote{Numbers: one, Left: []dataplane.Numbers{zero}}, two,
			[]dataplane.Numbers{zero, one}},
		{"back", numbersNote{Numbers: one, Left: []dataplane.Numbers{zero}}, zero, []dataplane.Numbers{one}},
		{"the same before the first are removed", numbersNote{Numbers: one, Left: []dataplane.Numbers{zero}}, one,
			[]dataplane.Numbers{zero}},
	} {
		if got := c.have.next(c.now); got.Numbers != c.now || !reflect.DeepEqual(got.Left, c.left) {
			t.Errorf("%s: %+v", c.what, got)
		}
	}
}

func TestNumbersFile(t *testing.T) {
	dir := t.TempDir()
	own := dataplane.NumbersOf(1)
	if n, err := readNumbers(dir, false, own); err != nil || n.Numbers != (dataplane.Numbers{}) {
		t.Errorf("of an agent that never ran: %+v, %v", n, err)
	}
	if n, err := readNumbers(dir, true, own); err != nil || n.Numbers != dataplane.DefaultNumbers() {
		t.Errorf("of a member whose version noted none: %+v, %v", n, err)
	}
	named := dataplane.DefaultNumbers()
	named.Link = "mesh0" // dataplane.link was a setting before
	if n, err := readNumbers(dir, true, named); err != nil || n.Numbers != named {
		t.Errorf("of such a member with a link of its own: %+v, %v", n, err)
	}
	want := numbersNote{Numbers: own, Left: []dataplane.Numbers{named}}
	if err := want.write(dir); err != nil {
		t.Fatal(err)
	}
	if n, err := readNumbers(dir, true, own); err != nil || !reflect.DeepEqual(n, want) {
		t.Errorf("read %+v, %v; want %+v", n, err, want)
	}
	file := filepath.Join(dir, numbersFile)
	if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readNumbers(dir, true, own); err == nil || !strings.Contains(err.Error(), file+" is damaged") {
		t.Errorf("of a broken file: %v", err)
	}
}

func TestFormerNumbersOfAnotherAgentAreNotRemoved(t *testing.T) {
	others := []claims.Claim{{Process: 7, RunDir: "/run/other", Numbers: dataplane.NumbersOf(0)}}
	if o := takenBy(dataplane.NumbersOf(0), others); o == nil || o.Process != 7 {
		t.Errorf("numbers of another agent are %v's", o)
	}
	if o := takenBy(dataplane.NumbersOf(1), others); o != nil {
		t.Errorf("nobody's numbers are %v's", o)
	}
}
