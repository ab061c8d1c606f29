package agent

import (
	"errors"
	"io"
	"testing"
)

func TestFinalErrorsReadAsBefore(t *testing.T) {
	if final(nil) != nil {
		t.Error("no error became one")
	}
	err := final(errors.Join(errRevoked, io.EOF))
	if err.Error() != errors.Join(errRevoked, io.EOF).Error() {
		t.Errorf("it reads %q", err)
	}
	for _, target := range []error{ErrFinal, errRevoked, io.EOF} {
		if !errors.Is(err, target) {
			t.Errorf("it is not %v", target)
		}
	}
	if errors.Is(errRevoked, ErrFinal) {
		t.Error("an error is final that nobody marked")
	}
}
