package journal

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func entry(n int) *skeinv1.JournalEntry {
	return &skeinv1.JournalEntry{Time: int64(n) * int64(time.Second), Body: &skeinv1.JournalEntry_PathDecision{
		PathDecision: &skeinv1.PathDecision{Peer: "0100000000000000", To: fmt.Sprint("relay:", n)},
	}}
}

func read(t *testing.T, j *Journal) []*skeinv1.JournalEntry {
	t.Helper()
	es, err := j.Read(time.Time{}, time.Time{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return es
}

func TestEntriesSurviveAndAreBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j, err := Open(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 250 {
		j.Append(entry(i + 1))
	}
	if got := len(read(t, j)); got < 100 {
		t.Errorf("before the disk: %d entries", got)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = Open(path, 100); err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	j.Append(entry(251))
	es := read(t, j)
	if first, last := es[0].GetSeq(), es[len(es)-1].GetSeq(); len(es) > 101 || last != 251 ||
		first != last-uint64(len(es))+1 {
		t.Errorf("%d entries from %d to %d, want the newest 100 without a gap", len(es), first, last)
	}
	es, err = j.Read(time.Unix(240, 0), time.Unix(242, 0), func(e *skeinv1.JournalEntry) bool { return e.GetSeq() != 241 })
	if err != nil || len(es) != 2 || es[0].GetPathDecision().GetTo() != "relay:240" {
		t.Errorf("a span: %v, %v", es, err)
	}
}

// Written a few at a time, the file holds the newest and each of them once.
func TestDiskKeepsTheNewest(t *testing.T) {
	j, err := Open(filepath.Join(t.TempDir(), "journal.db"), 100)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	for round := range 6 {
		for range 30 {
			j.Append(entry(1))
		}
		if err := j.Flush(); err != nil {
			t.Fatal(err)
		}
		es, appended := read(t, j), 30*(round+1)
		if want := min(100, appended); len(es) != want {
			t.Fatalf("%d of %d entries are kept, want %d", len(es), appended, want)
		}
		for i, e := range es {
			if want := uint64(appended - len(es) + i + 1); e.GetSeq() != want {
				t.Fatalf("entry %d stands where %d should", e.GetSeq(), want)
			}
		}
	}
}

func TestMemory(t *testing.T) {
	j := Memory(20)
	for i := range 50 {
		j.Append(entry(i + 1))
	}
	if es := read(t, j); len(es) != 20 || es[0].GetSeq() != 31 {
		t.Errorf("%d entries, first %d", len(es), es[0].GetSeq())
	}
	if err := j.Close(); err != nil {
		t.Error(err)
	}
}

// Every kind of damage is an error that names the file and the way on, and nothing is deleted.
func TestDamagedFile(t *testing.T) {
	dir := t.TempDir()
	good := filepath.Join(dir, "good.db")
	j, err := Open(good, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		j.Append(entry(i + 1))
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	for name, damage := range map[string]func([]byte) []byte{
		"garbage":   func([]byte) []byte { return []byte(strings.Repeat("no journal ", 4096)) },
		"truncated": func(b []byte) []byte { return b[:len(b)/3] },
		"short":     func(b []byte) []byte { return b[:100] },
		"zeroed":    func(b []byte) []byte { clear(b); return b },
		"pages":     func(b []byte) []byte { clear(b[8192:]); return b },
		"noise": func(b []byte) []byte {
			for i := 8192; i < len(b); i += 3 {
				b[i] ^= 0x5a
			}
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, name+".db")
			bad := damage(append([]byte(nil), whole...))
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			j, err := Open(path, 1000)
			if err == nil {
				defer j.Close()
				if _, err = j.Read(time.Time{}, time.Time{}, nil); err == nil || !strings.Contains(err.Error(), path) {
					t.Fatalf("it opens, and reading it says: %v", err)
				}
				return
			}
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "mv ") {
				t.Errorf("error %q", err)
			}
			if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, bad) {
				t.Errorf("the file was changed: %d bytes of %d, %v", len(after), len(bad), err)
			}
		})
	}
}

func TestInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal.db")
	j, err := Open(path, 10)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if _, err := Open(path, 10); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path) {
		t.Errorf("second journal on one file: %v", err)
	}
}

// A disk that fails costs no caller anything; what it misses is counted and reported.
func TestFailingDisk(t *testing.T) {
	j, err := Open(filepath.Join(t.TempDir(), "journal.db"), 10000)
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if err := j.db.Close(); err != nil { // the file is gone from under it
		t.Fatal(err)
	}
	for i := range pendingMax + 5 {
		j.Append(entry(i + 1))
	}
	if err := j.Flush(); err == nil || !strings.Contains(err.Error(), j.path) {
		t.Errorf("flush: %v", err)
	}
	if dropped, err := j.Err(); err == nil || dropped != 5 {
		t.Errorf("dropped %d, %v", dropped, err)
	}
}

func BenchmarkAppend(b *testing.B) {
	j, err := Open(filepath.Join(b.TempDir(), "journal.db"), 10000)
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	for i := 0; b.Loop(); i++ {
		j.Append(entry(i + 1))
	}
}

// A disk that is slow, or a host without time, is not kept busy by the journal.
func TestSlowDiskIsWrittenToLessOften(t *testing.T) {
	for _, c := range []struct{ took, want time.Duration }{
		{0, flushEvery}, {time.Millisecond, flushEvery},
		{50 * time.Millisecond, 2 * time.Second}, {time.Second, flushMax},
	} {
		if got := flushWait(c.took); got != c.want {
			t.Errorf("after a write of %s entries are gathered for %s, want %s", c.took, got, c.want)
		}
	}
}
