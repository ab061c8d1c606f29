package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/ping"
)

const (
	firstPatient  = 20 * time.Second // a first packet that takes longer counts as that long
	directPatient = 30 * time.Second
)

// starts measures, over many restarts of agents, how soon two nodes that know each other talk, and how soon
// they do so directly.
func (f *field) starts(ctx context.Context) []Figure {
	m := &meetings{}
	rounds := f.opts.runs(21, 7)
	f.note("starts: %d restarts", rounds)
	for i := range rounds {
		// One node alone, or two at once, so that both ends of a pair are new.
		nodes := []string{f.names[(i*4)%len(f.names)]}
		if i%3 == 2 {
			nodes = append(nodes, f.names[(i*4+2)%len(f.names)])
		}
		if err := f.restart(ctx, nodes, m); err != nil {
			err = fmt.Errorf("restart of %v: %w", nodes, err)
			return []Figure{
				notMeasured("first packet over the relay", "≤ 500 ms", err),
				notMeasured("direct after", "≤ 2.00 s at p95", err),
			}
		}
	}
	all := sample{append(slices.Clone(f.fresh.took), m.again.took...), append(slices.Clone(f.fresh.what), m.again.what...)}
	return []Figure{
		m.relay.figure("first packet over the relay between nodes that know each other", 100, 500*time.Millisecond,
			"agents restarted with kill -9; ping from the moment that the agent answers as a running member, pair not direct "+
				"then; time to the first answer, either side asking"),
		{Name: "  the same where the path was direct by then", Got: m.directFirst.textOrNone(99), Load: loadAverage(),
			How: "first answer, as above", Detail: m.directFirst.slowest(500 * time.Millisecond)},
		all.figure("direct after, for pairs that can", 95, 2*time.Second,
			fmt.Sprintf("until both ends have switched to a direct path that answers, by their own clocks; newly joined, from "+
				"when both had a record of the other: %s; restarted, from when both ran: %s", f.fresh.textOrNone(95),
				m.again.textOrNone(95))),
	}
}

// meetings collects what the restarts show.
type meetings struct {
	mu                        sync.Mutex
	relay, directFirst, again sample
}

func (s *sample) textOrNone(percent int) string {
	if len(s.took) == 0 {
		return "none"
	}
	return s.text(percent)
}

// restart kills agents, starts them again and watches them meet every other.
func (f *field) restart(ctx context.Context, nodes []string, m *meetings) error {
	before := map[string]uint64{}
	for _, n := range nodes {
		st, err := f.status(ctx, n)
		if err != nil {
			return err
		}
		before[n] = st.GetEpoch()
	}
	if err := f.lab.Kill(ctx, nodes...); err != nil {
		return err
	}
	started := make(chan error, 1)
	go func() { started <- f.lab.Start(ctx, nodes...) }()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	turn := 0
	for _, p := range f.pairs() {
		if !slices.Contains(nodes, p.from) && !slices.Contains(nodes, p.to) {
			continue
		}
		if turn++; turn%2 == 0 { // either side begins in turn
			p = pair{p.to, p.from}
		}
		wg.Go(func() {
			if err := f.meet(ctx, p, before, m); err != nil {
				mu.Lock()
				errs = append(errs, fmt.Errorf("%s: %w", p, err))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if err := errors.Join(append(errs, <-started)...); err != nil {
		return err
	}
	return f.awaitDirect(ctx)
}

// up waits until a restarted agent answers as a running member that holds the other's record from its disk.
func (f *field) up(ctx context.Context, node, other string, epoch uint64) error {
	return f.until(ctx, formedWithin, func() error {
		st, err := f.status(ctx, node)
		if err != nil {
			return err
		}
		if st.GetEpoch() <= epoch || st.GetPhase() != "running" {
			return fmt.Errorf("%s is %s", node, st.GetPhase())
		}
		all, err := f.recordsOf(ctx, node)
		if _, ok := all[other]; !ok && err == nil {
			err = fmt.Errorf("%s has no record of %s", node, other)
		}
		return err
	})
}

// meet waits until two agents run that know each other, and measures from then.
func (f *field) meet(ctx context.Context, p pair, before map[string]uint64, m *meetings) error {
	for _, e := range []pair{p, {p.to, p.from}} {
		if epoch, restarted := before[e.from]; restarted {
			if err := f.up(ctx, e.from, e.to, epoch); err != nil {
				return err
			}
		}
	}
	met := time.Now()
	_, restarted := before[p.from]
	if err := f.firstPacket(ctx, p, restarted, m); err != nil {
		return err
	}
	if !f.canBeDirect(p) {
		return nil
	}
	var since time.Time
	err := f.until(ctx, directPatient, func() (err error) { since, err = f.directSince(ctx, p); return err })
	took := since.Sub(met)
	if err != nil {
		took = directPatient
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.again.add(max(took, 0), fmt.Sprintf("%s restarted", p))
	return ctx.Err()
}

// firstPacket sends echoes at once and sees when the first answer comes.
func (f *field) firstPacket(ctx context.Context, p pair, restarted bool, m *meetings) error {
	v, err := f.lab.Path(ctx, p.from, p.to)
	if err != nil {
		return err
	}
	s, err := f.lab.PingNode(p.from, p.to, pingEvery, 0)
	if err != nil {
		return err
	}
	defer s.Stop()
	took := timeOf(ctx, s)
	who := "the restarted one asks"
	if !restarted {
		who = "the other one asks"
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if v.GetPath() == "direct" {
		m.directFirst.add(took, fmt.Sprintf("%s, %s", p, who))
	} else {
		m.relay.add(took, fmt.Sprintf("%s, %s, path %s", p, who, v.GetPath()))
	}
	return nil
}

func timeOf(ctx context.Context, s *ping.Stream) time.Duration {
	start := time.Now()
	wait, cancel := context.WithTimeout(ctx, firstPatient)
	defer cancel()
	if s.Answered(wait, 1) != nil {
		return firstPatient
	}
	return time.Since(start)
}
