package events

import (
	"errors"
	"fmt"
)

var (
	// ErrUnknownEvent is returned by Fold for an event that this version of skein cannot fold.
	ErrUnknownEvent = errors.New("unknown event")
	// ErrGap is returned by Fold for an event that does not follow the state's last one.
	ErrGap = errors.New("event out of order")
)

// Code says what kind of refusal an Error is. The values are those of Connect's codes.
type Code string

// The codes with which commands are refused.
const (
	InvalidArgument    Code = "invalid_argument"
	NotFound           Code = "not_found"
	AlreadyExists      Code = "already_exists"
	PermissionDenied   Code = "permission_denied"
	FailedPrecondition Code = "failed_precondition"
	ResourceExhausted  Code = "resource_exhausted"
	Aborted            Code = "aborted" // it was made from what is not so any more: make it anew
)

// Error is a command's refusal. Its message is meant for the user.
type Error struct {
	Code    Code
	Message string
}

// Error is the message alone.
func (e *Error) Error() string { return e.Message }

// CodeOf is the code of a refusal, or empty for any other error.
func CodeOf(err error) Code {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func refuse(code Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}
