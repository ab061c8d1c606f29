package consensus

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"go.etcd.io/bbolt"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// store is the replica's file: a contiguous archive of events, and checkpoints of the state among
// them. Events are kept from the one after the oldest checkpoint on, so that the state at every
// index in the archive can be folded. It is not safe for concurrent writes.
type store struct {
	db   *bbolt.DB
	path string

	cluster     string
	first, last uint64 // first event in the archive and last; last == first-1: none
	bytes       uint64 // of all events
	checkpoints []checkpoint
	limits      limits // those of the last prune
	walked      int    // checkpoints passed while the file is checked
	most        int    // bytes of a state that may be written
}

// checkpoint is a state on disk. The state before the first event needs none.
type checkpoint struct {
	index uint64
	time  int64
	below uint64 // bytes of events at and before index, counted from the opening
}

// limits bound the archive. Zero: unlimited.
type limits struct {
	events, bytes uint64
	age           int64 // nanoseconds
}

func limitsOf(s *events.State) limits {
	v := s.Settings()
	return limits{events: v.GetArchiveMaxEvents(), bytes: v.GetArchiveMaxBytes(),
		age: int64(v.GetArchiveMaxAgeSeconds()) * 1e9}
}

const (
	checkpointEvents = 32768    // folding so many at a start costs a tenth of a second
	checkpointBytes  = 32 << 20 // of events
	storeFormat      = "skein replica 1"
	replicaNext      = "if it is a server's, stop it and move the file away: the Raft log and the other servers bring " +
		"it back; " +
		"if it is another agent's, move it away and join again with a token: the node keeps its name and addresses " +
		"(docs/recovery.md)"
)

var (
	bucketMeta        = []byte("meta")
	bucketEvents      = []byte("events")
	bucketCheckpoints = []byte("checkpoints")
	keyFormat         = []byte("format")
	keyCluster        = []byte("cluster")
)

func openStore(path string) (*store, error) {
	s := &store{path: path, first: 1, most: maxStateBytes}
	if err := checkBolt(path, replicaNext, s.visit); err != nil {
		return nil, err
	}
	db, err := openBolt(path, replicaNext)
	if err != nil {
		return nil, err
	}
	s.db = db
	if err := s.checkOrder(); err != nil {
		db.Close()
		return nil, err
	}
	err = s.update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketEvents, bucketCheckpoints} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketMeta).Put(keyFormat, []byte(storeFormat))
	})
	if err != nil {
		db.Close()
		return nil, err
	}
	return s, nil
}

// visit checks one pair of the file and counts it in. Checkpoints sort before events, as bucket names do.
func (s *store) visit(bucket, k, v []byte) error {
	switch {
	case bytes.Equal(bucket, bucketMeta):
		if bytes.Equal(k, keyFormat) && string(v) != storeFormat {
			return fmt.Errorf("its format is %q, want %q: it was written by another version", v, storeFormat)
		}
		if bytes.Equal(k, keyCluster) {
			s.cluster = string(v)
		}
		return nil
	case bytes.Equal(bucket, bucketCheckpoints):
		index, err := keyIndex(k)
		if err != nil {
			return err
		}
		_, at, err := splitCheckpoint(v)
		if err != nil {
			return fmt.Errorf("checkpoint %d: %w", index, err)
		}
		s.checkpoints = append(s.checkpoints, checkpoint{index: index, time: at})
		return nil
	case bytes.Equal(bucket, bucketEvents):
		return s.visitEvent(k, v)
	}
	return fmt.Errorf("it holds an unknown part %q", bucket)
}

func (s *store) visitEvent(k, v []byte) error {
	index, err := keyIndex(k)
	if err != nil {
		return err
	}
	if _, err := unseal(v); err != nil {
		return fmt.Errorf("event %d: %w", index, err)
	}
	if s.bytes == 0 {
		s.first = index
	} else if index != s.last+1 {
		return fmt.Errorf("events %d to %d are missing", s.last+1, index-1)
	}
	s.last, s.bytes = index, s.bytes+uint64(len(k)+len(v))
	for s.walked < len(s.checkpoints) && s.checkpoints[s.walked].index < index {
		s.walked++
	}
	if s.walked < len(s.checkpoints) {
		s.checkpoints[s.walked].below = s.bytes
	}
	return nil
}

// checkOrder checks that checkpoints and events fit together after the walk.
func (s *store) checkOrder() error {
	n := len(s.checkpoints)
	if n == 0 {
		if s.first != 1 {
			return s.corrupt("its events begin at %d and no checkpoint precedes them", s.first)
		}
		return nil
	}
	if s.bytes == 0 { // a checkpoint alone: what a reset leaves
		s.first, s.last = s.checkpoints[n-1].index+1, s.checkpoints[n-1].index
	}
	if c := s.checkpoints[n-1].index; c > s.last {
		return s.corrupt("checkpoint %d is newer than its last event %d", c, s.last)
	}
	if c := s.checkpoints[0].index; s.first != 1 && c+1 != s.first {
		return s.corrupt("its events begin at %d and its oldest checkpoint is %d", s.first, c)
	}
	return nil
}

func (s *store) corrupt(format string, args ...any) error {
	return &fileError{path: s.path, problem: fmt.Sprintf(format, args...), next: replicaNext}
}

// update and view turn bbolt's panics and damaged records into errors that name the file.
func (s *store) update(f func(*bbolt.Tx) error) error {
	return s.wrap(func() error { return s.db.Update(f) })
}
func (s *store) view(f func(*bbolt.Tx) error) error {
	return s.wrap(func() error { return s.db.View(f) })
}

func (s *store) wrap(f func() error) error {
	err := guard(f)
	switch {
	case err == nil, errors.Is(err, ErrGone), errors.Is(err, events.ErrUnknownEvent):
		return err
	case errors.Is(err, errPanicked), errors.Is(err, errRecord):
		return s.corrupt("%v", err)
	}
	return fmt.Errorf("%s: %w", s.path, err)
}

var errRecord = errors.New("a record is unreadable")

// load folds the newest state on disk and returns it with the last few events.
func (s *store) load(keep int) (state *events.State, tail []*skeinv1.Event, err error) {
	err = s.view(func(tx *bbolt.Tx) error {
		state, err = s.fold(tx, s.last, func(e *skeinv1.Event) {
			if tail = append(tail, e); len(tail) >= 2*keep {
				tail = append([]*skeinv1.Event(nil), tail[len(tail)-keep:]...)
			}
		})
		return err
	})
	return state, tail, err
}

// at is the state at an index on disk.
func (s *store) at(index uint64) (state *events.State, err error) {
	err = s.view(func(tx *bbolt.Tx) error {
		state, err = s.fold(tx, index, func(*skeinv1.Event) {})
		return err
	})
	return state, err
}

// fold starts from the newest checkpoint at or before the index.
func (s *store) fold(tx *bbolt.Tx, index uint64, saw func(*skeinv1.Event)) (*events.State, error) {
	state := events.NewState()
	c := tx.Bucket(bucketCheckpoints).Cursor()
	k, v := c.Seek(indexKey(index))
	if k == nil || !bytes.Equal(k, indexKey(index)) {
		k, v = c.Prev()
	}
	if k != nil {
		var err error
		payload, _, err := splitCheckpoint(v)
		if err == nil {
			state, err = DecodeState(payload)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errRecord, err)
		}
	}
	events := tx.Bucket(bucketEvents).Cursor()
	for k, v := events.Seek(indexKey(state.Index() + 1)); k != nil && state.Index() < index; k, v = events.Next() {
		if binary.BigEndian.Uint64(k) != state.Index()+1 {
			break
		}
		e, err := decodeEvent(state.Index()+1, v)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errRecord, err)
		}
		if err := state.Fold(e); err != nil {
			return nil, fmt.Errorf("fold %s: %w", s.path, err)
		}
		saw(e)
	}
	if state.Index() != index {
		return nil, fmt.Errorf("%w: index %d", ErrGone, index)
	}
	return state, nil
}

// read returns up to limit events after an index, from the oldest in the archive on.
func (s *store) read(after uint64, limit int) (out []*skeinv1.Event, first uint64, err error) {
	err = s.view(func(tx *bbolt.Tx) error {
		c := tx.Bucket(bucketEvents).Cursor()
		k, _ := c.First()
		if k == nil {
			return nil
		}
		first = binary.BigEndian.Uint64(k)
		for k, v := c.Seek(indexKey(max(after+1, first))); k != nil && len(out) < limit; k, v = c.Next() {
			e, err := decodeEvent(binary.BigEndian.Uint64(k), v)
			if err != nil {
				return fmt.Errorf("%w: %w", errRecord, err)
			}
			out = append(out, e)
		}
		return nil
	})
	return out, first, err
}

// group is events that were applied together, and the state after them.
type group struct {
	events []*skeinv1.Event
	after  *events.State
}

// append writes events, and checkpoints between groups where they are due, in one transaction.
func (s *store) append(groups []group) error {
	next := *s
	next.checkpoints = append([]checkpoint(nil), s.checkpoints...)
	err := s.update(func(tx *bbolt.Tx) error {
		for _, g := range groups {
			if err := next.put(tx, g); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		*s = next
	}
	return err
}

func (s *store) put(tx *bbolt.Tx, g group) error {
	b := tx.Bucket(bucketEvents)
	b.FillPercent = 0.95 // keys only grow
	for _, e := range g.events {
		v, err := encodeEvent(e)
		if err != nil {
			return err
		}
		if err := b.Put(indexKey(e.Index), v); err != nil {
			return err
		}
		s.last, s.bytes = e.Index, s.bytes+uint64(8+len(v))
	}
	if err := s.name(tx, g.after); err != nil {
		return err
	}
	return s.maintain(tx, g.after)
}

// name records the cluster as soon as it is known.
func (s *store) name(tx *bbolt.Tx, state *events.State) error {
	id := state.Cluster().GetId()
	if id == "" || id == s.cluster {
		return nil
	}
	s.cluster = id
	return tx.Bucket(bucketMeta).Put(keyCluster, []byte(id))
}

// maintain adds a checkpoint when one is due and then drops what is above the limits.
func (s *store) maintain(tx *bbolt.Tx, state *events.State) error {
	l := limitsOf(state)
	newest := checkpoint{index: s.first - 1}
	if n := len(s.checkpoints); n > 0 {
		newest = s.checkpoints[n-1]
	}
	every, everyBytes := uint64(checkpointEvents), uint64(checkpointBytes)
	if l.events > 0 {
		every = min(every, max(l.events/4, 16))
	}
	if l.bytes > 0 {
		everyBytes = min(everyBytes, max(l.bytes/4, 64<<10))
	}
	changed := l != s.limits && s.limits != limits{}
	s.limits = l
	if s.last-newest.index < every && s.bytes-min(newest.below, s.bytes) < everyBytes && !changed ||
		s.last == newest.index {
		return nil
	}
	v, err := checkpointValue(state, s.most)
	if errors.Is(err, ErrTooLarge) {
		return nil // the events are kept from the last checkpoint on: see Replica.Problem
	}
	if err != nil {
		return err
	}
	if err := tx.Bucket(bucketCheckpoints).Put(indexKey(state.Index()), v); err != nil {
		return err
	}
	s.checkpoints = append(s.checkpoints, checkpoint{index: state.Index(), time: state.Time(), below: s.bytes})
	return s.prune(tx, l, state.Time())
}

// prune keeps a margin below the limits, because it only runs with checkpoints.
func (s *store) prune(tx *bbolt.Tx, l limits, now int64) error {
	to, start := -1, checkpoint{index: s.first - 1}
	for i, c := range s.checkpoints {
		over := l.events > 0 && s.last-start.index > l.events-l.events/4 ||
			l.bytes > 0 && s.bytes-start.below > l.bytes-l.bytes/4 ||
			l.age > 0 && c.time < now-l.age
		if !over {
			break
		}
		to, start = i, c
	}
	if to < 0 {
		return nil
	}
	cut := s.checkpoints[to]
	for _, name := range [][]byte{bucketEvents, bucketCheckpoints} {
		end := cut.index // events at and before it go, checkpoints before it
		if bytes.Equal(name, bucketCheckpoints) {
			end--
		}
		if err := deleteTo(tx.Bucket(name), end); err != nil {
			return err
		}
	}
	s.first, s.checkpoints = cut.index+1, append([]checkpoint(nil), s.checkpoints[to:]...)
	s.bytes -= cut.below
	for i := range s.checkpoints {
		s.checkpoints[i].below -= cut.below
	}
	return nil
}

func deleteTo(b *bbolt.Bucket, end uint64) error {
	var keys [][]byte // deleting under a cursor would walk the emptied pages again and again
	c := b.Cursor()
	for k, _ := c.First(); k != nil && binary.BigEndian.Uint64(k) <= end; k, _ = c.Next() {
		keys = append(keys, bytes.Clone(k))
	}
	for _, k := range keys {
		if err := b.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// reset replaces everything by one checkpoint.
func (s *store) reset(state *events.State) error {
	v, err := checkpointValue(state, s.most)
	if err != nil {
		return err
	}
	next := &store{db: s.db, path: s.path, most: s.most, cluster: s.cluster, first: state.Index() + 1, last: state.Index(),
		limits:      s.limits,
		checkpoints: []checkpoint{{index: state.Index(), time: state.Time()}}}
	err = s.update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketEvents, bucketCheckpoints} {
			if err := tx.DeleteBucket(name); err != nil {
				return err
			}
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		if err := next.name(tx, state); err != nil {
			return err
		}
		return tx.Bucket(bucketCheckpoints).Put(indexKey(state.Index()), v)
	})
	if err == nil {
		*s = *next
	}
	return err
}

// checkpointValue is the state's time, outside the seal of the state so that it is cheap to read, both sealed.
func checkpointValue(state *events.State, most int) ([]byte, error) {
	b, err := encodeState(state, most)
	if err != nil {
		return nil, err
	}
	return seal(append(binary.BigEndian.AppendUint64(nil, uint64(state.Time())), b...)), nil
}

func splitCheckpoint(v []byte) (state []byte, at int64, err error) {
	b, err := unseal(v)
	if err != nil {
		return nil, 0, err
	}
	if len(b) < 8 {
		return nil, 0, errors.New("it is cut short")
	}
	return b[8:], int64(binary.BigEndian.Uint64(b)), nil
}
