package consensus

import (
	"errors"
	"fmt"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// ErrTooLarge means that a state has more bytes than what reads it accepts. The leader holds the state far below that
// (events.MaxStateBytes); a state of an earlier version may be above.
var ErrTooLarge = errors.New("the agreed state is too large")

// maxSentState is the largest state that is sent to a node: a message with it stays below maxMessage.
const maxSentState = maxMessage - 1<<20

const tooLargeNext = "make it smaller, see docs/recovery.md"

// checkSealed refuses to write a state that no decoder would read again: the state on disk stays.
func checkSealed(s *events.State, most int) error {
	if n := s.Size() + sealHeader; n > most {
		return fmt.Errorf("%w: at index %d it has %d MiB, and %d MiB can be written and read again: %s", ErrTooLarge,
			s.Index(), n>>20, most>>20, tooLargeNext)
	}
	return nil
}

// CheckSent refuses to send a state that the other end would not read.
func CheckSent(s *events.State) error {
	if n := s.Size(); n > maxSentState {
		return fmt.Errorf("%w: at index %d it has %d MiB, and a message holds %d MiB: %s", ErrTooLarge, s.Index(), n>>20,
			maxSentState>>20, tooLargeNext)
	}
	return nil
}

// sent is CheckSent for answers to other nodes.
func sent(s *events.State) error {
	if err := CheckSent(s); err != nil {
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	return nil
}

// Problem returns why this replica's state can no longer be written as a whole, or nil. The replica still works: each
// event is written, but the archive and the Raft log are not shortened until the state is smaller.
func (r *Replica) Problem() error { return checkSealed(r.State(), r.most) }

// portionBytes is how much of the archive goes into one message: an event may have a whole pool, and a message holds a
// few dozen of the largest.
const portionBytes = 8 << 20

// Portion returns as many of the first events as fit into a message, at least one.
func Portion(evs []*skeinv1.Event) []*skeinv1.Event { return portion(evs, portionBytes) }

func portion(evs []*skeinv1.Event, most int) []*skeinv1.Event {
	bytes := 0
	for i, e := range evs {
		if bytes += proto.Size(e); bytes > most && i > 0 {
			return evs[:i]
		}
	}
	return evs
}
