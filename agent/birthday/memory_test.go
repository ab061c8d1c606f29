package birthday

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	random  = skeinv1.PairOutcome_BIRTHDAY
	predict = skeinv1.PairOutcome_PREDICTION
)

var (
	here  = netip.MustParseAddr("203.0.113.1")
	there = netip.MustParseAddr("198.51.100.1")
)

func TestAdvice(t *testing.T) {
	lose := func(rule skeinv1.PairOutcome_Rule, at ...time.Duration) func(*Memory) {
		return func(m *Memory) {
			for _, d := range at {
				m.Note(here, there, rule, false, t0.Add(d))
			}
		}
	}
	told := func(mine, theirs netip.Addr, won, lost int, at time.Duration) []Outcome {
		return []Outcome{{Mine: mine, Theirs: theirs, Rule: random, Won: won, Lost: lost, At: t0.Add(at)}}
	}
	for _, c := range []struct {
		name string
		do   func(*Memory)
		told []Outcome
		want Advice
	}{
		{"nothing is known", func(*Memory) {}, nil, Advice{}},
		{"one failure", lose(random, 0), nil, Advice{NotBefore: t0.Add(30 * time.Second)}},
		{"three", lose(random, 0, time.Minute, 3*time.Minute), nil, Advice{NotBefore: t0.Add(5 * time.Minute)}},
		{"very many", lose(random, make([]time.Duration, 300)...), nil, Advice{NotBefore: t0.Add(time.Hour)}},
		{"a hit ends it", func(m *Memory) {
			lose(random, 0)(m)
			m.Note(here, there, random, true, t0.Add(time.Second))
		}, nil, Advice{}},
		{"a failure of another way", lose(predict, 0), nil, Advice{}},
		{"predictions that fail", lose(predict, 0, time.Minute), nil, Advice{SkipPrediction: true}},
		{"a neighbour has failed", func(*Memory) {}, told(here, there, 0, 2, 0), Advice{NotBefore: t0.Add(time.Minute)}},
		{"the peer's neighbour has failed", func(*Memory) {}, told(there, here, 0, 1, 0),
			Advice{NotBefore: t0.Add(30 * time.Second)}},
		{"a neighbour has won since", lose(random, 0), told(here, there, 1, 0, time.Second), Advice{}},
		{"a neighbour won before", lose(random, time.Second), told(here, there, 1, 0, 0),
			Advice{NotBefore: t0.Add(31 * time.Second)}},
		{"somebody else's", func(*Memory) {}, told(netip.MustParseAddr("192.0.2.1"), there, 0, 9, 0), Advice{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := &Memory{}
			c.do(m)
			if got := m.Advise(here, there, random, c.told); got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

func TestMemoryOnDisk(t *testing.T) {
	dir := t.TempDir()
	m, err := OpenMemory(dir, t0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 * memoryMax {
		m.Note(here, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), random, i%2 == 0, t0)
	}
	if err := m.Save(m.Snapshot()); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, memoryFile))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("%v, mode %v", err, st.Mode())
	}
	again, err := OpenMemory(dir, t0)
	if err != nil || len(again.outcomes) != memoryMax {
		t.Fatalf("%d outcomes, %v; want the newest %d", len(again.outcomes), err, memoryMax)
	}
	if a, b := again.outcomes[memoryMax-1], m.outcomes[memoryMax-1]; !a.same(b) || a.Lost != b.Lost || !a.At.Equal(b.At) {
		t.Errorf("read %+v, want %+v", a, b)
	}
	m.Note(here, there, random, true, t0.Add(memoryFor+time.Second))
	if len(m.outcomes) != 1 {
		t.Errorf("%d outcomes, want what is older than a week gone", len(m.outcomes))
	}
}

// A damaged file costs only the outcomes in it.
func TestDamagedMemory(t *testing.T) {
	for _, text := range []string{"", "{", "[]x", `[{"Mine":"no"}]`,
		`[{"Mine":"203.0.113.1","Theirs":"198.51.100.1","Lost":-7}]`, "[" + strings.Repeat(" ", memoryBytes) + "]"} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, memoryFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := OpenMemory(dir, t0)
		if m == nil || len(m.outcomes) != 0 {
			t.Fatalf("%.20q: %+v, %v", text, m, err)
		}
		m.Note(here, there, random, true, t0)
		if err := m.Save(m.Snapshot()); err != nil {
			t.Fatal(err)
		}
		if again, err := OpenMemory(dir, t0); err != nil || len(again.outcomes) != 1 {
			t.Errorf("%.20q: after the next outcome %+v, %v", text, again, err)
		}
	}
}

func TestBriefIsShortAndReadBack(t *testing.T) {
	m := &Memory{}
	for i := range 20 {
		m.Note(here, netip.AddrFrom4([4]byte{198, 18, 0, byte(i)}), random, false, t0.Add(time.Duration(i)*time.Second))
	}
	m.Note(netip.MustParseAddr("192.0.2.7"), there, random, true, t0.Add(time.Minute)) // behind another address
	brief := m.Brief(here)
	if size := proto.Size(&skeinv1.Record{Outcomes: brief}); len(brief) != briefMax || size > 200 {
		t.Fatalf("%d outcomes in %d bytes", len(brief), size)
	}
	out := Told(here, brief, t0.Add(time.Minute))
	if len(out) != briefMax || out[0].Mine != here || out[0].Theirs != netip.MustParseAddr("198.18.0.19") ||
		out[0].Lost != 1 || !out[0].At.Equal(t0.Add(19*time.Second)) {
		t.Errorf("read back %+v", out)
	}
	bad := []*skeinv1.PairOutcome{{Address: []byte{1, 2}},
		{Address: []byte{1, 2, 3, 4}, At: t0.Add(-8 * 24 * time.Hour).Unix()}, {Address: []byte{1, 2, 3, 4}, Lost: 1 << 31,
			At: t0.Add(time.Hour).Unix()}}
	if out := Told(here, bad, t0); len(out) != 1 || out[0].Lost != countMax || out[0].At.After(t0) {
		t.Errorf("of what is malformed, old, or of the future, %+v is taken", out)
	}
}

// Outcomes from a time when the clock was ahead pause no pair for longer than usual.
func TestMemoryOfAClockThatWasAhead(t *testing.T) {
	dir := t.TempDir()
	m, err := OpenMemory(dir, t0)
	if err != nil {
		t.Fatal(err)
	}
	m.Note(here, there, random, false, t0.Add(time.Hour))
	if err := m.Save(m.Snapshot()); err != nil {
		t.Fatal(err)
	}
	if m, err = OpenMemory(dir, t0); err != nil {
		t.Fatal(err)
	}
	if until := m.Advise(here, there, random, nil).NotBefore; !until.Equal(t0.Add(pauseFirst)) {
		t.Errorf("the pair pauses for %s, want %s", until.Sub(t0), pauseFirst)
	}
}
