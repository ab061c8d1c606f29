package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

const (
	replicaFile = "replica.db"
	tailEvents  = 2048                   // newest events kept in memory for subscribers
	lazyDelay   = 200 * time.Millisecond // how long a server's replica may lag behind the Raft log on disk
	lazyEvents  = 4096                   // or by how many events
	lazyMost    = 1 << 16                // above so many unwritten events Apply waits for the disk, and fails if that does
)

// Replica is a node's durable copy of the agreed state with an archive of events. On an agent every
// Apply is on disk when it returns. A server's replica is written with a short delay, since its Raft
// log is on disk already and replays what is missing; until then a spill keeps it from kill -9.
type Replica struct {
	log  *slog.Logger
	path string
	most int // bytes of a state that may be written

	state atomic.Pointer[events.State]

	disk  sync.Mutex // one writer of the file at a time; taken before mu
	store *store

	mu    sync.Mutex // one writer of the state at a time
	lazy  bool
	timer *time.Timer // runs flush while there are unwritten events
	later []group     // unwritten
	spill *spill      // holds what is in later, for kill -9; nil: not lazy, or its files cannot be had

	tail tail
	past past
}

// tail is the newest events in memory; those above durable are not on disk yet.
type tail struct {
	sync.RWMutex
	evs     []*skeinv1.Event // contiguous, the last is the state's index
	durable uint64           // last event on disk
	first   uint64           // first event in the archive
	came    time.Time        // when the newest event was folded; zero: it was read from disk, or came in a snapshot
	changed chan struct{}    // closed when the state changes
	closed  bool
}

// OpenReplica opens the replica in a state directory, or starts an empty one. A damaged file is an
// ErrCorrupt that says how to recover; it is left as it is. Only one process may have it open.
func OpenReplica(dir string, log *slog.Logger) (*Replica, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	path := filepath.Join(dir, replicaFile)
	s, err := openStore(path)
	if err != nil {
		return nil, fmt.Errorf("open the replica: %w", err)
	}
	state, evs, err := s.load(tailEvents)
	if err != nil {
		s.db.Close()
		return nil, fmt.Errorf("open the replica: %w", err)
	}
	r := &Replica{log: log, path: path, most: s.most, store: s}
	r.tail.evs, r.tail.durable, r.tail.first, r.tail.changed = evs, s.last, s.first, make(chan struct{})
	r.state.Store(state)
	if err := r.restoreSpilled(); err != nil {
		s.db.Close()
		return nil, fmt.Errorf("open the replica: %w", err)
	}
	return r, nil
}

// restoreSpilled brings in what a killed process had shown and not yet written.
func (r *Replica) restoreSpilled() error {
	batches, err := spilled(r.path)
	if err != nil {
		return err
	}
	for _, b := range batches {
		if index := r.State().Index(); b.Base > index || last(b) <= index {
			continue
		}
		if err := r.catchUp(b); err != nil {
			r.log.Warn("the newest events cannot be restored from the spill file; they come back once Raft has a leader",
				"from", b.Base+1, "error", err)
			break
		}
	}
	return nil
}

// State is the newest state. It is shared: clone it to fold anything into it.
func (r *Replica) State() *events.State { return r.state.Load() }

// Apply folds a batch that was decided on exactly this replica's index, else it returns ErrBase. It
// applies all or nothing.
func (r *Replica) Apply(b *skeinv1.Batch) error {
	if err := checkBatch(b); err != nil {
		return err
	}
	unlock, err := r.write()
	if err != nil {
		return err
	}
	defer unlock()
	if index := r.State().Index(); b.Base != index {
		return fmt.Errorf("apply a batch: %w: batch %d, replica %d", ErrBase, b.Base, index)
	}
	return r.apply(b.Events)
}

// write takes the locks that applying needs: a lazy replica does not wait for the disk, unless too
// much is unwritten.
func (r *Replica) write() (unlock func(), err error) {
	r.mu.Lock()
	if r.lazy {
		if r.unwritten() < lazyMost {
			return r.mu.Unlock, nil
		}
		r.mu.Unlock()
		if err := r.Sync(); err != nil {
			return nil, err
		}
		r.mu.Lock()
		return r.mu.Unlock, nil
	}
	r.mu.Unlock()
	r.disk.Lock()
	r.mu.Lock()
	return func() { r.mu.Unlock(); r.disk.Unlock() }, nil
}

// catchUp folds the events of a batch that the replica does not have.
func (r *Replica) catchUp(b *skeinv1.Batch) error {
	unlock, err := r.write()
	if err != nil {
		return err
	}
	defer unlock()
	evs, err := r.missing(b)
	if err != nil || len(evs) == 0 {
		return err
	}
	return r.apply(evs)
}

// missing returns the events of a batch that the replica does not have. The caller writes them.
func (r *Replica) missing(b *skeinv1.Batch) ([]*skeinv1.Event, error) {
	index := r.State().Index()
	switch {
	case last(b) <= index:
		return nil, nil
	case b.Base > index:
		return nil, fmt.Errorf("catch up: %w: batch %d, replica %d", ErrBase, b.Base, index)
	}
	return b.Events[index-b.Base:], nil
}

// catchUpTo is catchUp for events from a node that need not be honest: they are kept if the state that they lead to has
// the hash, which a server has signed. Otherwise it returns errForged.
func (r *Replica) catchUpTo(b *skeinv1.Batch, hash [32]byte) error {
	unlock, err := r.write()
	if err != nil {
		return err
	}
	defer unlock()
	evs, err := r.missing(b)
	if err != nil || len(evs) == 0 {
		return err
	}
	if r.isClosed() {
		return fmt.Errorf("apply events: %s: %w", r.path, ErrClosed)
	}
	next, err := r.tryFold(evs)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %v", errForged, err) // the cause is not wrapped, since no server has agreed on these events
	case next.Hash() != hash:
		return fmt.Errorf("%w: the state at index %d would have another hash than a server has signed",
			errForged, next.Index())
	}
	return r.keep(evs, next)
}

// errForged means that events lead to another state than a server has signed.
var errForged = errors.New("events that were passed on are not what the servers have agreed on")

// tryFold is fold for events that may be forged: an event that no leader would append gives an error.
func (r *Replica) tryFold(evs []*skeinv1.Event) (next *events.State, err error) {
	defer func() {
		if p := recover(); p != nil {
			next, err = nil, fmt.Errorf("folding the events: %v", p)
		}
	}()
	return r.fold(evs)
}

func (r *Replica) apply(evs []*skeinv1.Event) error {
	if r.isClosed() {
		return fmt.Errorf("apply events: %s: %w", r.path, ErrClosed)
	}
	next, err := r.fold(evs)
	if err != nil {
		return err
	}
	return r.keep(evs, next)
}

// fold returns the state after events; the replica stays as it is.
func (r *Replica) fold(evs []*skeinv1.Event) (*events.State, error) {
	next := r.State().Clone()
	for _, e := range evs {
		if err := next.Fold(e); err != nil {
			return nil, fmt.Errorf("apply event %d: %w", e.Index, err)
		}
	}
	return next, r.sameCluster(next)
}

// keep makes events and the state after them this replica's.
func (r *Replica) keep(evs []*skeinv1.Event, next *events.State) error {
	if r.lazy {
		r.later = append(r.later, group{evs, next})
		if err := r.spill.add(&skeinv1.Batch{Base: evs[0].Index - 1, Events: evs}); err != nil && len(r.later) == 1 {
			r.log.Warn("the newest events cannot be spilled: a crash now would lose them until Raft has a leader",
				"error", err)
		}
	} else if err := r.store.append([]group{{evs, next}}); err != nil {
		return fmt.Errorf("store events: %w", err)
	}
	r.past.note(next.Index(), next.Hash()) // digests are computed once here and not by every reader
	r.publish(next, evs)
	if r.lazy {
		r.schedule()
	}
	return nil
}

// Reset replaces the replica by a newer state, as a snapshot from a server brings it. The archive
// starts anew after it. A state that is not newer is an error: the applied index never goes back.
func (r *Replica) Reset(s *skeinv1.State) error {
	next, err := events.FromProto(s)
	if err != nil {
		return fmt.Errorf("reset the replica: %w", err)
	}
	return r.reset(next)
}

func (r *Replica) reset(next *events.State) error {
	r.disk.Lock()
	defer r.disk.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed() {
		return fmt.Errorf("reset: %s: %w", r.path, ErrClosed)
	}
	if index := r.State().Index(); next.Index() <= index {
		return fmt.Errorf("reset the replica to index %d: it is at %d already and never goes back", next.Index(), index)
	}
	if err := r.sameCluster(next); err != nil {
		return err
	}
	if err := r.store.reset(next); err != nil {
		return fmt.Errorf("reset the replica: %w", err)
	}
	r.past.forget()
	r.past.note(next.Index(), next.Hash())
	r.later = nil
	r.publish(next, nil)
	return r.spill.drop(true)
}

func (r *Replica) sameCluster(next *events.State) error {
	have, got := r.State().Cluster().GetId(), next.Cluster().GetId()
	if have != "" && have != got {
		return fmt.Errorf("%w: this state directory holds cluster %s, the state is of cluster %q",
			ErrForeignCluster, have, got)
	}
	return nil
}

// publish makes a state visible. No events: the tail starts anew.
func (r *Replica) publish(next *events.State, evs []*skeinv1.Event) {
	t := &r.tail
	t.Lock()
	defer t.Unlock()
	t.came = time.Now()
	if evs == nil {
		t.evs, t.came = nil, time.Time{}
	}
	t.evs = append(t.evs, evs...)
	if !r.lazy || evs == nil {
		t.durable, t.first = r.store.last, r.store.first
	}
	t.trim()
	r.state.Store(next)
	close(t.changed)
	t.changed = make(chan struct{})
}

// lastEvent is when the newest event came, zero if that is not known.
func (r *Replica) lastEvent() time.Time {
	r.tail.RLock()
	defer r.tail.RUnlock()
	return r.tail.came
}

// trim drops old events from memory, never those that are not on disk.
func (t *tail) trim() {
	if len(t.evs) < 2*tailEvents {
		return
	}
	drop := len(t.evs) - tailEvents
	if behind := int(t.evs[len(t.evs)-1].Index - t.durable); drop > len(t.evs)-behind {
		drop = len(t.evs) - behind
	}
	if drop > 0 {
		t.evs = append(make([]*skeinv1.Event, 0, 2*tailEvents), t.evs[drop:]...)
	}
}

func (r *Replica) unwritten() int {
	r.tail.RLock()
	defer r.tail.RUnlock()
	return int(r.State().Index() - r.tail.durable)
}

// makeLazy lets the replica on disk lag behind: on a server, the Raft log is on disk before.
func (r *Replica) makeLazy() error {
	r.disk.Lock()
	defer r.disk.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.lazy {
		return nil
	}
	var err error
	if r.spill, err = openSpill(r.path); err != nil {
		return err
	}
	r.lazy = true
	return nil
}

// makeDurable ends makeLazy's effect, when the node is not a server any more.
func (r *Replica) makeDurable() error {
	r.disk.Lock()
	defer r.disk.Unlock()
	for !r.isClosed() {
		if err := r.flush(); err != nil {
			return err
		}
		r.mu.Lock()
		if len(r.later) == 0 {
			r.lazy = false
			r.spill.close()
			r.spill = nil
			r.mu.Unlock()
			return nil
		}
		r.mu.Unlock()
	}
	return nil
}

// schedule writes soon, or at once when much is unwritten.
func (r *Replica) schedule() {
	delay := lazyDelay
	if r.unwritten() >= lazyEvents {
		delay = 0
	}
	if r.timer == nil {
		r.timer = time.AfterFunc(delay, r.flushLater)
	} else if delay == 0 {
		r.timer.Reset(0)
	}
}

func (r *Replica) flushLater() {
	r.disk.Lock()
	defer r.disk.Unlock()
	if r.isClosed() {
		return
	}
	err := r.flush()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = nil
	if err != nil {
		r.log.Error("the replica cannot be written; it goes on in memory and tries again", "error", err,
			"unwritten", r.unwritten())
		r.timer = time.AfterFunc(5*lazyDelay, r.flushLater)
	} else if len(r.later) > 0 {
		r.schedule()
	}
}

// flush writes what is not on disk. The caller holds disk; Apply can run meanwhile.
func (r *Replica) flush() error {
	r.mu.Lock()
	groups := r.later
	r.later = nil
	turned := len(groups) > 0 && r.spill.turn()
	r.mu.Unlock()
	if len(groups) == 0 {
		return nil
	}
	if err := r.store.append(groups); err != nil {
		r.mu.Lock()
		r.later = append(groups, r.later...)
		r.mu.Unlock()
		return fmt.Errorf("write the replica: %w", err)
	}
	t := &r.tail
	t.Lock()
	t.durable, t.first = r.store.last, r.store.first
	t.trim()
	t.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if all := len(r.later) == 0; all || turned {
		return r.spill.drop(all)
	}
	return nil
}

// Sync returns when everything applied before is on disk.
func (r *Replica) Sync() error {
	r.disk.Lock()
	defer r.disk.Unlock()
	if r.isClosed() {
		return fmt.Errorf("sync: %s: %w", r.path, ErrClosed)
	}
	return r.flush()
}

// Events returns up to limit events after an index, oldest first, and the range that can be had. If
// the index is older than the archive, the events begin with the first available.
func (r *Replica) Events(after uint64, limit int) (evs []*skeinv1.Event, firstAvailable, lastIndex uint64, err error) {
	evs, firstAvailable, lastIndex, complete := r.tail.after(after, limit, r.State)
	if complete {
		return evs, firstAvailable, lastIndex, nil
	}
	if r.isClosed() {
		return nil, 0, 0, fmt.Errorf("read events: %s: %w", r.path, ErrClosed)
	}
	evs, first, err := r.store.read(after, limit)
	if err != nil {
		return nil, 0, 0, fmt.Errorf("read events: %w", err)
	}
	if first != 0 {
		firstAvailable = first
	}
	if n := len(evs); n < limit { // what is not on disk yet
		rest, _, _, complete := r.tail.after(max(after+1, firstAvailable)-1+uint64(n), limit-n, r.State)
		if complete {
			evs = append(evs, rest...)
		}
	}
	return evs, firstAvailable, lastIndex, nil
}

// after returns events from memory; complete is false if older ones are on disk alone.
func (t *tail) after(after uint64, limit int,
	state func() *events.State) (evs []*skeinv1.Event, first, last uint64, complete bool) {
	t.RLock()
	defer t.RUnlock()
	first, last = t.first, state().Index()
	before := last - uint64(len(t.evs)) // the index before the first in memory
	if after >= last || limit <= 0 {
		return nil, first, last, true
	}
	if after < before {
		return nil, first, last, false
	}
	evs = t.evs[after-before:]
	return append([]*skeinv1.Event(nil), evs[:min(limit, len(evs))]...), first, last, true
}

// At is the state at an index; 0 is the newest. An index outside the archive is ErrGone.
func (r *Replica) At(index uint64) (*events.State, error) {
	t := &r.tail
	t.RLock()
	state, durable := r.State(), t.durable
	pending := t.evs[len(t.evs)-int(state.Index()-durable):]
	t.RUnlock()
	if index == 0 || index == state.Index() {
		return state, nil
	}
	if index > state.Index() {
		return nil, fmt.Errorf("%w: index %d was asked for, the newest is %d", ErrGone, index, state.Index())
	}
	if r.isClosed() {
		return nil, fmt.Errorf("read the state at index %d: %s: %w", index, r.path, ErrClosed)
	}
	s, err := r.store.at(min(index, durable))
	if err != nil {
		if errors.Is(err, ErrGone) {
			return nil, fmt.Errorf("%w: index %d was asked for, the archive begins at %d", ErrGone, index, r.firstAvailable())
		}
		return nil, fmt.Errorf("read the state at index %d: %w", index, err)
	}
	for _, e := range pending {
		if e.Index > index {
			break
		}
		if err := s.Fold(e); err != nil {
			return nil, fmt.Errorf("read the state at index %d: %w", index, err)
		}
	}
	return s, nil
}

func (r *Replica) firstAvailable() uint64 {
	r.tail.RLock()
	defer r.tail.RUnlock()
	return r.tail.first
}

// Wait returns when the state's index is greater than after, or with the context's error.
func (r *Replica) Wait(ctx context.Context, after uint64) error {
	for {
		r.tail.RLock()
		changed, closed := r.tail.changed, r.tail.closed
		r.tail.RUnlock()
		switch {
		case r.State().Index() > after:
			return nil
		case closed:
			return fmt.Errorf("wait for index %d: %s: %w", after+1, r.path, ErrClosed)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (r *Replica) isClosed() bool {
	r.tail.RLock()
	defer r.tail.RUnlock()
	return r.tail.closed
}

// Close writes what is unwritten and releases the file. The last state stays readable.
func (r *Replica) Close() error {
	r.disk.Lock()
	defer r.disk.Unlock()
	if r.isClosed() {
		return nil
	}
	r.mu.Lock()
	if r.timer != nil {
		r.timer.Stop()
	}
	r.tail.Lock()
	r.tail.closed = true // nothing is applied from here on
	close(r.tail.changed)
	r.tail.Unlock()
	r.mu.Unlock()
	err := r.flush()
	r.spill.close()
	if e := r.store.db.Close(); err == nil && e != nil {
		err = fmt.Errorf("close the replica: %w", e)
	}
	return err
}
