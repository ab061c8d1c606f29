package consensus

import (
	"errors"
	"fmt"

	"github.com/skeinmesh/skein/identity"
)

// Errors that callers decide by.
var (
	// ErrNotLeader: this server does not lead. The error is a *NotLeaderError.
	ErrNotLeader = errors.New("this server does not lead")
	// ErrUncertain: the command may or may not have been committed. Retrying it with the same
	// request ID is safe and tells.
	ErrUncertain = errors.New("it is not known whether the command was committed: retry it with the same request ID")
	// ErrBase: a batch was decided on another index than the replica's; nothing was applied.
	ErrBase = errors.New("the batch was decided on another index")
	// ErrGone: the index is older than the archive, or newer than the state.
	ErrGone = errors.New("the index is not in the archive")
	// ErrUnanswered: what is missing here may be in the archive of a server that did not answer.
	ErrUnanswered = errors.New("not every server has answered")
	// ErrDiverged: two histories differ at the same index.
	ErrDiverged = errors.New("the agreed history differs from that of this replica")
	// ErrTooSoon: the archive was read for this member a moment ago; ask again in a few seconds.
	ErrTooSoon = errors.New("this member had the archive read a moment ago: ask again in a few seconds")
	// ErrForeignCluster: the state directory or a state belongs to another cluster.
	ErrForeignCluster = errors.New("it belongs to another cluster")
	// ErrCorrupt: a file on disk is damaged. The error names it and says how to recover.
	ErrCorrupt = errors.New("the file is damaged")
	// ErrInUse: another process has the state directory open.
	ErrInUse = errors.New("another process uses it")
	// ErrClosed: the replica or server was closed.
	ErrClosed = errors.New("it is closed")
	// ErrNoServer: no server could be asked.
	ErrNoServer = errors.New("no server can be reached")
)

// NotLeaderError says who leads, if that is known. It is an ErrNotLeader.
type NotLeaderError struct {
	Leader     identity.ID // zero when unknown
	wrongClock bool        // it does lead, and hands over
}

func (e *NotLeaderError) Error() string {
	if e.wrongClock {
		return "this leader's clock is far from the other servers': it decides nothing and hands over; set its clock"
	}
	if e.Leader.IsZero() {
		return "this server does not lead and knows no leader"
	}
	return "this server does not lead; node " + e.Leader.String() + " does"
}

// Is makes the error an ErrNotLeader.
func (e *NotLeaderError) Is(target error) bool { return target == ErrNotLeader }

// fileError names a damaged file, what is wrong with it, and the way out.
type fileError struct {
	path, problem, next string
}

func (e *fileError) Error() string {
	return fmt.Sprintf("%s is damaged (%s) and was left as it is: %s", e.path, e.problem, e.next)
}

func (e *fileError) Is(target error) bool { return target == ErrCorrupt }
