package consensus

import (
	"fmt"
	"io"
	"log/slog"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/skeinmesh/skein/events"
)

// fsm applies committed log entries to the replica. at is the event index that the Raft log has
// reached; it decides whether an entry's base fits. It is not the replica's index: the replica may be
// ahead, after a restart or because it followed another server, and which entries are refused must
// depend on the log alone.
type fsm struct {
	replica *Replica
	log     *slog.Logger
	at      atomic.Uint64
	halted  atomic.Pointer[error]
	halt    func(error) // called once, when the node cannot fold any further
	newest  bool        // snapshots take the replica's state even if it is ahead: for recovery
}

// stop ends the applying for good: what comes later would be folded on the wrong state.
func (f *fsm) stop(err error) error {
	if f.halted.CompareAndSwap(nil, &err) {
		f.log.Error("this server can fold the log no further and stops", "error", err)
		if f.halt != nil {
			f.halt(err)
		}
	}
	return *f.halted.Load()
}

// Apply folds one entry; its answer is nil or an error.
func (f *fsm) Apply(l *raft.Log) any {
	if err := f.apply(l); err != nil {
		return err
	}
	return nil
}

func (f *fsm) apply(l *raft.Log) error {
	if halted := f.halted.Load(); halted != nil {
		return *halted
	}
	b, err := DecodeBatch(l.Data)
	if err != nil {
		return f.stop(fmt.Errorf("Raft log entry %d: %w; %s", l.Index, err, raftNext))
	}
	if at := f.at.Load(); b.Base != at {
		f.log.Error("refused a log entry that was decided on another index", "entry", l.Index, "base", b.Base, "index", at,
			"events", len(b.Events))
		return fmt.Errorf("Raft log entry %d: %w: batch %d, log %d", l.Index, ErrBase, b.Base, at)
	}
	if err := f.replica.catchUp(b); err != nil {
		return f.stop(err)
	}
	f.at.Store(last(b))
	return nil
}

// Snapshot takes the state that the Raft log has reached.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	if err := f.halted.Load(); err != nil {
		return nil, *err
	}
	state := f.replica.State()
	if at := f.at.Load(); state.Index() != at && !f.newest {
		var err error
		if at == 0 {
			state = events.NewState()
		} else if state, err = f.replica.At(at); err != nil {
			return nil, fmt.Errorf("snapshot at index %d: %w", at, err)
		}
	}
	return &snapshot{state: state, replica: f.replica}, nil
}

// Restore takes a snapshot in. A replica that is ahead stays as it is.
func (f *fsm) Restore(in io.ReadCloser) error {
	b, err := io.ReadAll(io.LimitReader(in, maxStateBytes+1))
	if err != nil {
		return fmt.Errorf("read a Raft snapshot: %w", err)
	}
	state, err := DecodeState(b)
	if err != nil {
		return fmt.Errorf("read a Raft snapshot: %w", err)
	}
	if state.Index() > f.replica.State().Index() {
		if err := f.replica.reset(state); err != nil {
			return fmt.Errorf("restore a Raft snapshot: %w", err)
		}
	} else if have, err := f.replica.At(state.Index()); err == nil && state.Index() > 0 && have.Hash() != state.Hash() {
		return f.stop(fmt.Errorf("restore a Raft snapshot at index %d: %w: %s", state.Index(), ErrDiverged, divergedNext))
	}
	f.at.Store(state.Index())
	return nil
}

type snapshot struct {
	state   *events.State
	replica *Replica
}

// Persist writes the replica first: once Raft has a snapshot it forgets the entries before it, and a
// replica that was behind on disk would come back without them and with a gap in its archive.
func (s *snapshot) Persist(sink raft.SnapshotSink) error {
	err := s.replica.Sync()
	var b []byte
	if err == nil {
		b, err = encodeState(s.state, s.replica.most)
	}
	if err == nil {
		_, err = sink.Write(b)
	}
	if err != nil {
		sink.Cancel()
		return fmt.Errorf("write a Raft snapshot: %w", err)
	}
	return sink.Close()
}

func (s *snapshot) Release() {}
