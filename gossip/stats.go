package gossip

import (
	"errors"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// Stats counts what happened since the start.
type Stats struct {
	Published     uint64 // own records
	Accepted      uint64 // records of others that were new
	Duplicates    uint64 // known already
	Old           uint64 // older than the held one
	Equivocations uint64 // two contents under one (epoch, seq)
	Jumps         uint64 // records of this node with its own number or a higher one that it did not write; see foreignOwn

	RefusedTooLarge  uint64
	RefusedMalformed uint64
	RefusedUnknown   uint64
	RefusedSignature uint64
	RefusedAddress   uint64

	Elsewhere  uint64 // records, packets and alive messages that belong to another site
	Fetched    uint64 // answers to members that asked for this site's records
	Strangers  uint64 // packets, streams and alive messages of nodes that are not members
	BadFrames  uint64 // packets and streams that are not gossip
	SendErrors uint64 // packets that the control net could not send
	Busy       uint64 // streams refused because there were too many
	Overflow   uint64 // messages dropped because a queue was full; anti-entropy repairs it

	Answered   uint64 // records sent because a packet asked for them
	Asked      uint64 // packets that ask for named records
	Pulls      uint64 // pulls of named records by a stream
	Syncs      uint64 // exchanges of digests
	PullErrors uint64
	Rejoins    uint64
	RejoinFail uint64
	DiskWrites uint64
	DiskErrors uint64

	// LastRefusals holds the newest refusal for each reason.
	LastRefusals map[string]Refusal
}

// Refusal is one record that was refused.
type Refusal struct {
	Node identity.ID
	Text string
	At   time.Time
}

type stats struct {
	mu sync.Mutex
	Stats
}

func (s *stats) add(n *uint64) {
	s.mu.Lock()
	*n++
	s.mu.Unlock()
}

// refused counts an error of Verify.
func (s *stats) refused(err error) {
	var r *RefusedError
	if !errors.As(err, &r) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range []struct {
		reason error
		n      *uint64
	}{
		{ErrTooLarge, &s.RefusedTooLarge},
		{ErrMalformed, &s.RefusedMalformed},
		{ErrUnknownNode, &s.RefusedUnknown},
		{ErrSignature, &s.RefusedSignature},
		{ErrAddress, &s.RefusedAddress},
	} {
		if r.Reason == c.reason {
			*c.n++
		}
	}
	if s.LastRefusals == nil {
		s.LastRefusals = make(map[string]Refusal)
	}
	s.LastRefusals[r.Reason.Error()] = Refusal{Node: r.Node, Text: r.Error(), At: time.Now()}
}

func (s *stats) snapshot() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.Stats
	out.LastRefusals = make(map[string]Refusal, len(s.LastRefusals))
	for k, v := range s.LastRefusals {
		out.LastRefusals[k] = v
	}
	return out
}
