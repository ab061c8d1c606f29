package consensus

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/simtime"
)

var quiet = slog.New(slog.DiscardHandler)

// history makes batches of a cluster's first commands without Raft.
type history struct {
	t     testing.TB
	state *events.State
	n     int
}

func newHistory(t testing.TB) (*history, *skeinv1.Batch) {
	h := &history{t: t, state: events.NewState()}
	c := &cluster{t: t}
	n := c.add("first", true)
	return h, h.batch(
		&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{ClusterId: testCluster,
			FirstNode: n.newNode()}}})
}

func (h *history) batch(commands ...*skeinv1.Command) *skeinv1.Batch {
	h.t.Helper()
	b := &skeinv1.Batch{Base: h.state.Index()}
	for _, c := range commands {
		c.RequestId = fmt.Sprintf("request-%d", h.n)
		h.n++
		c.Time, c.Entropy = max(h.state.Time(), time.Unix(1_000_000+int64(h.n), 0).UnixNano()), entropy()
		evs, _, err := events.Decide(h.state, c)
		if err != nil {
			h.t.Fatal(err)
		}
		for _, e := range evs {
			if err := h.state.Fold(e); err != nil {
				h.t.Fatal(err)
			}
		}
		b.Events = append(b.Events, evs...)
	}
	return b
}

// tokens is a batch of some commands.
func (h *history) tokens(n int) *skeinv1.Batch {
	var commands []*skeinv1.Command
	for range n {
		commands = append(commands, token(h.n+len(commands)))
	}
	return h.batch(commands...)
}

// labels is a batch of commands that can be repeated for ever.
func (h *history) labels(n int) *skeinv1.Batch {
	var commands []*skeinv1.Command
	for range n {
		commands = append(commands, label(h.state.Nodes()[0].Id, h.n+len(commands)))
	}
	return h.batch(commands...)
}

func label(node string, i int) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId: node, Labels: map[string]string{"n": strconv.Itoa(i)}, SetLabels: true}}}
}

func openReplica(t testing.TB, dir string) *Replica {
	t.Helper()
	r, err := OpenReplica(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestReplicaKnowsEveryIndexAfterReopening(t *testing.T) {
	for _, lazy := range []bool{false, true} {
		t.Run(fmt.Sprintf("lazy=%t", lazy), func(t *testing.T) {
			dir := t.TempDir()
			r := openReplica(t, dir)
			if lazy {
				must(t, r.makeLazy())
			}
			h, b := newHistory(t)
			must(t, r.Apply(b))
			hashes := map[uint64][32]byte{r.State().Index(): r.State().Hash()}
			for i := range 40 {
				must(t, r.Apply(h.tokens(1+i%5)))
				hashes[r.State().Index()] = r.State().Hash()
			}
			check := func() {
				t.Helper()
				for index, want := range hashes {
					s, err := r.At(index)
					if err != nil || s.Hash() != want {
						t.Errorf("state at %d: %v, right hash: %t", index, err, err == nil && s.Hash() == want)
					}
				}
				evs, first, last, err := r.Events(0, 1<<20)
				if err != nil || first != 1 || last != h.state.Index() || uint64(len(evs)) != last {
					t.Fatalf("%d events of %d..%d, %v", len(evs), first, last, err)
				}
				for i, e := range evs {
					if e.Index != uint64(i+1) {
						t.Fatalf("event %d stands at place %d", e.Index, i+1)
					}
				}
			}
			check()
			must(t, r.Close())
			r = openReplica(t, dir)
			if r.State().Hash() != h.state.Hash() {
				t.Fatal("another state after reopening")
			}
			check()
		})
	}
}

func TestReplicaRefusesWhatDoesNotFollow(t *testing.T) {
	r := openReplica(t, t.TempDir())
	h, first := newHistory(t)
	must(t, r.Apply(first))
	second, third := h.tokens(2), h.tokens(1)
	before := r.State()
	gap := proto.CloneOf(second)
	gap.Events[1].Index++
	for name, b := range map[string]*skeinv1.Batch{"older": first, "newer": third, "gap": gap,
		"empty": {Base: before.Index()}} {
		if err := r.Apply(b); err == nil {
			t.Errorf("%s batch was applied", name)
		}
	}
	for name, b := range map[string]*skeinv1.Batch{"older": first, "newer": third} {
		if err := r.Apply(b); !errors.Is(err, ErrBase) {
			t.Errorf("%s batch: want ErrBase, have %v", name, err)
		}
	}
	if r.State() != before {
		t.Fatal("a refused batch changed the state")
	}
	must(t, r.Apply(second))
}

// A subscription cuts the log at other places than Raft does: of a batch whose beginning is known the rest is folded.
func TestCatchUpTakesTheRestOfABatch(t *testing.T) {
	r := openReplica(t, t.TempDir())
	h, first := newHistory(t)
	must(t, r.Apply(first))
	b := h.tokens(3)
	must(t, r.Apply(&skeinv1.Batch{Base: b.Base, Events: b.Events[:2]}))
	later := h.tokens(1)
	if err := r.catchUp(later); !errors.Is(err, ErrBase) {
		t.Errorf("over a gap: %v, want ErrBase", err)
	}
	for range 2 { // the second time all of it is known
		must(t, r.catchUp(b))
		must(t, r.catchUp(first))
	}
	must(t, r.catchUp(later))
	if r.State().Hash() != h.state.Hash() {
		t.Fatalf("it is at %d, want %d", r.State().Index(), h.state.Index())
	}
}

func TestAppliedIndexNeverGoesBack(t *testing.T) {
	r := openReplica(t, t.TempDir())
	h, b := newHistory(t)
	must(t, r.Apply(b))
	old := r.State().Proto()
	must(t, r.Apply(h.tokens(1)))
	for _, s := range []*skeinv1.State{old, r.State().Proto(), {}} {
		if err := r.Reset(s); err == nil {
			t.Errorf("a replica at %d was reset to %d", r.State().Index(), s.Index)
		}
	}
	h.tokens(3)
	must(t, r.Reset(h.state.Proto()))
	if evs, first, last, err := r.Events(0, 10); err != nil || len(evs) != 0 || first != last+1 {
		t.Fatalf("after a reset: %d events, first %d, last %d, %v", len(evs), first, last, err)
	}
	must(t, r.Apply(h.tokens(1)))
	if _, err := r.At(3); !errors.Is(err, ErrGone) {
		t.Fatalf("index before the reset: %v, want ErrGone", err)
	}
}

func TestArchiveKeepsItsLimits(t *testing.T) {
	if testing.Short() {
		t.Skip("much folding by one goroutine: run without -short")
	}
	limits := map[string]*skeinv1.Settings{
		"events": {ArchiveMaxEvents: 1000},
		"bytes":  {ArchiveMaxBytes: 1 << 20},
		"age":    {ArchiveMaxAgeSeconds: 3600, ArchiveMaxEvents: 4000},
	}
	for name, settings := range limits {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			r := openReplica(t, dir)
			h, b := newHistory(t)
			must(t, r.Apply(b))
			must(t, r.Apply(
				h.batch(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
					Settings: settings, Fields: []string{"archive_max_events", "archive_max_bytes", "archive_max_age_seconds"}}}})))
			for range 160 {
				must(t, r.Apply(h.labels(50)))
			}
			check := func() {
				t.Helper()
				_, first, last, err := r.Events(0, 1)
				if err != nil || first == 1 {
					t.Fatalf("the archive is %d..%d, %v", first, last, err)
				}
				if n := last - first + 1; settings.ArchiveMaxEvents > 0 && n > settings.ArchiveMaxEvents || n < 500 {
					t.Errorf("%d events are kept", n)
				}
				if settings.ArchiveMaxBytes > 0 && r.store.bytes > settings.ArchiveMaxBytes {
					t.Errorf("%d bytes are kept", r.store.bytes)
				}
				for index := first - 1; index <= last; index += 37 {
					if s, err := r.At(index); err != nil || s.Index() != index {
						t.Fatalf("state at %d of %d..%d: %v", index, first, last, err)
					}
				}
				if _, err := r.At(1); !errors.Is(err, ErrGone) {
					t.Errorf("state at 1: %v, want ErrGone", err)
				}
			}
			check()
			bytes, checkpoints := r.store.bytes, fmt.Sprint(r.store.checkpoints)
			must(t, r.Close())
			r = openReplica(t, dir)
			check()
			if r.store.bytes != bytes || fmt.Sprint(r.store.checkpoints) != checkpoints {
				t.Errorf("after reopening %d bytes and checkpoints %v, before %d and %v", r.store.bytes, r.store.checkpoints,
					bytes, checkpoints)
			}
		})
	}
}

// A server's replica that is killed comes back where everybody has seen it; when the power fails instead, with
// a prefix, and it folds what it lacks.
func TestLazyReplicaComesBack(t *testing.T) {
	for name, spoil := range map[string]func(path string, size int64) error{
		"killed":                nil,
		"half a frame":          func(path string, size int64) error { return os.Truncate(path, size-3) },
		"a flipped bit":         flipBit,
		"nothing left":          func(path string, _ int64) error { return os.Truncate(path, 0) },
		"the file is not there": func(path string, _ int64) error { return os.Remove(path) },
	} {
		t.Run(name, func(t *testing.T) {
			simtime.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				r := openReplica(t, dir)
				must(t, r.makeLazy())
				h, b := newHistory(t)
				must(t, r.Apply(b))
				written := r.State().Index()
				time.Sleep(2 * lazyDelay) // virtual: the first batch is written
				var late []*skeinv1.Batch
				for range 3 {
					late = append(late, h.tokens(2))
					must(t, r.Apply(late[len(late)-1]))
				}
				r.timer.Stop()
				r.store.db.Close() // as if killed
				want := h.state.Index()
				if spoil != nil {
					must(t, spoil(spillPath(r.path, r.spill.use), r.spill.bytes[r.spill.use]))
				}
				again := openReplica(t, dir)
				got := again.State().Index()
				if spoil == nil && got != want || got < written || got > want {
					t.Fatalf("came back at %d, want %d", got, want)
				}
				for _, b := range late {
					must(t, again.catchUp(b))
				}
				if again.State().Hash() != h.state.Hash() {
					t.Fatal("another state after catching up")
				}
				must(t, again.Close())
			})
		})
	}
}

func flipBit(path string, size int64) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	b[size/2] ^= 1
	return os.WriteFile(path, b, 0o600)
}

// What is in the archive needs no second place: the spill does not grow with the life of a server.
func TestSpillIsEmptiedByEachWrite(t *testing.T) {
	r := openReplica(t, t.TempDir())
	must(t, r.makeLazy())
	h, b := newHistory(t)
	must(t, r.Apply(b))
	for range 10 {
		must(t, r.Apply(h.tokens(5)))
		must(t, r.Sync())
		if r.spill.bytes != [2]int64{} {
			t.Fatalf("%d bytes are spilled after a write", r.spill.bytes)
		}
	}
	must(t, r.Close())
}

// sealed is a batch as Raft's log holds it.
func sealed(t testing.TB, b *skeinv1.Batch) []byte {
	t.Helper()
	data, err := EncodeBatch(b)
	must(t, err)
	return data
}

// While one file's events are put into the archive, the other takes what comes, and must keep it.
func TestSpillKeepsWhatComesDuringAWrite(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	must(t, r.makeLazy())
	h, b := newHistory(t)
	must(t, r.Apply(b))
	writing, err := r.store.db.Begin(true) // holds the flush up
	must(t, err)
	flushed := make(chan error, 1)
	go func() { flushed <- r.Sync() }()
	eventually(t, "the flush has begun", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.later) > 0 {
			return errors.New("not yet")
		}
		return nil
	})
	must(t, r.Apply(h.tokens(2)))
	must(t, writing.Rollback())
	must(t, <-flushed)
	kill(r)
	if got := openReplica(t, dir).State(); got.Hash() != h.state.Hash() {
		t.Fatalf("killed after the write it came back at %d, want %d", got.Index(), h.state.Index())
	}
}

// What was applied before a reset is part of the new state. Written after it, it would tear the archive.
func TestResetForgetsWhatIsUnwritten(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	must(t, r.makeLazy())
	h, b := newHistory(t)
	must(t, r.Apply(b))
	must(t, r.Apply(h.tokens(2)))
	h.tokens(3)
	must(t, r.Reset(h.state.Proto()))
	must(t, r.Apply(h.tokens(1)))
	must(t, r.Close())
	r = openReplica(t, dir)
	if evs, first, last, err := r.Events(0, 100); err != nil || len(evs) != 2 || last != h.state.Index() ||
		first != last-1 || r.State().Hash() != h.state.Hash() {
		t.Errorf("after a reset and an event: %d events of %d..%d, %v", len(evs), first, last, err)
	}
}

func FuzzReadSpill(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 0})
	_, b := newHistory(f)
	data := sealed(f, b)
	frame := append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...)
	f.Add(append(slices.Clone(frame), frame...))
	f.Add(frame[:len(frame)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, batch := range readSpill(bytes.NewReader(b)) {
			if err := checkBatch(batch); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestLazyReplicaThatCannotWriteGoesOnInMemoryForAWhile(t *testing.T) {
	r := openReplica(t, t.TempDir())
	must(t, r.makeLazy())
	h, b := newHistory(t)
	must(t, r.Apply(b))
	r.store.db.Close() // every write fails from here on
	for r.unwritten() < lazyMost {
		must(t, r.Apply(h.labels(500)))
	}
	if err := r.Apply(h.labels(1)); err == nil || !strings.Contains(err.Error(), replicaFile) {
		t.Fatalf("with %d unwritten events: %v, want an error that names the file", r.unwritten(), err)
	}
}

func TestWaitReturnsWithTheNextEvent(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		r := openReplica(t, t.TempDir())
		h, b := newHistory(t)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := r.Wait(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("an empty replica: %v", err)
		}
		must(t, r.Apply(b))
		must(t, r.Wait(context.Background(), 0))
		done := make(chan error, 1)
		go func() { done <- r.Wait(context.Background(), r.State().Index()) }()
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("returned early: %v", err)
		default:
		}
		must(t, r.Apply(h.tokens(1)))
		must(t, <-done)
		go func() { done <- r.Wait(context.Background(), r.State().Index()) }()
		synctest.Wait()
		must(t, r.Close())
		if err := <-done; !errors.Is(err, ErrClosed) {
			t.Fatalf("after Close: %v", err)
		}
	})
}

func TestForeignClusterIsRefused(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	_, b := newHistory(t)
	must(t, r.Apply(b))
	foreign := r.State().Proto()
	foreign = proto.CloneOf(foreign)
	foreign.Cluster.Id, foreign.Index = strings.Repeat("f", 32), foreign.Index+5
	if err := r.Reset(foreign); !errors.Is(err, ErrForeignCluster) {
		t.Errorf("reset to another cluster's state: %v", err)
	}
	must(t, r.Close())
}

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	openReplica(t, dir)
	if _, err := OpenReplica(dir, quiet); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "second agent") {
		t.Fatalf("opened twice: %v", err)
	}
}

// Every byte of damage is either harmless or reported with the file's name and the way out, and the
// file is left as it was.
func TestDamagedReplicaIsReportedAndLeftAlone(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	h, b := newHistory(t)
	must(t, r.Apply(b))
	for range 60 {
		must(t, r.Apply(h.tokens(3)))
	}
	hash := r.State().Hash()
	must(t, r.Close())
	good, err := os.ReadFile(filepath.Join(dir, replicaFile))
	must(t, err)
	reported := 0
	for name, bad := range damages(good) {
		dir := t.TempDir()
		path := filepath.Join(dir, replicaFile)
		must(t, os.WriteFile(path, bad, 0o600))
		r, err := OpenReplica(dir, quiet)
		switch {
		case err == nil:
			if r.State().Hash() != hash && r.State().Index() >= h.state.Index() {
				t.Errorf("%s: a wrong state was taken", name)
			}
			must(t, r.Close())
			continue
		case !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), "recovery.md"):
			t.Errorf("%s: the error does not say what to do: %v", name, err)
		}
		reported++
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, bad) {
			t.Errorf("%s: the damaged file was changed", name)
		}
	}
	if reported < 20 {
		t.Fatalf("only %d damages were noticed", reported)
	}
}

// damages are copies of a file with flipped, zeroed and missing parts.
func damages(good []byte) map[string][]byte {
	out := map[string][]byte{"text": []byte(strings.Repeat("not a database\n", 1000))}
	step := max(len(good)/60, 1)
	for at := 0; at < len(good); at += step {
		flipped, zeroed := bytes.Clone(good), bytes.Clone(good)
		for i := at; i < min(at+8, len(good)); i++ {
			flipped[i] ^= 0x55
		}
		page := at / 4096 * 4096
		clear(zeroed[page:min(page+4096, len(good))])
		out[fmt.Sprintf("flip at %d", at)] = flipped
		out[fmt.Sprintf("zeroed page %d", page/4096)] = zeroed
		if at > 0 {
			out[fmt.Sprintf("cut at %d", at)] = good[:at]
		}
	}
	return out
}
