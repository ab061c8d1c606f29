package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/chaos/lab"
)

// Streams of random choices besides the one of kills, so that a kind of fault that is added changes no other.
const (
	spareStream = 1 + iota
	freezeStream
	burnStream
)

const (
	thawedFor  = 10 * time.Second // between two freezes, at least; at most four times that
	frozenMost = 30 * time.Second // an agent is frozen for at most that long
	phaseLeast = 20 * time.Second // cores burn, and rest, for at least that long
	phaseMost  = time.Minute      // and at most that
)

// claims keeps two faults from the same agent.
type claims struct {
	mu   sync.Mutex
	held map[string]bool
}

// claim claims those of the nodes that nobody holds.
func (c *claims) claim(nodes ...string) (taken []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range nodes {
		if !c.held[n] {
			c.held[n] = true
			taken = append(taken, n)
		}
	}
	return taken
}

func (c *claims) free(nodes ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range nodes {
		delete(c.held, n)
	}
}

// spared chooses the agents that are never killed: first a server, since only one that runs on can show what leaks with
// time, then any others. Of the servers at most a minority is spared.
func spared(spec *lab.Spec, n int, seed uint64) []string {
	nodes := slices.DeleteFunc(slices.Clone(spec.Nodes), func(n lab.Node) bool { return n.Role == lab.RoleHost })
	rng := rand.New(rand.NewPCG(seed, spareStream))
	rng.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	servers := 0
	for _, n := range nodes {
		if n.Server {
			servers++
		}
	}
	slices.SortStableFunc(nodes, func(a, b lab.Node) int {
		if a.Server == b.Server {
			return 0
		}
		if a.Server {
			return -1
		}
		return 1
	})
	var out []string
	for i, node := range nodes {
		if len(out) < n && (!node.Server || i < max(1, (servers-1)/2)) {
			out = append(out, node.Name)
		}
	}
	return out
}

// kill kills agents, after having looked that each of them still runs: what crashes must not pass for killed.
func (r *run) kill(ctx context.Context, nodes ...string) error {
	if err := r.lab.Died(nodes...); err != nil {
		return err
	}
	return r.lab.Kill(ctx, nodes...)
}

// halve kills half of all agents and starts them again at once.
func (r *run) halve(ctx context.Context, names []string) error {
	victims := r.claims.claim(names[:min(len(names), len(r.lab.Spec.NodeNames())/2)]...)
	defer r.claims.free(victims...)
	r.report.Halves++
	r.opts.Progress("round %d: kill -9 %d agents at once, and start them", r.report.Rounds, len(victims))
	for _, n := range victims {
		r.report.Kills[n]++
	}
	err := r.kill(ctx, victims...)
	if err == nil {
		err = r.lab.Start(ctx, victims...)
	}
	if ctx.Err() != nil {
		return nil // whoever ended ctx says why
	}
	return err
}

// freeze stops one agent after the other for a while, as SIGSTOP does, until ctx ends. It returns how many.
func (r *run) freeze(ctx context.Context) (frozen int, err error) {
	rng := rand.New(rand.NewPCG(r.opts.Seed, freezeStream))
	names := r.lab.Spec.NodeNames()
	for pause.For(ctx, thawedFor+time.Duration(rng.Int64N(int64(3*thawedFor)))) {
		node, long := names[rng.IntN(len(names))], time.Duration(1+rng.Int64N(int64(frozenMost)))
		if len(r.claims.claim(node)) == 0 {
			continue // dead just now
		}
		frozen++
		r.opts.Progress("freeze %s for %s", node, long.Round(100*time.Millisecond))
		if err := errors.Join(r.lab.Died(node), r.lab.Pause(node)); err != nil {
			return frozen, fmt.Errorf("freeze %s: %w", node, err)
		}
		pause.For(ctx, long)
		if err := r.lab.Resume(node); err != nil {
			return frozen, fmt.Errorf("let %s go on: %w", node, err)
		}
		r.claims.free(node)
	}
	return frozen, nil
}

// burn takes cores of this host and gives them back, in turns, until ctx ends. It returns for how long they were taken.
func (r *run) burn(ctx context.Context) (burned time.Duration, err error) {
	rng := rand.New(rand.NewPCG(r.opts.Seed, burnStream))
	phase := func() time.Duration { return phaseLeast + time.Duration(rng.Int64N(int64(phaseMost-phaseLeast))) }
	for pause.For(ctx, phase()) {
		long := phase()
		r.opts.Progress("burn %d cores for %s", r.opts.Burn, long.Round(time.Second))
		end, err := lab.Burn(r.opts.Burn)
		if err != nil {
			return burned, err
		}
		began := time.Now()
		pause.For(ctx, long)
		end()
		burned += time.Since(began)
	}
	return burned, nil
}
