// Package history answers what was: the log's events and the agreed state after each of them, and this node's own plans
// and paths at moments of the past, which its journals keep. What this node does not have any more, a server may.
package history

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
)

// Archive is the log as this node and its servers keep it.
type Archive struct {
	Replica *consensus.Replica
	Client  *consensus.Client // asks servers
}

// eventsPage is how many events one read of the archive takes.
const eventsPage = 512

// moment is the index of a moment that is asked for, which is an index, a time, or now.
func (a Archive) moment(ctx context.Context, index uint64, at int64) (uint64, error) {
	switch {
	case index > 0 && at != 0:
		return 0, connect.NewError(connect.CodeInvalidArgument,
			errors.New("both an index and a time are given: give one of them"))
	case at == 0:
		return index, nil
	}
	if t := time.Unix(0, at); t.After(time.Now()) {
		return 0, notYet(t)
	}
	return a.indexAt(ctx, at)
}

func notYet(t time.Time) error {
	return connect.NewError(connect.CodeInvalidArgument,
		fmt.Errorf("%s is in the future: ask for a moment in the past", t.Format(time.RFC3339)))
}

// indexAt is the last event that was decided at a time or before, as far as archives go.
func (a Archive) indexAt(ctx context.Context, at int64) (uint64, error) {
	index := uint64(0)
	oldest := int64(0)
	err := a.EachEvent(ctx, a.Replica.State().Index(), func(e *skeinv1.Event) {
		if oldest == 0 {
			oldest = e.GetTime()
		}
		if e.GetTime() <= at {
			index = e.GetIndex()
		}
	})
	if err != nil {
		return 0, api.Error(err)
	}
	if index == 0 {
		return 0, connect.NewError(connect.CodeOutOfRange, fmt.Errorf("the oldest event that is kept, here or by a server "+
			"that answers, is of %s; ask for a later time", time.Unix(0, oldest).Format(time.RFC3339)))
	}
	return index, nil
}

const (
	archivePatience = 3 * time.Second  // with a server that may have older events
	statePatience   = 15 * time.Second // with servers that may have a state
)

// EachEvent walks the archived events up to an index: a server's, where it has older ones than this node and answers.
func (a Archive) EachEvent(ctx context.Context, last uint64, f func(*skeinv1.Event)) error {
	ctx, cancel := context.WithTimeout(ctx, archivePatience)
	defer cancel()
	for after := uint64(0); ; {
		page, _, _, err := a.Client.ReadEvents(ctx, after, eventsPage)
		if err != nil && !errors.Is(err, consensus.ErrUnanswered) { // what is here has to do
			return err
		}
		for _, e := range page {
			if e.GetIndex() > last {
				return nil
			}
			f(e)
			after = e.GetIndex()
		}
		if len(page) == 0 {
			return nil
		}
	}
}

// StateThen is the agreed state at a moment.
func (a Archive) StateThen(ctx context.Context, index uint64, at int64) (*events.State, error) {
	index, err := a.moment(ctx, index, at)
	if err != nil {
		return nil, err
	}
	st, err := a.StateAt(ctx, index)
	return st, api.Error(err)
}

// StateAt is the agreed state at an index, from this node's archive or else from a server's.
func (a Archive) StateAt(ctx context.Context, at uint64) (*events.State, error) {
	if at == 0 {
		return a.Replica.State(), nil
	}
	st, err := a.Replica.At(at)
	if err == nil {
		return st, nil
	}
	if at > a.Replica.State().Index() {
		return nil, connect.NewError(connect.CodeOutOfRange, err)
	}
	ctx, cancel := context.WithTimeout(ctx, statePatience)
	defer cancel()
	remote, rerr := a.Client.ReadState(ctx, at)
	if rerr != nil {
		return nil, connect.NewError(connect.CodeOutOfRange, fmt.Errorf("%w; no server has it either: %w", err, rerr))
	}
	return remote, nil
}
