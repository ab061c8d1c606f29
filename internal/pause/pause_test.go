package pause_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/internal/pause"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if !pause.For(t.Context(), time.Hour) || time.Since(began) != time.Hour {
			t.Errorf("an hour's pause ended after %s", time.Since(began))
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		if began = time.Now(); pause.For(ctx, time.Hour) || time.Since(began) != time.Minute {
			t.Errorf("a pause whose context ended after a minute took %s", time.Since(began))
		}
	})
}

func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad, tries := errors.New("bad"), 0
		after := func(n int) func() error {
			tries = 0
			return func() error {
				if tries++; tries > n {
					return nil
				}
				return bad
			}
		}
		began := time.Now()
		if err := pause.Until(t.Context(), time.Minute, time.Second, after(3)); err != nil || tries != 4 {
			t.Errorf("%v after %d tries", err, tries)
		}
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("three pauses took %s", took)
		}
		err := pause.Until(t.Context(), time.Minute, time.Second, after(100))
		if !errors.Is(err, bad) || !strings.Contains(err.Error(), "not so within 1m0s") {
			t.Errorf("%v after the time", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Second+1, cancel)
		began = time.Now()
		if err := pause.Until(ctx, time.Minute, time.Second, after(100)); !errors.Is(err, bad) ||
			!errors.Is(err, context.Canceled) || time.Since(began) > 11*time.Second {
			t.Errorf("%v, %s after the context's end", err, time.Since(began))
		}
	})
}
