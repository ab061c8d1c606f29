package pause_test

import (
	"context"
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
