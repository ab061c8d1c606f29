package journal

import (
	"errors"
	"fmt"
	"os"
	"slices"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Tail reads the last entries of a journal that no process has, up to most, oldest first, and changes nothing. ErrInUse
// says that an agent has it, ErrDamaged that it cannot be read.
func Tail(path string, most int) (out []*skeinv1.JournalEntry, err error) {
	if _, err := os.Stat(path); err != nil { // bbolt would make it
		return nil, fmt.Errorf("journal: %w", err)
	}
	err = guard(func() error {
		db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: lockWait, ReadOnly: true})
		if err != nil {
			return err
		}
		defer db.Close()
		return db.View(func(tx *bolt.Tx) error {
			b := tx.Bucket(bucket)
			if b == nil {
				return nil
			}
			c := b.Cursor()
			for k, v := c.Last(); k != nil && len(out) < most; k, v = c.Prev() {
				e, err := decode(k, v)
				if err != nil {
					return err
				}
				out = append(out, e)
			}
			return nil
		})
	})
	slices.Reverse(out)
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("journal %s: %w", path, ErrInUse)
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("journal %s: %w", path, err)
	}
	return out, fmt.Errorf("journal %s: %w (%v)", path, ErrDamaged, err)
}
