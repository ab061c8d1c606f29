package events

import "testing"

func TestSmoke(t *testing.T) {
	w := newCluster(t)
	for _, n := range []string{"b", "c", "d"} {
		w.must(withID("join "+n, admit(n, "1", asServer)))
		w.must(promote(w.id(n)))
	}
	w.must(revoke(w.id("d")))
	for _, l := range Diff(NewState(), w.s) {
		t.Log(l)
	}
	r := NewState()
	for _, e := range w.log {
		if err := r.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	checkSame(t, "replay", w.s, r)
	f, err := FromProto(w.s.Proto())
	if err != nil {
		t.Fatal(err)
	}
	checkSame(t, "snapshot", w.s, f)
}
