package agent

import "errors"

// ErrFinal marks an end that a supervisor must not undo by starting the agent again: somebody asked for it, or this
// node is a member of no cluster and stays so until somebody acts. `skein up` then exits with a status of its own.
var ErrFinal = errors.New("the agent has ended for good")

// finalError is an error that is ErrFinal too, and reads as it did before.
type finalError struct{ error }

func (e finalError) Unwrap() error        { return e.error }
func (e finalError) Is(target error) bool { return target == ErrFinal }

// final marks an error; there may be none.
func final(err error) error {
	if err == nil {
		return nil
	}
	return finalError{err}
}
