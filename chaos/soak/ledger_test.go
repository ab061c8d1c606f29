package soak

import (
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestLedger(t *testing.T) {
	type answer struct {
		node  string
		index uint64
		hash  string
	}
	for _, c := range []struct {
		name    string
		answers []answer
		want    string // in the error of the last answer
	}{
		{"agreement", []answer{{"a", 1, "x"}, {"b", 1, "x"}, {"a", 2, "y"}, {"b", 2, "y"}}, ""},
		{"two hashes at an index", []answer{{"a", 7, "x"}, {"b", 8, "y"}, {"b", 9, "z"}, {"c", 7, "w"}},
			"at index 7 c has state hash w, a had x"},
		{"an index that goes back", []answer{{"a", 7, "x"}, {"a", 6, "v"}}, "a went back from index 7 to 6"},
		{"an agent that starts", []answer{{"a", 7, "x"}, {"a", 0, ""}, {"a", 7, "x"}}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := NewLedger()
			for i, a := range c.answers {
				err := l.Status(a.node, l.Applied(a.node), &skeinv1.StatusResponse{Index: a.index, StateHash: a.hash})
				last := i == len(c.answers)-1
				switch {
				case err != nil && (!last || c.want == "" || !strings.Contains(err.Error(), c.want)):
					t.Fatalf("answer %d: %v", i, err)
				case err == nil && last && c.want != "":
					t.Fatalf("no error, want %q", c.want)
				}
			}
		})
	}
}

func TestLedgerAnswersMayOvertakeEachOther(t *testing.T) {
	l := NewLedger()
	before := l.Applied("a")
	if err := l.Status("a", l.Applied("a"), &skeinv1.StatusResponse{Index: 9, StateHash: "y"}); err != nil {
		t.Fatal(err)
	}
	// Asked before the other answer came, answered after: no step back.
	if err := l.Status("a", before, &skeinv1.StatusResponse{Index: 8, StateHash: "x"}); err != nil {
		t.Fatal(err)
	}
}

func TestLedgerMissesNoToken(t *testing.T) {
	l := NewLedger()
	l.Acknowledged("a", "t1")
	if err := l.Tokens("b", []*skeinv1.Token{{Id: "t1"}}); err != nil {
		t.Fatal(err)
	}
	if err := l.Tokens("b", nil); err == nil || !strings.Contains(err.Error(), "b does not know token t1") {
		t.Fatalf("a lost token: %v", err)
	}
}

func TestLedgerMissesNoRevocation(t *testing.T) {
	l := NewLedger()
	for _, id := range []string{"t1", "t2", "t3"} {
		l.Acknowledged("a", id)
	}
	if old, ok := l.Oldest(3); ok {
		t.Fatalf("%s of three is more than three", old)
	}
	old, ok := l.Oldest(2)
	if !ok || old != "t1" {
		t.Fatalf("the oldest of three is %q", old)
	}
	left := []*skeinv1.Token{{Id: "t1"}, {Id: "t2"}, {Id: "t3"}}
	if err := l.Tokens("b", left); err != nil {
		t.Fatalf("a revocation that nobody acknowledged: %v", err)
	}
	l.Revoked("a", "t1")
	if err := l.Tokens("b", left); err == nil || !strings.Contains(err.Error(), "b still has token t1") {
		t.Fatalf("a token that came back: %v", err)
	}
	if err := l.Tokens("b", left[1:]); err != nil {
		t.Fatal(err)
	}
	if _, commands := l.Counts(); commands != 4 {
		t.Errorf("%d commands, want three creations and a revocation", commands)
	}
}
