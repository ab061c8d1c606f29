package consensus

import (
	"errors"
	"strconv"
	"sync"
)

const maxPast = 4096 // hashes of earlier states in memory

// past is the hashes of a replica's newest states, at the ends of batches: where its followers usually are.
type past struct {
	mu     sync.Mutex
	hashes map[uint64][32]byte
	order  []uint64 // oldest first
	fold   sync.Mutex
}

func (p *past) note(index uint64, hash [32]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hashes == nil {
		p.hashes = make(map[uint64][32]byte)
	}
	if _, ok := p.hashes[index]; ok {
		return
	}
	p.hashes[index], p.order = hash, append(p.order, index)
	if len(p.order) > maxPast {
		delete(p.hashes, p.order[0])
		p.order = p.order[1:]
	}
}

func (p *past) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hashes, p.order = nil, nil
}

func (p *past) at(index uint64) ([32]byte, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	h, ok := p.hashes[index]
	return h, ok
}

// SameHistory compares the hash of another replica's state at an index with the own one there: ErrDiverged if they differ, and
// ErrGone if the index is not in the archive, so that nobody can tell. A state that is not among the newest is folded from the
// archive, one at a time, which takes a tenth of a second at most.
func (r *Replica) SameHistory(index uint64, hash []byte) error {
	if index == 0 {
		return nil
	}
	have, ok := r.past.at(index)
	if !ok {
		r.past.fold.Lock()
		defer r.past.fold.Unlock()
		if have, ok = r.past.at(index); !ok { // nobody has looked meanwhile
			state, err := r.At(index)
			if err != nil {
				return err
			}
			have = state.Hash()
			r.past.note(index, have)
		}
	}
	if string(have[:]) != string(hash) {
		return &divergedError{index}
	}
	return nil
}

// divergedError is an ErrDiverged.
type divergedError struct{ index uint64 }

func (e *divergedError) Error() string {
	return "the states at index " + strconv.FormatUint(e.index, 10) + " differ: two histories lead there; nothing was handed over. " + divergedNext
}

func (e *divergedError) Is(target error) bool { return target == ErrDiverged }

// checkFollower is SameHistory for one that wants what comes after: where nobody can tell, it gets a whole state.
func (r *Replica) checkFollower(index uint64, hash []byte) error {
	if err := r.SameHistory(index, hash); !errors.Is(err, ErrGone) {
		return err
	}
	return nil
}
