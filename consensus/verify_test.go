package consensus

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestLeaderIsVerified(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		l := c.leader()
		term, since, err := l.raft.VerifyLeader(within(t, time.Second))
		if err != nil || term != l.raft.raft.CurrentTerm() || since.After(time.Now()) {
			t.Fatalf("the leader of term %d: %d since %s, %v", l.raft.raft.CurrentTerm(), term, since, err)
		}
		for _, o := range c.others(l) {
			var no *NotLeaderError
			if _, _, err := o.raft.VerifyLeader(within(t, time.Second)); !errors.As(err, &no) || no.Leader != l.id {
				t.Errorf("a follower is verified: %v", err)
			}
		}
		c.net.cut(ids(l), ids(c.others(l)...))
		if _, _, err := l.raft.VerifyLeader(within(t, 100*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cut off, in time: %v", err)
		}
		if _, _, err := l.raft.VerifyLeader(within(t, 5*time.Second)); !errors.Is(err, ErrNotLeader) {
			t.Errorf("cut off: %v", err)
		}
		c.net.heal()
	})
}

func TestLoneServerIsVerifiedAtOnce(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		c.leader()
		began := time.Now()
		if _, _, err := c.nodes[0].raft.VerifyLeader(within(t, time.Second)); err != nil ||
			time.Since(began) > 10*time.Millisecond {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}

// Answers to a leader are late, so that one is still on its way when the others have another leader, and its own
// requests are lost: it must never be verified by what was said before it asked. The library by itself would be.
func TestDeposedLeaderIsNeverVerifiedByOldAnswers(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		var asked, verified, library atomic.Int64
		for i := range 12 {
			old := c.leader()
			var newer atomic.Bool // another leads
			c.net.delay(ids(c.others(old)...), ids(old), 1500*time.Millisecond)
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Millisecond) // virtual
			if !old.raft.IsLeader() {
				c.net.heal()
				c.agree()
				continue
			}
			c.net.cutWay(ids(old), ids(c.others(old)...))
			stop := make(chan struct{})
			var all sync.WaitGroup
			all.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
					}
					for _, o := range c.others(old) {
						if o.raft.IsLeader() {
							newer.Store(true)
						}
					}
					if !newer.Load() {
						continue
					}
					all.Go(func() {
						asked.Add(1)
						if _, _, err := old.raft.VerifyLeader(within(t, time.Second)); err == nil {
							verified.Add(1)
						}
					})
					// more would fill its queue, and then its Shutdown hangs
					if old.raft.raft.State() == raft.Leader && asked.Load()%20 == 0 {
						f := old.raft.raft.VerifyLeader()
						all.Go(func() {
							if old.raft.wait(f) == nil {
								library.Add(1)
							}
						})
					}
				}
			})
			time.Sleep(3 * time.Second) // virtual: an election, and all answers that were on their way
			close(stop)
			all.Wait()
			c.net.heal()
			c.agree()
			if i == 0 {
				c.propose(c.leader(), token(1))
			}
		}
		t.Logf("%d questions to leaders that were deposed; the library alone would have verified %d",
			asked.Load(), library.Load())
		if asked.Load() == 0 || library.Load() == 0 {
			t.Error("no deposed leader was asked while an old answer was on its way: the test proves nothing")
		}
		if verified.Load() > 0 {
			t.Errorf("a deposed leader was verified %d times", verified.Load())
		}
	})
}

// A round proves something to those only who came before it began, and many share one.
func TestCallersShareTheNextRound(t *testing.T) {
	simulate(t, func(t *testing.T, _ *cluster) {
		var r rounds
		var running, most, proofs atomic.Int64
		var all sync.WaitGroup
		for i := range 500 {
			all.Go(func() {
				time.Sleep(time.Duration(i%50) * time.Millisecond) // virtual
				came := time.Now()
				err := r.join(t.Context(), func() error {
					most.Store(max(most.Load(), running.Add(1)))
					defer running.Add(-1)
					proofs.Add(1)
					time.Sleep(10 * time.Millisecond)
					return nil
				})
				if err != nil || time.Since(came) > 20*time.Millisecond {
					t.Errorf("%v after %s", err, time.Since(came))
				}
				if time.Since(came) < 10*time.Millisecond {
					t.Errorf("served after %s by a round that was under way", time.Since(came))
				}
			})
		}
		all.Wait()
		if most.Load() != 1 || proofs.Load() > 10 {
			t.Errorf("%d rounds, %d at a time", proofs.Load(), most.Load())
		}
		failed := errors.New("no")
		if err := r.join(t.Context(), func() error { return failed }); err != failed {
			t.Error(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.join(ctx, func() error { time.Sleep(time.Second); return nil }); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		time.Sleep(2 * time.Second) // virtual: the round goes on for whoever else may wait
	})
}

func TestMajorityIsOfVotersInTheTermAndLater(t *testing.T) {
	servers := []raft.Server{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "n", Suffrage: raft.Nonvoter},
		{ID: "m", Suffrage: raft.Nonvoter}}
	for name, c := range map[string]struct {
		acks map[raft.ServerID]ack
		want bool
	}{
		"nobody":           {nil, false},
		"one":              {map[raft.ServerID]ack{"b": {5, 11}}, true},
		"sent before":      {map[raft.ServerID]ack{"b": {5, 10}, "c": {5, 9}}, false},
		"an earlier term":  {map[raft.ServerID]ack{"b": {4, 11}}, false},
		"a later term":     {map[raft.ServerID]ack{"b": {6, 11}}, false},
		"without votes":    {map[raft.ServerID]ack{"n": {5, 11}, "m": {5, 12}}, false},
		"with and without": {map[raft.ServerID]ack{"n": {5, 11}, "c": {5, 12}}, true},
		"a stranger":       {map[raft.ServerID]ack{"x": {5, 11}}, false},
	} {
		a := newAcks()
		for id, k := range c.acks {
			a.note(id, k)
		}
		if got := a.majority("a", servers, 5, 10); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
	a := newAcks()
	a.note("b", ack{5, 20})
	a.note("b", ack{5, 11}) // a late answer takes nothing back
	a.note("b", ack{4, 30})
	if !a.majority("a", servers, 5, 19) {
		t.Error("an older answer replaced a newer one")
	}
}

// What runs while this server leads: one at a time, with the whole past, and it ends with the term.
func TestOnLeadRunsWithTheTerm(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		var mu sync.Mutex
		running := map[string]Lead{} // by server
		terms := map[uint64]bool{}
		c.tune = func(cfg *ServerConfig) {
			id := cfg.ID.String()
			cfg.OnLead = func(ctx context.Context, l Lead) {
				mu.Lock()
				if _, twice := running[id]; twice || terms[l.Term] {
					t.Errorf("%s runs twice, or term %d does", id, l.Term)
				}
				running[id], terms[l.Term] = l, true
				mu.Unlock()
				if err := l.Verify(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, ErrNotLeader) {
					t.Errorf("verify: %v", err)
				}
				<-ctx.Done()
				mu.Lock()
				delete(running, id)
				mu.Unlock()
			}
		}
		c.form(3)
		for i := range 5 {
			old := c.leader()
			c.propose(old, token(i))
			old.crash()
			next := c.leader()
			c.eventually("the new leader runs it with all that was agreed", func() error {
				mu.Lock()
				defer mu.Unlock()
				l, ok := running[next.id.String()]
				if !ok || !next.raft.IsLeader() {
					return fmt.Errorf("it does not run on %s", next.name)
				}
				if l.State().Token(tokenID(i)) == nil {
					t.Errorf("term %d began without token %d", l.Term, i)
				}
				return nil
			})
			old.start(false)
			c.agree()
			time.Sleep(3 * time.Second) // virtual
		}
		l := c.leader()
		l.close()
		mu.Lock()
		defer mu.Unlock()
		if _, still := running[l.id.String()]; still {
			t.Error("it still runs on a server that was stopped")
		}
	})
}
