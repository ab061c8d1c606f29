package consensus

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

const lockWait = 500 * time.Millisecond // how long a file may be held by a process that is going away

func boltOptions() *bbolt.Options {
	return &bbolt.Options{
		Timeout:        lockWait,
		NoFreelistSync: true, // a commit need not write the list of free pages; opening walks the pages anyway
		FreelistType:   bbolt.FreelistMapType,
	}
}

// guard runs f and turns a panic into an error: bbolt panics on damaged pages, and reading a mapped
// file that was cut short is a memory fault.
func guard(f func() error) (err error) {
	old := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(old)
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", errPanicked, p)
		}
	}()
	return f()
}

var errPanicked = errors.New("its pages are inconsistent")

// checkBolt walks every page and value of a bbolt file before anybody opens it for writing: opening
// a damaged file for writing can panic in a goroutine of bbolt's own, which nothing can recover (see boltPages).
// visit sees every pair of every top-level bucket.
func checkBolt(path, next string, visit func(bucket, k, v []byte) error) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.Size() == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	err = guard(func() error {
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: lockWait})
		if err != nil {
			return err
		}
		defer db.Close()
		return db.View(func(tx *bbolt.Tx) error {
			if info.Size() < tx.Size() { // what is cut off may hold free pages only, and the walk below not notice
				return fmt.Errorf("it was cut short: it has %d bytes of %d", info.Size(), tx.Size())
			}
			file, err := os.Open(path)
			if err != nil {
				return err
			}
			defer file.Close()
			size := int64(db.Info().PageSize)
			pages := &boltPages{file: file, size: size, end: uint64(tx.Size() / size), seen: map[uint64]bool{}}
			if err := pages.check(uint64(tx.Cursor().Bucket().Root())); err != nil {
				return err
			}
			return tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
				return b.ForEach(func(k, v []byte) error { return visit(name, k, v) })
			})
		})
	})
	return boltError(path, next, err)
}

// openBolt opens a file that checkBolt has passed.
func openBolt(path, next string) (db *bbolt.DB, err error) {
	err = guard(func() error {
		db, err = bbolt.Open(path, 0o600, boltOptions())
		return err
	})
	return db, boltError(path, next, err)
}

// boltError tells a file that is busy or out of reach from a damaged one.
func boltError(path, next string, err error) error {
	var pathError *fs.PathError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, berrors.ErrTimeout):
		return fmt.Errorf("%s: %w: is a second agent running on the same state directory?", path, ErrInUse)
	case errors.As(err, &pathError):
		return fmt.Errorf("open %s: %w", path, err)
	}
	return &fileError{path: path, problem: err.Error(), next: next}
}
