package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	restCPU    = 0.3 // per cent of a core
	restWakes  = 15  // a second
	restMemory = 30 << 20
	settleFor  = 60 * time.Second // what a mesh that has just formed still has to do
	lookFor    = 30 * time.Second // how long agents at rest are looked at
	burnFor    = time.Minute      // after the first two minutes, which do not count
	healWithin = 30 * time.Second
	lateMost   = 100 * time.Millisecond // more that a first packet to a sleeping peer may take
)

// crowdSample are nodes of a crowd of 40, one behind each kind of NAT, none of them a server.
var crowdSample = []string{"dc4", "flat2", "home3", "cloud5", "far6"}

// crowd measures what agents at rest cost, and how a mesh of many agents forms on this host and stands its load.
func (b *bench) crowd(ctx context.Context) []Figure {
	out := b.rest(ctx)
	out = append(out, b.crowdOf(ctx, 40, 60*time.Second, b.sleepers, b.churn, b.wokenCuts)...)
	return append(out, b.crowdOf(ctx, 63, 150*time.Second, b.manyAtRest, b.burn)...)
}

// rest looks at three idle agents.
func (b *bench) rest(ctx context.Context) (out []Figure) {
	const name = "idle mesh of 3, the busiest agent"
	target := fmt.Sprintf("≤ %.1f %% of a core, ≤ %d wake-ups/s, ≤ %d MiB", restCPU, restWakes, restMemory>>20)
	l, down, err := b.raise(ctx, []byte("name: restbench\nsites:\n  dc: {nat: none}\n  home: {nat: "+
		"port-restricted-cone}\nnodes:\n"+
		"  dc1: {site: dc, server: true, relay: true}\n  home1: {site: home}\n  home2: {site: home}\n"))
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	defer func() {
		if err := down(); err != nil {
			out = append(out, notMeasured("taking the lab of three down", "", err))
		}
	}()
	if err := l.WaitConverged(ctx, formedWithin); err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	rates, err := b.look(ctx, l)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	s := sumOf(rates)
	return []Figure{{
		Name: name, Target: target, Load: loadAverage(), How: "voluntary context switches of all threads; " + b.lookText(),
		Got:     fmt.Sprintf("%.2f %%, %.0f wake-ups/s, %.0f MiB", s.most, s.wakes, float64(s.memory)/(1<<20)),
		Verdict: verdict(s.most <= restCPU && s.wakes <= restWakes && s.memory <= restMemory),
	}}
}

// rateSum is what some agents cost: the CPU of all and of the busiest in per cent of a core, the most wake-ups a second
// and bytes resident of one, and all changes of paths and own records a second.
type rateSum struct {
	all, most, wakes float64
	memory           uint64
	paths, records   float64
}

func sumOf(rates map[string]*skeinv1.UsageRates) (s rateSum) {
	for _, r := range rates {
		s.all += r.GetCpuPercent()
		s.most, s.wakes = max(s.most, r.GetCpuPercent()), max(s.wakes, r.GetWakeupsPerSecond())
		s.memory = max(s.memory, r.GetUsage().GetRssBytes())
		s.paths += r.GetPathChangesPerSecond()
		s.records += r.GetRecordsPublishedPerSecond()
	}
	return s
}

func (b *bench) lookText() string {
	return fmt.Sprintf("over %s, begun %s after the mesh had formed", b.opts.pick(lookFor, lookFor/3),
		b.opts.pick(settleFor, settleFor/2))
}

// look lets a mesh settle, and tells what its agents do then.
func (b *bench) look(ctx context.Context, l *lab.Lab) (map[string]*skeinv1.UsageRates, error) {
	if err := b.pause(ctx, b.opts.pick(settleFor, settleFor/2)); err != nil {
		return nil, err
	}
	return b.ratesOver(ctx, l, b.opts.pick(lookFor, lookFor/3))
}

func (b *bench) ratesOver(ctx context.Context, l *lab.Lab, d time.Duration) (map[string]*skeinv1.UsageRates, error) {
	before, err := l.Usage(ctx, l.Spec.NodeNames()...)
	if err != nil {
		return nil, err
	}
	if err := b.pause(ctx, d); err != nil {
		return nil, err
	}
	after, err := l.Usage(ctx, l.Spec.NodeNames()...)
	if err != nil {
		return nil, err
	}
	return lab.Rates(before, after)
}

func (b *bench) pause(ctx context.Context, d time.Duration) error {
	if !pause.For(ctx, d) {
		return ctx.Err()
	}
	return nil
}

// crowdOf starts so many agents at once, tells how long it takes until all agree and all pairs have answered, and hands
// the mesh to what measures more on it.
func (b *bench) crowdOf(ctx context.Context, agents int, within time.Duration,
	then ...func(context.Context, *lab.Lab) []Figure) (out []Figure) {
	name, target := fmt.Sprintf("%d agents, five kinds of NAT: start to all pairs answering", agents), "≤ "+within.String()
	b.note("crowd: %d agents", agents)
	began := time.Now()
	l, down, err := b.raise(ctx, lab.Crowd(fmt.Sprintf("crowd%d", agents), agents))
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	defer func() {
		if err := down(); err != nil {
			out = append(out, notMeasured(fmt.Sprintf("taking the lab of %d down", agents), "", err))
		}
	}()
	defer func() { b.keepMisses(ctx, l, out) }()
	err = l.WaitConverged(ctx, 2*within)
	agreed := time.Since(began)
	if err == nil {
		err = b.allReach(ctx, l, 2*within)
	}
	took := time.Since(began)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	out = []Figure{{
		Name: name, Target: target, Got: fmt.Sprintf("%.0f s (all agree after %.0f s)", took.Seconds(), agreed.Seconds()),
		Load:    loadAverage(),
		Verdict: verdict(took <= within),
		How: "one run; each pair answers an echo of each family in both directions, eight pairs at a time; namespaces " +
			"and NATs included",
	}}
	for _, f := range then {
		out = append(out, f(ctx, l)...)
	}
	return out
}

func (b *bench) allReach(ctx context.Context, l *lab.Lab, within time.Duration) error {
	reach := true
	return l.Expect(ctx, within, lab.Expect{From: l.Spec.NodeNames(), To: l.Spec.NodeNames(), Reach: &reach})
}

// sleepers sends first packets to peers that have been silent for long, and the same again while they are awake.
func (b *bench) sleepers(ctx context.Context, l *lab.Lab) []Figure {
	const name = "first packet to a sleeping peer"
	target := fmt.Sprintf("none lost, ≤ %s more than to one awake", lateMost)
	if err := b.pause(ctx, 200*time.Second); err != nil { // sessions of WireGuard's are over then, too
		return []Figure{notMeasured(name, target, err)}
	}
	var asleep, awake sample
	lost := 0
	for _, times := range []*sample{&asleep, &awake} {
		for _, f := range crowdSample {
			for _, to := range l.Spec.NodeNames() {
				if f == to {
					continue
				}
				s, err := l.PingNode(f, to, time.Millisecond, 1)
				if err != nil {
					return []Figure{notMeasured(name, target, err)}
				}
				r := s.Finish()
				lost += r.Lost()
				if r.Received > 0 {
					times.add(r.Max, f+" to "+to)
				}
			}
		}
	}
	more := asleep.quantile(99) - awake.quantile(99)
	return []Figure{{
		Name: name, Target: target, Load: loadAverage(),
		Got: fmt.Sprintf("%d lost; asleep %s; awake %s", lost, asleep.text(99), awake.text(99)),
		How: "one echo each from five nodes to all others of 40, one after the other, with no session of WireGuard's; " +
			"then once more",
		Verdict: verdict(lost == 0 && more <= lateMost),
	}}
}

// manyAtRest looks at what a large mesh costs that nobody uses.
func (b *bench) manyAtRest(ctx context.Context, l *lab.Lab) []Figure {
	name := fmt.Sprintf("idle mesh of %d on this host", len(l.Spec.NodeNames()))
	const target = "all ≤ 1 core, each ≤ 1 %"
	rates, err := b.look(ctx, l)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	s := sumOf(rates)
	return []Figure{{
		Name: name, Target: target, Load: loadAverage(), How: b.lookText(),
		Got: fmt.Sprintf("all %.2f cores; mean %.2f %%, most %.2f %% (a server and relay); %.0f MiB at most", s.all/100,
			s.all/float64(len(rates)),
			s.most, float64(s.memory)/(1<<20)),
		Verdict: verdict(s.all <= 100 && s.most <= 1),
	}}
}

// burn has other processes take all of this host's processors.
func (b *bench) burn(ctx context.Context, l *lab.Lab) []Figure {
	n := len(l.Spec.NodeNames())
	name := fmt.Sprintf("%d agents while %d processes burn all cores", n, runtime.NumCPU())
	const target = "≤ 0.1 path changes per pair and minute; all answer ≤ 30 s after"
	rates, healed, err := b.burnt(ctx, l)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	s := sumOf(rates)
	changes := s.paths * 60 / 2 / float64(n*(n-1)/2) // both ends of a pair count
	return []Figure{{
		Name: name, Target: target, Load: loadAverage(),
		Got: fmt.Sprintf("%.3f changes per pair and minute; all pairs answered %.0f s after the burn", changes,
			healed.Seconds()),
		How:     fmt.Sprintf("changes in %s after the first two minutes", burnFor),
		Verdict: verdict(changes <= 0.1 && healed <= healWithin),
	}}
}

func (b *bench) burnt(ctx context.Context, l *lab.Lab) (_ map[string]*skeinv1.UsageRates, _ time.Duration, err error) {
	end, err := lab.Burn(runtime.NumCPU())
	if err != nil {
		return nil, 0, err
	}
	defer end()
	if err := b.pause(ctx, b.opts.pick(2*time.Minute, 30*time.Second)); err != nil {
		return nil, 0, err
	}
	rates, err := b.ratesOver(ctx, l, burnFor)
	end()
	began := time.Now()
	err = errors.Join(err, b.allReach(ctx, l, 4*healWithin))
	return rates, time.Since(began), err
}
