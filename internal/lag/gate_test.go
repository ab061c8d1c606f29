package lag

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// As many are let in as the limit says, the others in their order, and those that give up leave no hole.
func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Gate{Most: 2, Meter: &Meter{}}
		var in []int
		enter := func(i int, ctx context.Context) {
			if err := g.Enter(ctx); err == nil {
				in = append(in, i)
			}
		}
		impatient, giveUp := context.WithCancel(t.Context())
		for i, ctx := range []context.Context{t.Context(), t.Context(), impatient, t.Context(), t.Context()} {
			go enter(i, ctx)
			synctest.Wait()
		}
		if len(in) != 2 {
			t.Fatalf("%v are inside, want two", in)
		}
		giveUp()
		synctest.Wait()
		g.Leave()
		synctest.Wait()
		if len(in) != 3 || in[2] != 3 {
			t.Fatalf("after one had left, %v had been inside; want the next that still waited", in)
		}
		g.Meter.Note(time.Now().Add(-time.Second), time.Now())
		g.Leave() // late: the limit is one, and one is inside
		synctest.Wait()
		if len(in) != 3 {
			t.Fatalf("a late process let in %v", in)
		}
		g.Leave()
		synctest.Wait()
		if len(in) != 4 {
			t.Fatalf("an empty gate let in %v", in)
		}
		g.Leave()
	})
}

func TestGateGivenUp(t *testing.T) {
	g := &Gate{Most: 1}
	if err := g.Enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.Enter(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a gate that is full and a context that has ended: %v", err)
	}
	g.Leave()
	if err := g.Enter(t.Context()); err != nil {
		t.Error(err)
	}
	var none *Gate
	if err := none.Enter(ctx); err != nil {
		t.Error(err)
	}
	none.Leave()
}
