package consensus

import (
	"errors"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

const (
	maxPast   = 4096            // hashes of the newest states
	maxLooked = 256             // hashes of other states, computed on request
	lookEvery = 3 * time.Second // between two reads of the archive for one member; its agent asks less often
)

// past holds hashes of a replica's earlier states: of the newest ones at the ends of batches, where its followers
// usually are, and of others that were computed from the archive.
type past struct {
	mu     sync.Mutex
	newest hashes
	looked hashes                    // separate, so that requests for old states do not displace new ones
	looks  map[identity.ID]time.Time // when the archive may be read again for each member; zero: it is being read
	fold   sync.Mutex
}

// hashes holds hashes of states by index. Beyond a limit the oldest entry is dropped.
type hashes struct {
	at    map[uint64][32]byte
	order []uint64 // the oldest entry first
}

func (h *hashes) note(index uint64, hash [32]byte, most int) {
	if h.at == nil {
		h.at = make(map[uint64][32]byte)
	}
	if _, ok := h.at[index]; ok {
		return
	}
	h.at[index], h.order = hash, append(h.order, index)
	if len(h.order) > most {
		delete(h.at, h.order[0])
		h.order = h.order[1:]
	}
}

// note keeps the hash of a new state.
func (p *past) note(index uint64, hash [32]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.newest.note(index, hash, maxPast)
}

// noteLooked keeps the hash of a state that was read from the archive.
func (p *past) noteLooked(index uint64, hash [32]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.looked.note(index, hash, maxLooked)
}

func (p *past) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.newest, p.looked = hashes{}, hashes{}
}

func (p *past) at(index uint64) ([32]byte, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.newest.at[index]
	if !ok {
		h, ok = p.looked.at[index]
	}
	return h, ok
}

// look reserves a read of the archive for a member. It refuses while one is in progress, and for lookEvery afterwards.
// After ok, the caller must call done at the end.
func (p *past) look(asker identity.ID) (done func(), ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if next, known := p.looks[asker]; known && (next.IsZero() || now.Before(next)) {
		return nil, false
	}
	maps.DeleteFunc(p.looks, func(_ identity.ID, next time.Time) bool { return !next.IsZero() && !now.Before(next) })
	if p.looks == nil {
		p.looks = make(map[identity.ID]time.Time)
	}
	p.looks[asker] = time.Time{}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.looks[asker] = time.Now().Add(lookEvery)
	}, true
}

// SameHistory compares the hash of a member's state at an index with this replica's hash there. ErrDiverged: they
// differ. ErrGone: the archive does not hold the index, so the answer is unknown. ErrTooSoon: the archive was read for
// this member a moment ago. A hash that is not in memory is computed from the archive, one at a time, which takes a
// tenth of a second at most.
func (r *Replica) SameHistory(asker identity.ID, index uint64, hash []byte) error {
	if index == 0 {
		return nil
	}
	have, ok := r.past.at(index)
	if !ok {
		done, ok := r.past.look(asker)
		if !ok {
			return ErrTooSoon
		}
		defer done()
		r.past.fold.Lock()
		defer r.past.fold.Unlock()
		if have, ok = r.past.at(index); !ok { // no other call has computed it meanwhile
			state, err := r.At(index)
			if err != nil {
				return err
			}
			have = state.Hash()
			r.past.noteLooked(index, have)
		}
	}
	if string(have[:]) != string(hash) {
		return &divergedError{index}
	}
	return nil
}

// divergedError is an ErrDiverged that names the index.
type divergedError struct{ index uint64 }

func (e *divergedError) Error() string {
	return "the states at index " + strconv.FormatUint(e.index, 10) + " differ: this node and the server have " +
		"different histories; no events were sent; " + divergedNext
}

func (e *divergedError) Is(target error) bool { return target == ErrDiverged }

// checkFollower is SameHistory for a subscriber: if the answer is unknown, the subscriber gets a whole state instead.
func (r *Replica) checkFollower(asker identity.ID, index uint64, hash []byte) error {
	if err := r.SameHistory(asker, index, hash); !errors.Is(err, ErrGone) {
		return err
	}
	return nil
}
