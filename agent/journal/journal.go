package journal

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// ErrDamaged is wrapped by Open when the file is there but cannot be read.
var ErrDamaged = errors.New("journal is damaged")

// ErrInUse is wrapped by Open when another process holds the file.
var ErrInUse = errors.New("journal is in use by another process")

const (
	flushEvery = 500 * time.Millisecond // one fsync per so long at most
	flushShare = 40                     // and writing takes a part in so many of the time,
	flushMax   = 5 * time.Second        // but entries wait no longer than this for the next one
	pendingMax = 4096                   // entries waiting for the disk; older ones go when it does not keep up
	lockWait   = time.Second
	keepMin    = 16
)

var (
	bucket  = []byte("entries")
	meta    = []byte("meta")
	sizeKey = []byte("bytes") // in meta: what keys and entries take together
)

// Journal is a bounded list of entries, oldest first.
type Journal struct {
	path     string
	keep     int
	maxBytes int64    // on disk; 0: as many as keep allows
	size     int64    // on disk, keys and entries; io guards it
	db       *bolt.DB // nil: memory only

	mu      sync.Mutex
	seq     uint64
	pending []*skeinv1.JournalEntry // not yet on disk; everything when memory only
	dropped uint64
	lastErr error
	closed  bool

	io   sync.Mutex // one transaction at a time, so that entries reach the disk in order
	kick chan struct{}
	done sync.WaitGroup
	stop chan struct{}
}

// Option is a choice of Open's.
type Option func(*Journal)

// MaxBytes bounds what the entries of a file take together; the newest stays whatever its size is.
func MaxBytes(n int64) Option { return func(j *Journal) { j.maxBytes = n } }

// Open opens or creates the journal in a file and keeps its newest maxEntries entries.
func Open(path string, maxEntries int, options ...Option) (*Journal, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	j := Memory(maxEntries)
	j.path = path
	for _, o := range options {
		o(j)
	}
	err := guard(func() error {
		// The free list stays on disk: without it bbolt walks all pages at the start in a goroutine
		// of its own, where a damaged one panics out of our reach.
		db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: lockWait, FreelistType: bolt.FreelistMapType})
		if err != nil {
			return err
		}
		j.db = db
		return db.Update(func(tx *bolt.Tx) error { return errors.Join(j.load(tx), j.loadSize(tx)) })
	})
	switch {
	case err == nil:
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("journal %s: %w; stop that agent or give this one another state directory", path, ErrInUse)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("journal %s: %w", path, err)
	default:
		j.abandon()
		return nil, fmt.Errorf("journal %s: %w (%v); only history is lost by moving the file away: mv %s %s.damaged, then "+
			"start again", path, ErrDamaged, err, path, path)
	}
	j.stop = make(chan struct{})
	j.done.Go(j.writer)
	return j, nil
}

// Memory is a journal that lives as long as the process.
func Memory(maxEntries int) *Journal {
	return &Journal{keep: max(maxEntries, keepMin), kick: make(chan struct{}, 1)}
}

// load takes the last sequence number, and reads both ends so that damage shows at once.
func (j *Journal) load(tx *bolt.Tx) error {
	b, err := tx.CreateBucketIfNotExists(bucket)
	if err != nil {
		return err
	}
	c := b.Cursor()
	for _, at := range []func() ([]byte, []byte){c.First, c.Last} {
		k, v := at()
		if k == nil {
			return nil
		}
		e, err := decode(k, v)
		if err != nil {
			return err
		}
		j.seq = e.GetSeq()
	}
	return nil
}

// loadSize takes what the entries take together, and adds it up where an older version has not kept it.
func (j *Journal) loadSize(tx *bolt.Tx) error {
	if j.maxBytes == 0 {
		return nil
	}
	m, err := tx.CreateBucketIfNotExists(meta)
	if err != nil {
		return err
	}
	if v := m.Get(sizeKey); len(v) == 8 {
		j.size = int64(binary.BigEndian.Uint64(v))
		return nil
	}
	return tx.Bucket(bucket).ForEach(func(k, v []byte) error {
		j.size += int64(len(k) + len(v))
		return nil
	})
}

// abandon releases a file that could not be opened properly. A store that panicked may hold its own locks, so it is not
// waited for.
func (j *Journal) abandon() {
	if db := j.db; db != nil {
		j.db = nil
		go func() { _ = guard(db.Close) }()
	}
}

// Append takes an entry over and numbers it. A zero time becomes now. It never waits for the disk.
func (j *Journal) Append(e *skeinv1.JournalEntry) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return
	}
	if e.GetTime() == 0 {
		e.Time = time.Now().UnixNano()
	}
	j.seq++
	e.Seq = j.seq
	j.pending = append(j.pending, e)
	limit := j.keep
	if j.db != nil {
		limit = min(pendingMax, max(j.keep, keepMin))
	}
	if over := len(j.pending) - limit; over > 0 {
		if j.db != nil {
			j.dropped += uint64(over)
		}
		j.pending = slices.Delete(j.pending, 0, over)
	}
	select {
	case j.kick <- struct{}{}:
	default:
	}
}

// Read gives the entries of a span of time, oldest first; a zero bound is open, until is included, a nil keep takes
// all.
func (j *Journal) Read(since, until time.Time, keep func(*skeinv1.JournalEntry) bool) ([]*skeinv1.JournalEntry, error) {
	wanted := func(e *skeinv1.JournalEntry) bool {
		return (since.IsZero() || e.GetTime() >= since.UnixNano()) && (until.IsZero() || e.GetTime() <= until.UnixNano()) &&
			(keep == nil || keep(e))
	}
	j.io.Lock()
	defer j.io.Unlock()
	j.mu.Lock()
	waiting, db := slices.Clone(j.pending), j.db
	j.mu.Unlock()
	var out []*skeinv1.JournalEntry
	if db != nil {
		err := guard(func() error {
			return db.View(func(tx *bolt.Tx) error {
				return tx.Bucket(bucket).ForEach(func(k, v []byte) error {
					e, err := decode(k, v)
					if err == nil && wanted(e) {
						out = append(out, e)
					}
					return err
				})
			})
		})
		if err != nil {
			return nil, fmt.Errorf("journal %s: reading: %w", j.path, err)
		}
	}
	for _, e := range waiting {
		if wanted(e) {
			out = append(out, e)
		}
	}
	slices.SortStableFunc(out, func(a, b *skeinv1.JournalEntry) int { return cmp.Compare(a.GetSeq(), b.GetSeq()) })
	return out, nil
}

// Back shows the entries from the newest to the oldest, for as long as visit wants more.
func (j *Journal) Back(visit func(*skeinv1.JournalEntry) (more bool)) error {
	j.io.Lock()
	defer j.io.Unlock()
	j.mu.Lock()
	waiting, db := slices.Clone(j.pending), j.db
	j.mu.Unlock()
	for _, e := range slices.Backward(waiting) {
		if !visit(e) {
			return nil
		}
	}
	if db == nil {
		return nil
	}
	err := guard(func() error {
		return db.View(func(tx *bolt.Tx) error {
			c := tx.Bucket(bucket).Cursor()
			for k, v := c.Last(); k != nil; k, v = c.Prev() {
				e, err := decode(k, v)
				if err != nil {
					return err
				}
				if !visit(e) {
					return nil
				}
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("journal %s: reading: %w", j.path, err)
	}
	return nil
}

// Flush waits until everything appended so far is on disk.
func (j *Journal) Flush() error {
	j.io.Lock()
	defer j.io.Unlock()
	j.mu.Lock()
	batch, db := j.pending, j.db
	if db == nil || len(batch) == 0 {
		defer j.mu.Unlock()
		return j.lastErr
	}
	batch = slices.Clone(batch)
	j.mu.Unlock()

	size := j.size
	err := guard(func() error {
		return db.Update(func(tx *bolt.Tx) (err error) {
			size, err = j.store(tx, batch)
			return err
		})
	})
	if err == nil {
		j.size = size
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	if err != nil {
		j.lastErr = fmt.Errorf("journal %s: writing: %w", j.path, err)
		return j.lastErr
	}
	j.lastErr = nil
	last := batch[len(batch)-1].GetSeq()
	j.pending = slices.DeleteFunc(j.pending, func(e *skeinv1.JournalEntry) bool { return e.GetSeq() <= last })
	return nil
}

// store writes a batch and removes what is too old, and returns what all entries take together afterwards.
func (j *Journal) store(tx *bolt.Tx, batch []*skeinv1.JournalEntry) (size int64, err error) {
	b := tx.Bucket(bucket)
	b.FillPercent = 0.95 // keys only grow
	size = j.size
	for _, e := range batch {
		v, err := proto.Marshal(e)
		if err != nil {
			return 0, err
		}
		k := binary.BigEndian.AppendUint64(nil, e.GetSeq())
		if err := b.Put(k, v); err != nil {
			return 0, err
		}
		size += int64(len(k) + len(v))
	}
	newest, oldest := batch[len(batch)-1].GetSeq(), uint64(0)
	if newest > uint64(j.keep) {
		oldest = newest - uint64(j.keep)
	}
	c := b.Cursor()
	for k, v := c.First(); k != nil; k, v = c.First() {
		seq := binary.BigEndian.Uint64(k)
		if seq > oldest && (j.maxBytes == 0 || size <= j.maxBytes || seq == newest) {
			break
		}
		size -= int64(len(k) + len(v))
		if err := c.Delete(); err != nil {
			return 0, err
		}
	}
	if j.maxBytes == 0 {
		return 0, nil
	}
	return size, tx.Bucket(meta).Put(sizeKey, binary.BigEndian.AppendUint64(nil, uint64(size)))
}

// Size is what the entries on disk take together, in bytes, of a journal with MaxBytes.
func (j *Journal) Size() int64 {
	j.io.Lock()
	defer j.io.Unlock()
	return j.size
}

// Err is the last write's failure, nil once a later one succeeded; dropped counts entries that a failing disk cost.
func (j *Journal) Err() (dropped uint64, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.dropped, j.lastErr
}

// flushWait is how long entries are gathered after a write that took so long.
func flushWait(took time.Duration) time.Duration {
	return min(max(flushEvery, flushShare*took), flushMax)
}

// writer gathers entries for a while and then writes them together.
func (j *Journal) writer() {
	spacing := flushEvery
	for {
		select {
		case <-j.stop:
			return
		case <-j.kick:
		}
		t := time.NewTimer(spacing)
		select {
		case <-j.stop:
			t.Stop()
			return
		case <-t.C:
		}
		began := time.Now()
		err := j.Flush()
		spacing = flushWait(time.Since(began))
		if err != nil {
			select { // the disk may come back
			case j.kick <- struct{}{}:
			default:
			}
		}
	}
}

// Close writes what is left and releases the file.
func (j *Journal) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.closed = true
	j.mu.Unlock()
	if j.stop != nil {
		close(j.stop)
		j.done.Wait()
	}
	err := j.Flush()
	if j.db != nil {
		err = errors.Join(err, guard(j.db.Close))
	}
	return err
}

func decode(k, v []byte) (*skeinv1.JournalEntry, error) {
	e := new(skeinv1.JournalEntry)
	if len(k) != 8 {
		return nil, fmt.Errorf("entry has a key of %d bytes, want 8", len(k))
	}
	if err := proto.Unmarshal(v, e); err != nil {
		return nil, fmt.Errorf("entry %d: %w", binary.BigEndian.Uint64(k), err)
	}
	return e, nil
}

// guard turns what bbolt does about damaged pages, panics and faults in its memory map, into errors.
func guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	return f()
}
