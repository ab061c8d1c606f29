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

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// Mesh is the lab that is soaked when no other is named.
//
//go:embed soak.yaml
var Mesh []byte

const (
	lookEvery    = 200 * time.Millisecond // between two looks at every agent, of at most
	lookAgents   = 8                      // agents; of more each is looked at more rarely, since looking is work for them
	commandEvery = time.Second            // between two commands
	killedAtOnce = 3                      // at most
	wakeEvery    = 100 * time.Millisecond // between two echoes to a peer that should be reached directly
	wakeEchoes   = 20
	slowestRound = 12 * time.Second // a round of kills and returns that takes longer fails the run, of at most
	roundAgents  = 16               // agents; of more it may take longer in proportion
	tokensKept   = 100              // of the commands' tokens; older ones are revoked, so that the state does not grow
)

// Options say how a mesh is soaked.
type Options struct {
	For      time.Duration // how long agents are killed
	Pause    time.Duration // an agent stays dead for at most that long; default 4 s
	Recovery time.Duration // what the mesh gets to recover at the end; default 60 s
	// what a whole mesh gets to come to rest before it is measured; default a tenth of For, at most 150 s
	Settle   time.Duration
	Sample   time.Duration // between two readings of what agents hold; default 10 s
	Burn     int           // processes that take a core of this host each, now and then
	Freeze   bool          // agents are stopped by SIGSTOP now and then, for at most 30 s
	Half     int           // in every such round half of the agents are killed and start at once; 0: in none
	Spare    int           // agents that are never killed: they show what leaks with time
	Seed     uint64
	Progress func(format string, args ...any)
}

// withDefaults fills in what was not said.
func (o Options) withDefaults() Options {
	for _, d := range []struct {
		set *time.Duration
		to  time.Duration
	}{{&o.Pause, 4 * time.Second}, {&o.Recovery, time.Minute}, {&o.Settle, min(o.For/10, 150*time.Second)},
		{&o.Sample, 10 * time.Second}} {
		if *d.set <= 0 {
			*d.set = d.to
		}
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	return o
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
	Freezes     int                `json:"freezes"`
	Halves      int                `json:"halves"`           // rounds in which half of the agents were killed at once
	Burned      float64            `json:"burned_seconds"`   // for how long the cores were taken
	Spared      []string           `json:"spared,omitempty"` // never killed
	Resources   Resources          `json:"resources"`
}

// Resources is what a soak shows of what agents and the kernel hold.
type Resources struct {
	Readings int     `json:"readings"`
	Mesh     []Trend `json:"mesh"` // of the median of all agents, and of the sum of all connections
	// of each run of an agent, and each namespace, that was read for long enough
	Runs       []Trend `json:"runs"`
	Rest       []Rest  `json:"rest"`                  // before the first fault and after the last
	NotCounted string  `json:"not_counted,omitempty"` // why connections are not
}

type answers = map[string]*skeinv1.UsageResponse

type run struct {
	lab    *lab.Lab
	opts   Options
	rng    *rand.Rand
	ledger *Ledger
	direct map[[2]string]bool // pairs, from and to, that have shown that they can
	mortal []string           // nodes whose agents may be killed
	claims claims
	held   resources
	soaked time.Duration // when the first fault came, since held.began
	healed time.Duration // and when the last was over
	report Report
}

// Run soaks a lab that is up. The error is nil only when every check held.
func Run(ctx context.Context, l *lab.Lab, opts Options) (Report, error) {
	opts = opts.withDefaults()
	r := &run{
		lab: l, opts: opts, rng: rand.New(rand.NewPCG(opts.Seed, 0)), ledger: NewLedger(), direct: map[[2]string]bool{},
		claims: claims{held: map[string]bool{}}, held: resources{began: time.Now()},
		report: Report{Seed: opts.Seed, Kills: map[string]int{}, RecoveredIn: map[string]float64{},
			Spared: spared(l.Spec, opts.Spare, opts.Seed)},
	}
	r.mortal = slices.DeleteFunc(l.Spec.NodeNames(), func(n string) bool { return slices.Contains(r.report.Spared, n) })
	if len(r.mortal) == 0 {
		return r.report, errors.New("all agents are spared: there is none to kill")
	}
	err := errors.Join(r.all(ctx), crashed(l))
	r.trends()
	r.report.Seconds = time.Since(r.held.began).Seconds()
	r.report.Looks, r.report.Commands = r.ledger.Counts()
	return r.report, err
}

func (r *run) all(ctx context.Context) error {
	if err := r.awaitMesh(ctx); err != nil {
		return fmt.Errorf("before the first kill: %w", err)
	}
	sampling, stop := context.WithCancel(ctx)
	var sampler sync.WaitGroup
	sampler.Go(func() { r.sample(sampling) })
	defer sampler.Wait()
	defer stop()
	if err := r.rest(ctx); err != nil {
		return fmt.Errorf("before the first kill: %w", err)
	}
	if err := r.soak(ctx); err != nil {
		return err
	}
	if err := r.recover(ctx); err != nil {
		return err
	}
	return r.leaks(ctx)
}

// awaitMesh waits for a whole mesh and learns which pairs can be direct.
func (r *run) awaitMesh(ctx context.Context) error {
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
	r.opts.Progress("the mesh is whole: %d of %d paths are direct", len(r.direct),
		len(r.lab.Spec.Nodes)*(len(r.lab.Spec.Nodes)-1))
	return nil
}

// soak kills and restarts agents until the time is over, and watches them meanwhile.
func (r *run) soak(ctx context.Context) error {
	watch, stop := context.WithCancelCause(ctx)
	var watchers sync.WaitGroup
	for _, n := range r.lab.Spec.NodeNames() {
		watchers.Go(func() { r.watch(watch, stop, n) })
	}
	watchers.Go(func() { r.report.Refused = r.command(watch) })
	if r.opts.Freeze {
		watchers.Go(func() {
			var err error
			if r.report.Freezes, err = r.freeze(watch); err != nil {
				stop(err)
			}
		})
	}
	if r.opts.Burn > 0 {
		watchers.Go(func() {
			burned, err := r.burn(watch)
			if r.report.Burned = burned.Seconds(); err != nil {
				stop(err)
			}
		})
	}
	r.soaked = time.Since(r.held.began)
	end := time.Now().Add(r.opts.For)
	var err error
	for err == nil && time.Now().Before(end) && watch.Err() == nil {
		err = r.round(watch)
	}
	broken := context.Cause(watch)
	stop(nil)
	watchers.Wait()
	r.healed = time.Since(r.held.began)
	if broken != nil {
		return broken
	}
	if err != nil {
		return err
	}
	slowest := slowestRound * time.Duration(max(roundAgents, len(r.lab.Spec.NodeNames()))) / roundAgents
	if least := max(1, int(r.opts.For/slowest)); r.report.Rounds < least {
		return fmt.Errorf("only %d rounds of kills in %s, want at least %d: this run proves nothing", r.report.Rounds,
			r.opts.For, least)
	}
	return nil
}

// round kills some agents at once and lets each return after a pause of its own.
func (r *run) round(ctx context.Context) error {
	names := slices.Clone(r.mortal)
	r.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	r.report.Rounds++
	if r.opts.Half > 0 && r.report.Rounds%r.opts.Half == 0 {
		return r.halve(ctx, names)
	}
	victims := names[:1+r.rng.IntN(min(killedAtOnce, len(names)))]
	pauses := make([]time.Duration, len(victims))
	for i := range victims {
		pauses[i] = time.Duration(r.rng.Int64N(int64(r.opts.Pause)))
	}
	rest := time.Duration(r.rng.Int64N(int64(r.opts.Pause)))
	victims = r.claims.claim(victims...) // those that are frozen are left alone
	defer r.claims.free(victims...)
	r.opts.Progress("round %d: kill -9 %s", r.report.Rounds, strings.Join(victims, " "))
	errs := make([]error, len(victims))
	var wg sync.WaitGroup
	for i, n := range victims {
		r.report.Kills[n]++
		wg.Go(func() {
			if errs[i] = r.kill(ctx, n); errs[i] == nil && pause.For(ctx, pauses[i]) {
				errs[i] = r.lab.Start(ctx, n)
			}
		})
	}
	wg.Wait()
	pause.For(ctx, rest)
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
	for pause.For(ctx, r.lookPause()) {
		least := r.ledger.Applied(node)
		ask, cancel := context.WithTimeout(ctx, 2*time.Second)
		s, err := client.Status(ask, &skeinv1.StatusRequest{})
		cancel()
		if err != nil { // dead just now, or frozen
			if died := r.lab.Died(node); died != nil {
				stop(fmt.Errorf("nobody killed it: %w", died))
			}
			continue
		}
		if err := r.ledger.Status(node, least, s); err != nil {
			stop(fmt.Errorf("an invariant is broken: %w", err))
		}
	}
}

// lookPause is how long nothing is asked of an agent after it has answered.
func (r *run) lookPause() time.Duration {
	return lookEvery * time.Duration(max(lookAgents, len(r.lab.Spec.NodeNames()))) / lookAgents
}

// command has the mesh decide something all the time, through one agent after the other of those that may. It returns
// how often that failed, which is not a fault while servers are dead.
func (r *run) command(ctx context.Context) (refused int) {
	var names []string
	for _, n := range r.lab.Spec.Nodes {
		if n.Server || n.Admin {
			names = append(names, n.Name)
		}
	}
	for i := 0; pause.For(ctx, commandEvery); i++ {
		node := names[i%len(names)]
		client, err := r.lab.Client(node)
		if err != nil {
			return refused
		}
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		t, err := client.CreateToken(ask, &skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(24 * time.Hour),
			Label: fmt.Sprintf("soak %d", i)})
		if err == nil {
			r.ledger.Acknowledged(node, t.GetInfo().GetId())
			// no more is asked of it: a revocation that failed may still be decided
			if old, ok := r.ledger.Oldest(tokensKept); ok {
				_, err = client.RevokeToken(ask, &skeinv1.RevokeTokenRequest{TokenId: old})
				if err == nil {
					r.ledger.Revoked(node, old)
				}
			}
		}
		cancel()
		if err != nil {
			refused++
		}
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

// upgraded waits until every pair that was direct is direct. One that has fallen asleep since is woken by echoes: a
// large mesh looks for no direct path without traffic.
func (r *run) upgraded(ctx context.Context) error {
	return r.eventually(ctx, func(node string) error {
		peers, err := r.peers(ctx, node)
		if err != nil {
			return err
		}
		var errs []error
		var waking []*ping.Stream
		for _, p := range peers {
			if !r.direct[[2]string{node, p.GetName()}] || p.GetPath() == "direct" && p.GetAlive() {
				continue
			}
			errs = append(errs, fmt.Errorf("from %s to %s the path is %s, though it can be direct: %s",
				node, p.GetName(), p.GetPath(), p.GetReason()))
			s, err := r.lab.PingNode(node, p.GetName(), wakeEvery, wakeEchoes)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			waking = append(waking, s)
		}
		for _, s := range waking {
			s.Finish()
		}
		return errors.Join(errs...)
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
		if !pause.For(ctx, r.lookPause()) {
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
