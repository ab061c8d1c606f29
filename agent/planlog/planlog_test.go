package planlog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/journal"
)

// storm makes texts like plans: sorted lines, of which some change, come and go, and now and then all.
type storm struct {
	rng   *rand.Rand
	lines []string
}

func (s *storm) next() string {
	line := func() string {
		return fmt.Sprintf("peer n%d endpoint 192.0.2.%d:51820\n", s.rng.IntN(50), s.rng.IntN(250))
	}
	switch n := s.rng.IntN(20); {
	case n == 0:
		s.lines = nil
	case n == 1:
		s.rng.Shuffle(len(s.lines), func(i, j int) { s.lines[i], s.lines[j] = s.lines[j], s.lines[i] })
	case n < 5 && len(s.lines) > 0:
		i := s.rng.IntN(len(s.lines))
		s.lines = append(s.lines[:i:i], s.lines[i+1:]...)
	case n < 12 && len(s.lines) > 0:
		s.lines[s.rng.IntN(len(s.lines))] = line()
	default:
		i := s.rng.IntN(len(s.lines) + 1)
		s.lines = append(s.lines[:i:i], append([]string{line()}, s.lines[i:]...)...)
	}
	text := "link skein0 mtu 1420\n" + strings.Join(s.lines, "") + "rule 1998\n"
	if s.rng.IntN(10) == 0 {
		text = strings.TrimSuffix(text, "\n")
	}
	return text
}

// TestEveryPlanComesBack: what was noted comes back byte for byte, by time and by index, also after a restart, and
// steps lead from each plan to any later one.
func TestEveryPlanComesBack(t *testing.T) {
	for seed := range uint64(2) {
		s := &storm{rng: rand.New(rand.NewPCG(seed, 1))}
		path := filepath.Join(t.TempDir(), "plans.db")
		j, err := journal.Open(path, MaxPlans, journal.MaxBytes(MaxBytes))
		if err != nil {
			t.Fatal(err)
		}
		l := New(j)
		began := time.Unix(1_800_000_000, 0)
		type noted struct {
			at    time.Time
			index uint64
			text  string
		}
		var all []noted
		index := uint64(5)
		for i := range 700 {
			if i == 300 { // a restart
				if err := j.Close(); err != nil {
					t.Fatal(err)
				}
				if j, err = journal.Open(path, MaxPlans, journal.MaxBytes(MaxBytes)); err != nil {
					t.Fatal(err)
				}
				l = New(j)
				if v, err := l.Newest(); err != nil || v.Text != all[len(all)-1].text {
					t.Fatal("a restart has lost the newest plan")
				}
			}
			n := noted{began.Add(time.Duration(i) * time.Second), index, s.next()}
			if s.rng.IntN(3) == 0 {
				index += s.rng.Uint64N(4)
			}
			l.append(n.at, n.index, n.text)
			all = append(all, n)
		}
		t.Cleanup(func() { j.Close() })
		for i, n := range all {
			v, err := l.AtTime(n.at.Add(time.Duration(s.rng.IntN(1000)) * time.Millisecond))
			if err != nil || v.Text != n.text {
				t.Fatalf("seed %d, plan %d: %v\n%s\nwant\n%s", seed, i, err, v.Text, n.text)
			}
			if i+1 == len(all) || all[i+1].index > n.index {
				if v, err := l.AtIndex(n.index); err != nil || v.Text != n.text || v.Index > n.index {
					t.Fatalf("seed %d, plan %d by its index: %v\n%s\nwant\n%s", seed, i, err, v.Text, n.text)
				}
			}
		}
		for range 20 {
			a := s.rng.IntN(len(all))
			b := a + s.rng.IntN(len(all)-a)
			from, err1 := l.AtTime(all[a].at)
			to, err2 := l.AtTime(all[b].at)
			steps, err3 := l.Steps(from, to)
			if err := errors.Join(err1, err2, err3); err != nil {
				t.Fatal(err)
			}
			text := from.Text
			for _, x := range steps {
				if x.Text == text || len(x.Removed)+len(x.Added) == 0 {
					t.Fatalf("a step that changes nothing: %+v", x)
				}
				count := func(in string, l string) int { return strings.Count("\n"+in, "\n"+strings.TrimSuffix(l, "\n")+"\n") }
				if len(x.Removed) == 1 && len(x.Added) == 0 && count(text+"\n", x.Removed[0]) == count(x.Text+"\n", x.Removed[0]) {
					t.Fatalf("%q is said to have gone from\n%s\nto\n%s", x.Removed[0], text, x.Text)
				}
				text = x.Text
			}
			if text != to.Text {
				t.Fatalf("steps from %d to %d end with\n%s\nwant\n%s", a, b, text, to.Text)
			}
		}
		if _, err := l.AtTime(began.Add(-time.Second)); !errors.Is(err, ErrNotKept) ||
			!strings.Contains(err.Error(), "event 5") {
			t.Errorf("before the first plan: %v", err)
		}
		if _, err := l.AtIndex(4); !errors.Is(err, ErrNotKept) {
			t.Errorf("before the first index: %v", err)
		}
	}
}

// TestPlansAreBounded: the oldest go, and what is kept can be read.
func TestPlansAreBounded(t *testing.T) {
	const bound = 64 << 10
	j, err := journal.Open(filepath.Join(t.TempDir(), "plans.db"), MaxPlans, journal.MaxBytes(bound))
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	l := New(j)
	s := &storm{rng: rand.New(rand.NewPCG(1, 1))}
	began := time.Unix(1_800_000_000, 0)
	texts := map[int]string{}
	for i := range 3000 {
		texts[i] = s.next()
		l.append(began.Add(time.Duration(i)*time.Second), uint64(i), texts[i])
		if i%100 == 0 {
			if err := j.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := j.Flush(); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for i, text := range texts {
		v, err := l.AtTime(began.Add(time.Duration(i) * time.Second))
		switch {
		case errors.Is(err, ErrNotKept):
		case err != nil:
			t.Fatal(err)
		case v.Text != text:
			t.Fatalf("plan %d: %q, want %q", i, v.Text, text)
		default:
			kept++
		}
	}
	if size := j.Size(); size > bound || size < bound/2 {
		t.Errorf("%d bytes are kept, of at most %d", size, bound)
	}
	if kept < 300 || kept == len(texts) {
		t.Errorf("%d of %d plans are kept", kept, len(texts))
	}
}

// TestLostPlans: where the disk has lost plans, no text is made up.
func TestLostPlans(t *testing.T) {
	j := journal.Memory(16)
	l := New(j)
	began := time.Unix(1_800_000_000, 0)
	for i := range 40 {
		l.append(began.Add(time.Duration(i)*time.Second), uint64(i), fmt.Sprintf("a\nb %d\nc\n", i))
	}
	for i := range 40 {
		v, err := l.AtTime(began.Add(time.Duration(i) * time.Second))
		if err == nil && v.Text != fmt.Sprintf("a\nb %d\nc\n", i) {
			t.Fatalf("plan %d: %q", i, v.Text)
		}
		if err != nil && !errors.Is(err, ErrNotKept) {
			t.Fatal(err)
		}
	}
}

// BenchmarkStorm is a plan of 200 peers of which one moves: time and bytes of a plan.
func BenchmarkStorm(b *testing.B) {
	j, err := journal.Open(filepath.Join(b.TempDir(), "plans.db"), MaxPlans, journal.MaxBytes(MaxBytes))
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	l := New(j)
	lines := make([]string, 200)
	for i := range lines {
		lines[i] = fmt.Sprintf("peer node-%d endpoint 192.0.2.%d:51820 keepalive 25s allowed 10.64.0.%d/32 fd00::%d/128 "+
			"10.100.%d.0/24\n",
			i, i, i, i, i)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	at := time.Now()
	n := 0
	for b.Loop() {
		n++
		i := rng.IntN(len(lines))
		lines[i] = fmt.Sprintf("peer node-%d endpoint 192.0.2.%d:%d keepalive 25s allowed 10.64.0.%d/32 fd00::%d/128 "+
			"10.100.%d.0/24\n",
			i, i, n, i, i, i)
		l.append(at.Add(time.Duration(n)), uint64(n), strings.Join(lines, ""))
	}
	if err := j.Flush(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(j.Size())/float64(min(n, MaxPlans)), "bytes/plan")
}

// BenchmarkOldest reads the oldest plan of a file that is full.
func BenchmarkOldest(b *testing.B) {
	j, err := journal.Open(filepath.Join(b.TempDir(), "plans.db"), MaxPlans, journal.MaxBytes(MaxBytes))
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	l := New(j)
	began := time.Unix(1_800_000_000, 0)
	lines := make([]string, 200)
	for n := range MaxPlans {
		lines[n%len(lines)] = fmt.Sprintf("peer node-%d endpoint 192.0.2.1:%d keepalive 25s allowed 10.64.0.1/32\n",
			n%len(lines), n)
		l.append(began.Add(time.Duration(n)*time.Second), uint64(n), strings.Join(lines, ""))
		if n%1000 == 0 {
			if err := j.Flush(); err != nil {
				b.Fatal(err)
			}
		}
	}
	if err := j.Flush(); err != nil {
		b.Fatal(err)
	}
	oldest := began
	for _, err := l.AtTime(oldest); err != nil; _, err = l.AtTime(oldest) {
		if oldest = oldest.Add(time.Hour); oldest.After(began.Add(MaxPlans * time.Second)) {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if _, err := l.AtTime(oldest); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(j.Size())/(1<<20), "MiB")
}
