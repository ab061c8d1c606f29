package planlog

import (
	"bytes"
	"compress/flate"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/journal"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const (
	// MaxBytes is what the kept plans take on disk at most. The file itself is up to twice as large.
	MaxBytes = 16 << 20
	// MaxPlans is how many plans are kept at most.
	MaxPlans = 100_000
	// wholeEvery is how many plans follow a whole text at most, so that few have to be read to know one.
	wholeEvery = 200
	maxText    = 64 << 20 // of a whole text, inflated
)

// ErrNotKept is wrapped where a plan is asked for that is no longer kept, or was never made.
var ErrNotKept = errors.New("no plan of then is kept")

var errNone = fmt.Errorf("%w: this agent has made none yet", ErrNotKept)

// Version is a plan: it held from Time on until the next one.
type Version struct {
	Time  time.Time
	Index uint64 // of the agreed state that it follows from
	Text  string
	seq   uint64
}

// Step is how a plan differs from the one before.
type Step struct {
	Version
	Before         Version // without its text
	Removed, Added []string
}

// Log is the plans of one agent, oldest first.
type Log struct {
	j *journal.Journal

	mu     sync.Mutex
	newest Version
	lines  []string // of the newest
	whole  int      // bytes of the newest whole text on disk
	since  int      // bytes of the changes that follow it
	plans  int      // that follow it
}

// New goes on with the plans of a journal, which has nothing else. A journal whose newest plan cannot be read is begun
// anew.
func New(j *journal.Journal) *Log {
	l := &Log{j: j, plans: wholeEvery}
	if v, err := l.find(func(*skeinv1.JournalEntry) bool { return true }); err == nil {
		l.newest, l.lines = v, splitLines(v.Text)
	}
	return l
}

// Append notes the plan that holds from now on. One that is the same as the one before is not kept once more.
func (l *Log) Append(index uint64, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.append(time.Now(), index, text)
}

func (l *Log) append(at time.Time, index uint64, text string) {
	if text == l.newest.Text {
		return
	}
	lines := splitLines(text)
	p := &skeinv1.Planned{Index: index, Changes: changes(l.lines, lines)}
	size := proto.Size(p)
	if l.plans++; l.plans >= wholeEvery || l.since+size > l.whole {
		if whole := deflate(text); l.plans >= wholeEvery || len(whole) < l.since+size {
			p.Whole, p.Changes = whole, nil
			l.whole, l.since, l.plans = len(whole), 0, 0
		}
	}
	if p.Whole == nil {
		l.since += size
	}
	e := &skeinv1.JournalEntry{Time: at.UnixNano(), Body: &skeinv1.JournalEntry_Planned{Planned: p}}
	l.j.Append(e)
	l.newest, l.lines = Version{Time: at, Index: index, Text: text, seq: e.GetSeq()}, lines
}

// Newest is the newest plan.
func (l *Log) Newest() (Version, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.newest.seq == 0 {
		return Version{}, errNone
	}
	return l.newest, nil
}

// AtTime is the plan that held at a time.
func (l *Log) AtTime(t time.Time) (Version, error) {
	return l.find(func(e *skeinv1.JournalEntry) bool { return e.GetTime() <= t.UnixNano() })
}

// AtIndex is the last plan that followed from the agreed state of an index, or else the last one of an earlier index.
func (l *Log) AtIndex(index uint64) (Version, error) {
	return l.find(func(e *skeinv1.JournalEntry) bool { return e.GetPlanned().GetIndex() <= index })
}

// Steps are the plans that came after one and up to another, each with what it changed.
func (l *Log) Steps(from, to Version) ([]Step, error) {
	var entries []*skeinv1.JournalEntry
	err := l.j.Back(func(e *skeinv1.JournalEntry) bool {
		if e.GetSeq() > from.seq && e.GetSeq() <= to.seq {
			entries = append(entries, e)
		}
		return e.GetSeq() > from.seq
	})
	if err != nil {
		return nil, err
	}
	var out []Step
	before, lines := from, splitLines(from.Text)
	for _, e := range slices.Backward(entries) {
		next, err := follow(lines, before.seq, e)
		if err != nil {
			return nil, err
		}
		v := version(e, next)
		s := Step{Version: v, Before: before}
		s.Before.Text = ""
		for at, c := 0, changes(lines, next); len(c) > 0; c = c[1:] {
			at += int(c[0].GetKeep())
			s.Removed = append(s.Removed, lines[at:at+int(c[0].GetDrop())]...)
			s.Added = append(s.Added, c[0].GetAdd()...)
			at += int(c[0].GetDrop())
		}
		out = append(out, s)
		before, lines = v, next
	}
	return out, nil
}

// find reads back to the newest plan that suits, and from there to the whole text that it goes on from.
func (l *Log) find(suits func(*skeinv1.JournalEntry) bool) (Version, error) {
	var chain []*skeinv1.JournalEntry // newest first
	var oldest *skeinv1.JournalEntry
	complete := false
	err := l.j.Back(func(e *skeinv1.JournalEntry) bool {
		oldest = e
		if len(chain) > 0 || suits(e) {
			chain = append(chain, e)
			complete = len(e.GetPlanned().GetWhole()) > 0
		}
		return !complete
	})
	switch {
	case err != nil:
		return Version{}, err
	case oldest == nil:
		return Version{}, errNone
	case !complete:
		return Version{}, fmt.Errorf("%w: the oldest is of %s and event %d", ErrNotKept,
			time.Unix(0, oldest.GetTime()).Format(time.RFC3339), oldest.GetPlanned().GetIndex())
	}
	var lines []string
	seq := uint64(0)
	for _, e := range slices.Backward(chain) {
		if lines, err = follow(lines, seq, e); err != nil {
			return Version{}, err
		}
		seq = e.GetSeq()
	}
	return version(chain[0], lines), nil
}

func version(e *skeinv1.JournalEntry, lines []string) Version {
	return Version{
		Time: time.Unix(0, e.GetTime()), Index: e.GetPlanned().GetIndex(), Text: strings.Join(lines, ""), seq: e.GetSeq(),
	}
}

// follow is the text that a plan makes of the one with the given number, which has to be the one before: a disk that
// did not keep up may have cost some.
func follow(before []string, seq uint64, e *skeinv1.JournalEntry) ([]string, error) {
	p := e.GetPlanned()
	if len(p.GetWhole()) > 0 {
		text, err := inflate(p.GetWhole())
		if err != nil {
			return nil, fmt.Errorf("plan %d: %w", e.GetSeq(), err)
		}
		return splitLines(text), nil
	}
	if e.GetSeq() != seq+1 {
		return nil, fmt.Errorf("%w: the disk has lost some before the one of %s", ErrNotKept,
			time.Unix(0, e.GetTime()).Format(time.RFC3339))
	}
	var out []string
	at := 0
	for _, c := range p.GetChanges() {
		end := at + int(c.GetKeep())
		if end+int(c.GetDrop()) > len(before) {
			return nil, fmt.Errorf("plan %d does not go on from the one before it, which has %d lines", e.GetSeq(), len(before))
		}
		out = append(append(out, before[at:end]...), c.GetAdd()...)
		at = end + int(c.GetDrop())
	}
	return append(out, before[at:]...), nil
}

// changes make one text of another. Lines that both have in the same order stay, most of them: a text whose lines were
// put in another order may be written with more changes than it needs.
func changes(before, after []string) (out []*skeinv1.LineChange) {
	same := 0
	for same < min(len(before), len(after)) && before[same] == after[same] {
		same++
	}
	end := 0
	for end < min(len(before), len(after))-same && before[len(before)-1-end] == after[len(after)-1-end] {
		end++
	}
	before, after = before[:len(before)-end], after[:len(after)-end]
	at := map[string]int{} // where a line is, the first of those that are equal
	for i := len(before) - 1; i >= same; i-- {
		at[before[i]] = i
	}
	done := 0 // lines of before that the changes so far speak of
	next := same
	var add []string
	change := func(upTo int) { // what was there from next to upTo goes, and add comes
		if upTo > next || len(add) > 0 {
			out = append(out, &skeinv1.LineChange{Keep: uint32(next - done), Drop: uint32(upTo - next), Add: add})
			done, add = upTo, nil
		}
	}
	for _, line := range after[same:] {
		i, stays := at[line]
		if !stays || i < next {
			add = append(add, line)
			continue
		}
		change(i)
		next = i + 1
	}
	change(len(before))
	return out
}

// splitLines are a text's lines, each with its end.
func splitLines(text string) []string { return slices.Collect(strings.Lines(text)) }

func deflate(text string) []byte {
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err != nil {
		panic(err) // the level is valid
	}
	_, _ = io.WriteString(w, text) // a buffer takes everything
	_ = w.Close()
	return b.Bytes()
}

func inflate(b []byte) (string, error) {
	text, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(b)), maxText+1))
	if err != nil {
		return "", fmt.Errorf("inflate its text: %w", err)
	}
	if len(text) > maxText {
		return "", fmt.Errorf("its text has more than %d MiB", maxText>>20)
	}
	return string(text), nil
}
