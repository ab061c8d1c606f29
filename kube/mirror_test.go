package kube

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/skeinmesh/skein/identity"
)

func meta(ns, name string, annotations map[string]string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: "uid-" + "1", Annotations: annotations},
	}
}

func changed[T object[T]](m *mirror[T]) bool {
	select {
	case <-m.changed:
		return true
	default:
		return false
	}
}

func TestOnlyWhatIsUsedIsNews(t *testing.T) {
	heard := 0
	m := newMirror(slimNamespace, func() { heard++ })
	steps := []struct {
		what string
		do   func() error
		news bool
	}{
		{"the first list", func() error {
			return m.Replace([]any{meta("", "web", map[string]string{"skein.dev/pool": " special "})}, "1")
		}, true},
		{"another annotation", func() error {
			return m.Update(meta("", "web", map[string]string{"skein.dev/pool": "special", "x": "y"}))
		}, false},
		{"the same list", func() error {
			return m.Replace([]any{meta("", "web", map[string]string{"skein.dev/pool": "special"})}, "2")
		}, false},
		{"a bookmark", func() error { return m.Bookmark("3") }, false},
		{
			"another pool",
			func() error { return m.Update(meta("", "web", map[string]string{"coil.cybozu.com/pool": "lan"})) },
			true,
		},
		{"a new one", func() error { return m.Add(meta("", "job", nil)) }, true},
		{"one less", func() error { return m.Delete(meta("", "job", nil)) }, true},
		{"an empty list", func() error { return m.Replace(nil, "4") }, true},
	}
	for i, s := range steps {
		if err := s.do(); err != nil {
			t.Fatal(err)
		}
		if news := changed(m); news != s.news || heard != i+1 {
			t.Errorf("%s: news %v, want %v; heard %d times", s.what, news, s.news, heard)
		}
	}
	if err := m.Add("rubbish"); err == nil {
		t.Error("a string is taken for an object")
	}
}

func TestAnObjectIsWaitedFor(t *testing.T) {
	m := newMirror(slimPod, func() {})
	got := make(chan pod)
	go func() {
		p, _ := m.await(t.Context(), "web/p1")
		got <- p
	}()
	for _, name := range []string{"p0", "p1"} {
		if err := m.Add(meta("web", name, map[string]string{"skein.dev/egress.out": name, "other": "x"})); err != nil {
			t.Fatal(err)
		}
	}
	if p := <-got; len(p) != 1 || p["skein.dev/egress.out"] != "p1" {
		t.Errorf("%v", p)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, known := m.await(ctx, "web/p2"); known {
		t.Error("what never came is known")
	}
}

func TestARecordIsHandedOnUntilItIsDealtWith(t *testing.T) {
	s := nodes{newMirror(slimNode, func() {}), &holders{}}
	of, members := identity.ID{7}, map[identity.ID]bool{}
	take := func(done bool) (seen []string) {
		isMember := func(id identity.ID) bool { return members[id] }
		s.eachNewRecord(isMember, func(n *Node, value string) (identity.ID, bool) {
			seen = append(seen, n.Name+" "+value)
			return of, done
		})
		return seen
	}
	replace := func(record string) {
		t.Helper()
		n1 := meta("", "n1", map[string]string{"skein.dev/record": record})
		if err := s.Replace([]any{n1, meta("", "n2", nil)}, "1"); err != nil {
			t.Fatal(err)
		}
	}
	replace("a")
	if seen := take(false); len(seen) != 1 || seen[0] != "n1 a" {
		t.Errorf("%q", seen)
	}
	if seen := take(false); len(seen) != 0 {
		t.Errorf("the record of no member is read again: %q", seen)
	}
	replace("b")
	if seen := take(false); len(seen) != 1 || seen[0] != "n1 b" {
		t.Errorf("another record of no member: %q", seen)
	}
	members[of] = true
	if seen := take(false); len(seen) != 1 {
		t.Errorf("the record of who has become a member: %q", seen)
	}
	if seen := take(true); len(seen) != 1 {
		t.Errorf("a member's record that was not dealt with: %q", seen)
	}
	replace("b")
	if seen := take(true); len(seen) != 0 {
		t.Errorf("what was dealt with comes again: %q", seen)
	}
	if err := s.Update(meta("", "n1", map[string]string{"skein.dev/record": "c"})); err != nil {
		t.Fatal(err)
	}
	if seen := take(true); len(seen) != 1 || seen[0] != "n1 c" {
		t.Errorf("a new record: %q", seen)
	}
	if !s.get("n1").hasRecord || s.get("n2").hasRecord || s.get("n3") != nil {
		t.Error("who has a record is forgotten")
	}
}

func TestTheCopyComesBack(t *testing.T) {
	dir := t.TempDir()
	if c, err := loadCopy(dir); err != nil || c.Node != nil {
		t.Errorf("without a file: %v, %v", c, err)
	}
	want := diskCopy{
		Node: slimNode(
			meta("", "n1", map[string]string{"skein.dev/location": "attic", "skein.dev/record": "r", "x": "y"}),
		),
		Namespaces: map[string]namespace{
			"web":   "special",
			"plain": "",
		},
		Pods: map[string]pod{"web/p": {"skein.dev/egress.out": "nat"}, "web/q": nil},
	}
	if err := saveCopy(dir, want); err != nil {
		t.Fatal(err)
	}
	c, err := loadCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, plain := c.Namespaces["plain"]
	_, q := c.Pods["web/q"]
	if c.Node.Name != "n1" || len(c.Node.Annotations) != 1 || c.Namespaces["web"] != "special" || !plain ||
		!c.Pods["web/p"].same(want.Pods["web/p"]) ||
		!q {
		t.Errorf("%+v, node %+v", c, c.Node)
	}
}
