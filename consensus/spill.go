package consensus

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// spill holds on disk, unsynced, the events that a lazy replica has shown but not yet put into its archive. After kill
// -9 it restores the replica to the state that others have seen. Without it, a restarted server would show an older
// state until Raft has a leader again: a revoked node would be a peer once more. After a power cut the spill may be cut
// off anywhere, which its checksums show; then Raft brings the rest, as after any restart.
//
// There are two files: one takes what is applied while the other's events are put into the archive.
type spill struct {
	files [2]*os.File
	bytes [2]int64
	use   int
}

func spillPath(replica string, i int) string { return fmt.Sprintf("%s.spill%d", replica, i) }

func openSpill(replica string) (*spill, error) {
	var s spill
	for i := range s.files {
		f, err := os.OpenFile(spillPath(replica, i), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			s.close()
			return nil, fmt.Errorf("open the replica's spill: %w", err)
		}
		s.files[i] = f
	}
	return &s, nil
}

// add appends a batch. A nil spill, of a replica that is not lazy, is empty.
func (s *spill) add(b *skeinv1.Batch) error {
	sealed, err := EncodeBatch(b)
	if err != nil {
		return err
	}
	frame := append(binary.BigEndian.AppendUint32(nil, uint32(len(sealed))), sealed...)
	if _, err := s.files[s.use].WriteAt(frame, s.bytes[s.use]); err != nil {
		return fmt.Errorf("spill events: %w", err)
	}
	s.bytes[s.use] += int64(len(frame))
	return nil
}

// turn begins a new file, if one is free. What was added before is in the other.
func (s *spill) turn() (turned bool) {
	if s.bytes[1-s.use] > 0 {
		return false
	}
	s.use = 1 - s.use
	return true
}

// drop empties one file, or both.
func (s *spill) drop(both bool) error {
	if s == nil {
		return nil
	}
	for i, f := range s.files {
		if s.bytes[i] == 0 || i == s.use && !both {
			continue
		}
		if err := f.Truncate(0); err != nil {
			return fmt.Errorf("empty the replica's spill: %w", err)
		}
		s.bytes[i] = 0
	}
	return nil
}

func (s *spill) close() {
	if s == nil {
		return
	}
	for _, f := range s.files {
		if f != nil {
			f.Close()
		}
	}
}

// spilled reads what a killed process left, up to the first byte that is damaged.
func spilled(replica string) ([]*skeinv1.Batch, error) {
	var out []*skeinv1.Batch
	for i := range 2 {
		f, err := os.Open(spillPath(replica, i))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open the replica's spill: %w", err)
		}
		out = append(out, readSpill(f)...)
		f.Close()
	}
	slices.SortStableFunc(out, func(a, b *skeinv1.Batch) int { return cmp.Compare(a.GetBase(), b.GetBase()) })
	return out, nil
}

func readSpill(in io.Reader) (out []*skeinv1.Batch) {
	for {
		var size [4]byte
		if _, err := io.ReadFull(in, size[:]); err != nil {
			return out
		}
		n := binary.BigEndian.Uint32(size[:])
		if n > maxBatchBytes {
			return out
		}
		sealed := make([]byte, n)
		if _, err := io.ReadFull(in, sealed); err != nil {
			return out
		}
		b, err := DecodeBatch(sealed)
		if err != nil {
			return out
		}
		out = append(out, b)
	}
}
