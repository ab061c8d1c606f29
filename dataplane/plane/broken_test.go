package plane

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/reconcile"
)

// failing is a subsystem that cannot be repaired until the test allows it.
type failing struct {
	subsystem
	tries chan error // what Repair returns, one after the other
}

func (f *failing) Name() string                                 { return "nft" }
func (f *failing) Forget()                                      {}
func (f *failing) Repair(dataplane.Spec) (int, []string, error) { return 0, nil, <-f.tries }

// TestDamageThatStaysIsToldOf: OnBroken is called once for drift that cannot be repaired, so that the caller can find
// out why.
func TestDamageThatStaysIsToldOf(t *testing.T) {
	told := make(chan string, 10)
	f := &failing{tries: make(chan error)}
	p := &Plane{spec: &dataplane.Spec{}, opts: Options{OnBroken: func(s string) { told <- s },
		OnDrift: func(s string) { told <- "repaired " + s }}}
	p.add(f)
	p.runner = reconcile.New(reconcile.Options{Told: p.report, Policy: reconcile.Policy{Burst: 10, Every: time.Second,
		RetryFirst: time.Millisecond, RetryLast: time.Millisecond}}, p.parts[0].target)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); p.runner.Run(ctx) }()
	broken := errors.New("no")
	for range 2 {
		p.mark(ofNft)
		for _, err := range []error{broken, broken, broken, broken, nil} { // the first failure is tried again at once
			select {
			case f.tries <- err:
			case <-time.After(10 * time.Second):
				t.Fatal("it is not tried again")
			}
		}
		for _, want := range []string{"nft", "repaired nft"} {
			if got := <-told; got != want {
				t.Errorf("told of %q, want %q", got, want)
			}
		}
	}
	cancel()
	<-ended
	if len(told) != 0 {
		t.Errorf("told of %q besides", <-told)
	}
}
