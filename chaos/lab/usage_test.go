package lab

import (
	"errors"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/usage"
)

func TestRates(t *testing.T) {
	at := func(seconds, wakeups int64) *skeinv1.UsageResponse {
		return &skeinv1.UsageResponse{UptimeNanos: seconds * 1e9, Wakeups: uint64(wakeups)}
	}
	before := map[string]*skeinv1.UsageResponse{"dc1": at(1, 10), "home1": at(1, 10), "gone": at(1, 10)}
	after := map[string]*skeinv1.UsageResponse{"dc1": at(3, 40), "home1": {StartedAt: 9, UptimeNanos: 1e9}}
	r, err := Rates(before, after)
	if len(r) != 1 || r["dc1"].GetWakeupsPerSecond() != 15 {
		t.Errorf("%v, want dc1 alone, with 15 wake-ups a second", r)
	}
	if !errors.Is(err, usage.ErrRestarted) {
		t.Errorf("%v, want what became of the others", err)
	}
}
