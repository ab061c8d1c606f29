package soak

import (
	"fmt"
	"sync"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Ledger holds what agents say against what must always be true. Its methods may be called concurrently.
type Ledger struct {
	mu      sync.Mutex
	hashes  map[uint64]said   // by index
	applied map[string]uint64 // newest index of each node
	tokens  map[string]string // acknowledged token → the node that it was asked of
	order   []string          // of those tokens, the oldest first
	revoked map[string]string // token whose revocation was acknowledged → the node that it was asked of
	looks   int
	created int
}

type said struct{ hash, node string }

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{hashes: map[uint64]said{}, applied: map[string]uint64{}, tokens: map[string]string{},
		revoked: map[string]string{}}
}

// Applied tells the index that a node had applied when it was last asked. What is asked from now on
// must not be below it.
func (l *Ledger) Applied(node string) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.applied[node]
}

// Status takes a node's answer. atLeast is what Applied said before the node was asked.
func (l *Ledger) Status(node string, atLeast uint64, s *skeinv1.StatusResponse) error {
	if s.GetIndex() == 0 {
		return nil // it has only begun to start
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.looks++
	if s.GetIndex() < atLeast {
		return fmt.Errorf("%s went back from index %d to %d", node, atLeast, s.GetIndex())
	}
	l.applied[node] = max(l.applied[node], s.GetIndex())
	first, ok := l.hashes[s.GetIndex()]
	if !ok {
		l.hashes[s.GetIndex()] = said{s.GetStateHash(), node}
	} else if first.hash != s.GetStateHash() {
		return fmt.Errorf("at index %d %s has state hash %.16s, %s had %.16s", s.GetIndex(), node, s.GetStateHash(),
			first.node, first.hash)
	}
	return nil
}

// Acknowledged notes a token that a node's agent said was created.
func (l *Ledger) Acknowledged(node, token string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tokens[token] = node
	l.order = append(l.order, token)
	l.created++
}

// Oldest takes the oldest token out when there are more than so many: it is about to be revoked.
func (l *Ledger) Oldest(beyond int) (token string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.order) <= beyond {
		return "", false
	}
	token, l.order = l.order[0], l.order[1:]
	delete(l.tokens, token)
	return token, true
}

// Revoked notes a token that a node's agent said was revoked.
func (l *Ledger) Revoked(node, token string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.revoked[token] = node
}

// Tokens holds a node's list of tokens against those whose creation, or revocation, was acknowledged.
func (l *Ledger) Tokens(node string, all []*skeinv1.Token) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	have := map[string]bool{}
	for _, t := range all {
		have[t.GetId()] = true
		if asked, ok := l.revoked[t.GetId()]; ok {
			return fmt.Errorf("%s still has token %s, whose revocation was acknowledged by %s", node, t.GetId(), asked)
		}
	}
	for id, asked := range l.tokens {
		if !have[id] {
			return fmt.Errorf("%s does not know token %s, whose creation was acknowledged by %s", node, id, asked)
		}
	}
	return nil
}

// Counts tells how many answers were checked, and how many commands were acknowledged.
func (l *Ledger) Counts() (looks, commands int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.looks, l.created + len(l.revoked)
}
