package filewatch

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// scene is a directory with a watched file.
type scene struct {
	t    *testing.T
	dir  string
	told chan struct{}

	count atomic.Int64 // of tellings, that of being ready among them
}

func watch(t *testing.T, file string, before ...func(*scene)) *scene {
	t.Helper()
	s := &scene{t: t, dir: t.TempDir(), told: make(chan struct{}, 1000)}
	for _, f := range before {
		f(s)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Watch(ctx, filepath.Join(s.dir, file), func() { s.count.Add(1); s.told <- struct{}{} })
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	s.hears("that it is ready")
	return s
}

func (s *scene) hears(what string) {
	s.t.Helper()
	select {
	case <-s.told:
	case <-time.After(10 * time.Second):
		s.t.Fatalf("not told: %s", what)
	}
	for len(s.told) > 0 {
		<-s.told
	}
}

func (s *scene) do(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) path(name string) string { return filepath.Join(s.dir, name) }

func (s *scene) write(name, text string) {
	s.t.Helper()
	s.do(os.MkdirAll(filepath.Dir(s.path(name)), 0o755))
	s.do(os.WriteFile(s.path(name), []byte(text), 0o644))
}

func TestAFileIsWrittenReplacedAndRemoved(t *testing.T) {
	s := watch(t, "skein.yaml", func(s *scene) { s.write("skein.yaml", "a") })
	s.write("skein.yaml", "b")
	s.hears("that it was written")
	s.write("new", "c")
	s.do(os.Rename(s.path("new"), s.path("skein.yaml")))
	s.hears("that another was renamed over it")
	s.write("skein.yaml", "d")
	s.hears("that this one was written")
	s.do(os.Remove(s.path("skein.yaml")))
	s.hears("that it was removed")
	s.write("skein.yaml", "e")
	s.hears("that it is there again")
	s.do(os.Chmod(s.path("skein.yaml"), 0o600))
	s.hears("that others may read it")
}

// A directory that is missing at first, that goes, and that comes again with the file in it.
func TestTheDirectoryComesAndGoes(t *testing.T) {
	s := watch(t, "etc/skein/skein.yaml")
	s.write("etc/skein/skein.yaml", "a")
	s.hears("that it has come with its directories")
	s.do(os.Rename(s.path("etc/skein"), s.path("etc/old")))
	s.hears("that its directory has moved away")
	s.write("etc/new/skein.yaml", "b")
	s.do(os.Rename(s.path("etc/new"), s.path("etc/skein")))
	s.hears("that another directory is in its place")
	s.write("etc/skein/skein.yaml", "c")
	s.hears("that the file in that was written")
	s.do(os.RemoveAll(s.path("etc")))
	s.hears("that all is gone")
	s.write("etc/skein/skein.yaml", "d")
	s.hears("that all is there again")
}

// Kubernetes mounts a ConfigMap so: skein.yaml -> ..data/skein.yaml, ..data -> ..1, and renames another ..data over it.
func TestAConfigMap(t *testing.T) {
	s := watch(t, "skein.yaml", func(s *scene) {
		s.write("..1/skein.yaml", "a")
		s.do(os.Symlink("..1", s.path("..data")))
		s.do(os.Symlink("..data/skein.yaml", s.path("skein.yaml")))
	})
	for _, next := range []string{"..2", "..3"} {
		s.write(next+"/skein.yaml", next)
		s.do(os.Symlink(next, s.path("..data_tmp")))
		s.do(os.Rename(s.path("..data_tmp"), s.path("..data")))
		s.hears("that " + next + " is behind the link")
		s.write(next+"/skein.yaml", "again")
		s.hears("that the file behind the link was written")
	}
}

// What else happens in the directory is not told of: a log may be written there many times a second.
func TestOthersAreNotToldOf(t *testing.T) {
	s := watch(t, "skein.yaml", func(s *scene) { s.write("skein.yaml", "a"); s.write("far/else.yaml", "a") })
	for range 20 {
		s.write("agent.log", "x")
		s.write("far/else.yaml", "b")
		s.do(os.Remove(s.path("agent.log")))
	}
	// Events come in their order, so those of others would be told of before this one, which is a single event.
	s.do(os.Rename(s.path("far/else.yaml"), s.path("skein.yaml")))
	select {
	case <-s.told:
	case <-time.After(10 * time.Second):
		t.Fatal("not told of the file")
	}
	s.do(os.Remove(s.path("skein.yaml")))
	s.hears("that it was removed")
	if more := s.count.Load() - 3; more != 0 {
		t.Errorf("told %d times of what is not the file", more)
	}
}

func TestWay(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	for _, err := range []error{
		os.MkdirAll(at("a", "b"), 0o755), os.WriteFile(at("a", "b", "f"), nil, 0o644),
		os.Symlink("b/../b/f", at("a", "rel")), os.Symlink(at("a", "rel"), at("abs")), os.Symlink("loop", at("loop")),
		os.Symlink("a/b", at("d")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		file string
		want []step
	}{
		{at("a", "b", "f"), []step{{at("a", "b"), "f"}}},
		{at("abs"), []step{{at(), "abs"}, {at("a"), "rel"}, {at("a", "b"), "f"}}},
		{at("d", "f"), []step{{at(), "d"}, {at("a", "b"), "f"}}},
		{at("a", "none", "f"), []step{{at("a"), "none"}}},
		{at("d", "none"), []step{{at(), "d"}, {at("a", "b"), "none"}}},
	} {
		if have := way(c.file); !slices.Equal(have, c.want) {
			t.Errorf("%s: %v, want %v", c.file, have, c.want)
		}
	}
	if n := len(way(at("loop"))); n != maxLinks+1 {
		t.Errorf("a link to itself is followed %d times", n)
	}
}
