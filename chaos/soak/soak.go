package soak

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

// Mesh is the lab that is soaked when no other is named.
//
//go:embed soak.yaml
var Mesh []byte

const (
	lookEvery    = 200 * time.Millisecond // between two looks at every agent
	commandEvery = time.Second            // between two commands
	killedAtOnce = 3                      // at most
	slowestRound = 12 * time.Second       // a round of kills and returns that takes longer fails the run
)

// Options say how a mesh is soaked.
type Options struct {
	For      time.Duration // how long agents are killed
	Pause    time.Duration // an agent stays dead for at most that long; default 4 s
	Recovery time.Duration // what the mesh gets to recover at the end; default 60 s
	Seed     uint64
	Progress func(format string, args ...any)
}

// Report is what a soaking came to.
type Report struct {
	Seed        uint64             `json:"seed"`
	Seconds     float64            `json:"seconds"`
	Rounds      int                `json:"rounds"`
	Kills       map[string]int     `json:"kills"`
	Looks       int                `json:"looks"`             // answers held against the invariants
	Commands    int                `json:"commands"`          // acknowledged while agents died
	Refused     int                `json:"refused"`           // commands that found no leader in time
	RecoveredIn map[string]float64 `json:"recovered_seconds"` // by check, after the last kill was healed
}

type run struct {
	lab    *lab.Lab
	opts   Options
	rng    *rand.Rand
	ledger *Ledger
	direct map[[2]string]bool // pairs, from and to, that have shown that they can
	report Report
}

// Run soaks a lab that is up. The error is nil only when every check held.
func Run(ctx context.Context, l *lab.Lab, opts Options) (Report, error) {
	if opts.Pause <= 0 {
		opts.Pause = 4 * time.Second
	}
	if opts.Recovery <= 0 {
		opts.Recovery = time.Minute
	}
	if opts.Progress == nil {
		opts.Progress = func(string, ...any) {}
	}
	r := &run{
		lab: l, opts: opts, rng: rand.New(rand.NewPCG(opts.Seed, 0)), ledger: NewLedger(), direct: map[[2]string]bool{},
		report: Report{Seed: opts.Seed, Kills: map[string]int{}, RecoveredIn: map[string]float64{}},
	}
	start := time.Now()
	err := r.all(ctx)
	r.report.Seconds = time.Since(start).Seconds()
	r.report.Looks, r.report.Commands = r.ledger.Counts()
	return r.report, err
}

func (r *run) all(ctx context.Context) error {
	if err := r.settle(ctx); err != nil {
		return fmt.Errorf("before the first kill: %w", err)
	}
	if err := r.soak(ctx); err != nil {
		return err
	}
	return r.recover(ctx)
}

// settle waits for a whole mesh and learns which pairs can be direct.
func (r *run) settle(ctx context.Context) error {
	if err := r.lab.WaitConverged(ctx, r.opts.Recovery); err != nil {
		return err
	}
	if err := r.reachable(ctx); err != nil {
		return err
	}
	for _, n := range r.lab.Spec.NodeNames() {
		peers, err := r.peers(ctx, n)
		if err != nil {
			return err
		}
		for _, p := range peers {
			if p.GetPath() == "direct" {
				r.direct[[2]string{n, p.GetName()}] = true
			}
		}
	}
	r.opts.Progress("the mesh is whole: %d of %d paths are direct", len(r.direct), len(r.lab.Spec.Nodes)*(len(r.lab.Spec.Nodes)-1))
	return nil
}

// soak kills and restarts agents until the time is over, and watches them meanwhile.
func (r *run) soak(ctx context.Context) error {
	watch, stop := context.WithCancelCause(ctx)
	var watchers sync.WaitGroup
	for _, n := range r.lab.Spec.NodeNames() {
		watchers.Go(func() { r.watch(watch, stop, n) })
	}
	var refused int
	watchers.Go(func() { refused = r.command(watch) })
	end := time.Now().Add(r.opts.For)
	var err error
	for err == nil && time.Now().Before(end) && watch.Err() == nil {
		err = r.round(watch)
	}
	broken := context.Cause(watch)
	stop(nil)
	watchers.Wait()
	r.report.Refused = refused
	if broken != nil {
		return broken
	}
	if err != nil {
		return err
	}
	if least := max(1, int(r.opts.For/slowestRound)); r.report.Rounds < least {
		return fmt.Errorf("only %d rounds of kills in %s, want at least %d: this run proves nothing", r.report.Rounds, r.opts.For, least)
	}
	return nil
}

// round kills some agents at once and lets each return after a pause of its own.
func (r *run) round(ctx context.Context) error {
	names := r.lab.Spec.NodeNames()
	r.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	victims := names[:1+r.rng.IntN(min(killedAtOnce, len(names)))]
	pauses := make([]time.Duration, len(victims))
	for i := range victims {
		pauses[i] = time.Duration(r.rng.Int64N(int64(r.opts.Pause)))
	}
	rest := time.Duration(r.rng.Int64N(int64(r.opts.Pause)))
	r.report.Rounds++
	r.opts.Progress("round %d: kill -9 %s", r.report.Rounds, strings.Join(victims, " "))
	errs := make([]error, len(victims))
	var wg sync.WaitGroup
	for i, n := range victims {
		r.report.Kills[n]++
		wg.Go(func() {
			if errs[i] = r.lab.Kill(ctx, n); errs[i] == nil && pause(ctx, pauses[i]) {
				errs[i] = r.lab.Start(ctx, n)
			}
		})
	}
	wg.Wait()
	pause(ctx, rest)
	if ctx.Err() != nil {
		return nil // whoever ended ctx says why
	}
	return errors.Join(errs...)
}

// watch holds what an agent says against the invariants, whenever it answers.
func (r *run) watch(ctx context.Context, stop context.CancelCauseFunc, node string) {
	client, err := r.lab.Client(node)
	if err != nil {
		stop(err)
		return
	}
	for pause(ctx, lookEvery) {
		least := r.ledger.Applied(node)
		ask, cancel := context.WithTimeout(ctx, 2*time.Second)
		s, err := client.Status(ask, &skeinv1.StatusRequest{})
		cancel()
		if err != nil {
			continue // dead just now
		}
		if err := r.ledger.Status(node, least, s); err != nil {
			stop(fmt.Errorf("an invariant is broken: %w", err))
		}
	}
}

// command has the mesh decide something all the time, through one agent after the other. It returns how
// often that failed, which is no fault while servers are dead.
func (r *run) command(ctx context.Context) (refused int) {
	names := r.lab.Spec.NodeNames()
	for i := 0; pause(ctx, commandEvery); i++ {
		node := names[i%len(names)]
		client, err := r.lab.Client(node)
		if err != nil {
			return refused
		}
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		t, err := client.CreateToken(ask, &skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(24 * time.Hour), Label: fmt.Sprintf("soak %d", i)})
		cancel()
		if err != nil {
			refused++
			continue
		}
		r.ledger.Acknowledged(node, t.GetInfo().GetId())
	}
	return refused
}

// recover heals everything and waits until all is well.
func (r *run) recover(ctx context.Context) error {
	healed := time.Now()
	if err := r.lab.Heal(ctx); err != nil {
		return fmt.Errorf("start the agents that were killed last: %w", err)
	}
	for _, c := range []struct {
		name string
		f    func(context.Context) error
	}{
		{"agreement", func(ctx context.Context) error { return r.lab.WaitConverged(ctx, r.opts.Recovery) }},
		{"reachability", r.reachable},
		{"direct paths", r.upgraded},
		{"no errors", r.faultless},
		{"commands", r.remembered},
	} {
		if err := c.f(ctx); err != nil {
			return fmt.Errorf("after everything was healed: %s: %w", c.name, err)
		}
		r.report.RecoveredIn[c.name] = time.Since(healed).Seconds()
		r.opts.Progress("%s: %.1fs after healing", c.name, time.Since(healed).Seconds())
	}
	return nil
}

func (r *run) reachable(ctx context.Context) error {
	yes := true
	all := r.lab.Spec.NodeNames()
	return r.lab.Expect(ctx, r.opts.Recovery, lab.Expect{From: all, To: all, Reach: &yes, Count: 3})
}

// upgraded waits until every pair that was direct is direct.
func (r *run) upgraded(ctx context.Context) error {
	return r.eventually(ctx, func(node string) error {
		peers, err := r.peers(ctx, node)
		if err != nil {
			return err
		}
		for _, p := range peers {
			if r.direct[[2]string{node, p.GetName()}] && (p.GetPath() != "direct" || !p.GetAlive()) {
				return fmt.Errorf("from %s to %s the path is %s, though it can be direct: %s", node, p.GetName(), p.GetPath(), p.GetReason())
			}
		}
		return nil
	})
}

func (r *run) faultless(ctx context.Context) error {
	return r.eventually(ctx, func(node string) error {
		s, err := r.status(ctx, node)
		if err != nil {
			return err
		}
		for _, p := range s.GetProblems() {
			if p.GetSeverity() == "error" {
				return fmt.Errorf("%s reports an error: %s: %s", node, p.GetSubject(), p.GetMessage())
			}
		}
		return nil
	})
}

func (r *run) remembered(ctx context.Context) error {
	return r.eventually(ctx, func(node string) error {
		client, err := r.lab.Client(node)
		if err != nil {
			return err
		}
		t, err := client.ListTokens(ctx, &skeinv1.ListTokensRequest{})
		if err != nil {
			return fmt.Errorf("ask %s for its tokens: %w", node, err)
		}
		return r.ledger.Tokens(node, t.GetTokens())
	})
}

// eventually waits until check holds for every node.
func (r *run) eventually(ctx context.Context, check func(node string) error) error {
	end := time.Now().Add(r.opts.Recovery)
	for {
		var errs []error
		for _, n := range r.lab.Spec.NodeNames() {
			errs = append(errs, check(n))
		}
		err := errors.Join(errs...)
		if err == nil || time.Now().After(end) {
			return err
		}
		if !pause(ctx, lookEvery) {
			return context.Cause(ctx)
		}
	}
}

func (r *run) status(ctx context.Context, node string) (*skeinv1.StatusResponse, error) {
	client, err := r.lab.Client(node)
	if err != nil {
		return nil, err
	}
	s, err := client.Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask %s for its status: %w", node, err)
	}
	return s, nil
}

func (r *run) peers(ctx context.Context, node string) ([]*skeinv1.PeerView, error) {
	client, err := r.lab.Client(node)
	if err != nil {
		return nil, err
	}
	p, err := client.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask %s for its peers: %w", node, err)
	}
	return slices.Clone(p.GetPeers()), nil
}

// pause waits, and tells whether it could.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
