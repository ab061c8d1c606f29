package consensus

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
)

func busyFor(d string) error {
	err := connect.NewError(connect.CodeResourceExhausted, errors.New("too many requests"))
	err.Meta().Set(RetryHeader, d)
	return err
}

func TestRetryAfter(t *testing.T) {
	other := connect.NewError(connect.CodeUnavailable, errors.New("away"))
	other.Meta().Set(RetryHeader, "1s")
	for _, c := range []struct {
		err  error
		want time.Duration
	}{
		{nil, 0}, {errors.New("another"), 0}, {other, 0}, {busyFor(""), 0}, {busyFor("soon"), 0}, {busyFor("-1s"), 0},
		{busyFor("150ms"), 150 * time.Millisecond}, {errors.Join(errors.New("server x"), busyFor("1s")), time.Second},
		{busyFor("8760h"), retryAtMost},
	} {
		if d := RetryAfter(c.err); d != c.want {
			t.Errorf("%v: %s, want %s", c.err, d, c.want)
		}
	}
}

func TestAServerThatIsBusyIsAskedAgainWhenItSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, calls := time.Now(), 0
		r, err := Patiently(t.Context(), proposeAttempt, func(context.Context) (string, error) {
			if calls++; calls < 4 {
				return "", busyFor("700ms")
			}
			return "the state", nil
		})
		if r != "the state" || err != nil || calls != 4 || time.Since(began) != 2100*time.Millisecond {
			t.Errorf("%q, %v after %d calls and %s", r, err, calls, time.Since(began))
		}
		began, calls = time.Now(), 0
		_, err = Patiently(t.Context(), proposeAttempt, func(context.Context) (string, error) {
			calls++
			return "",
				busyFor("1500ms")
		})
		if connect.CodeOf(err) != connect.CodeResourceExhausted || calls != 3 || time.Since(began) != proposeAttempt {
			t.Errorf("%v after %d calls and %s", err, calls, time.Since(began))
		}
	})
}
