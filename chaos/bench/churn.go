package bench

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	podsAMinute = 50
	podLives    = 5               // starts of others, while a pod lives
	churnFor    = 2 * time.Minute // and as long without pods before
	// calmFor is how long nothing changes before anything is counted. In a mesh of 40 a record that nobody waits for is
	// told up to 40 s after its cause.
	calmFor    = 45 * time.Second
	calmWithin = 4 * time.Minute
)

// changes are how often agents changed a path or published another record, in some interval. Both ends of a pair count.
type changes struct {
	paths, records int
	hostPaths      int    // of the paths: those that hosts with pods have changed
	hostRecords    int    // of the records: those of hosts with pods
	events         uint64 // that the log has got
	nodes          string // that have changed something, and how often
}

func (c changes) none() bool { return c.paths == 0 && c.records == 0 && c.events == 0 }

func (c changes) String() string {
	return fmt.Sprintf("%d paths and %d records (%d and %d of the hosts with pods), %d events",
		c.paths, c.records, c.hostPaths, c.hostRecords, c.events)
}

// churn starts and stops pods in a settled crowd, and compares what changes with as much time without them.
func (b *bench) churn(ctx context.Context, l *lab.Lab) []Figure {
	name := fmt.Sprintf("%d agents, %d pods a minute: changes by them", len(l.Spec.NodeNames()), podsAMinute)
	const target = "0 paths, 0 records"
	without, with, pods, err := b.churned(ctx, l)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	return []Figure{churnFigure(name, target, without, with, pods, b.opts.pick(churnFor, churnFor/4))}
}

// churnFigure calls a change the pods' when there are more of its kind than without pods, whichever agents made them: a
// new block, for one, is news for all of them.
func churnFigure(name, target string, without, with changes, pods int, d time.Duration) Figure {
	paths, records := max(with.paths-without.paths, 0), max(with.records-without.records, 0)
	f := Figure{
		Name: name, Target: target, Load: loadAverage(), Verdict: verdict(paths == 0 && records == 0),
		Got: fmt.Sprintf("%d paths, %d records more than without; with %d pods: %s; without: %s", paths, records, pods, with,
			without),
		How: fmt.Sprintf("real plugin, hosts %s, which have a pod and so a block before; changes of all agents in %s, "+
			"begun after %s without any, or %s at most, then in %s with pods that come and go; both ends of a pair count",
			strings.Join(crowdSample, ", "), d, calmFor, calmWithin, d),
	}
	if f.Verdict == Missed {
		f.Detail = []string{"with pods: " + with.nodes, "without: " + without.nodes}
	}
	return f
}

// churned counts in an interval without pods that come and go, and in one with them; it tells how many came and went.
func (b *bench) churned(ctx context.Context, l *lab.Lab) (without, with changes, pods int, err error) {
	d := b.opts.pick(churnFor, churnFor/4)
	// The first pod of a node takes blocks, which is an event, after which every record tells another index.
	first := lab.StartPods{Nodes: crowdSample, Pods: []string{"first"}}
	if err := l.StartPods(ctx, podPatience, first); err != nil {
		return without, with, 0, err
	}
	if err := b.calm(ctx, l); err != nil {
		return without, with, 0, err
	}
	b.note("crowd: %s without pods that come and go", d)
	if without, err = b.changesDuring(ctx, l, func() error { return b.pause(ctx, d) }); err != nil {
		return without, with, 0, err
	}
	b.note("crowd: %s with %d pods a minute", d, podsAMinute)
	with, err = b.changesDuring(ctx, l, func() error {
		pods, err = b.comeAndGo(ctx, l, d)
		return err
	})
	return without, with, pods, err
}

// calm waits until nothing has changed for a while. A mesh that never is calm is measured as it is.
func (b *bench) calm(ctx context.Context, l *lab.Lab) error {
	for deadline := time.Now().Add(calmWithin); ; {
		c, err := b.changesDuring(ctx, l, func() error { return b.pause(ctx, calmFor) })
		if err != nil || c.none() || time.Now().After(deadline) {
			return err
		}
		b.note("crowd: not calm yet: %d paths and %d records changed in %s", c.paths, c.records, calmFor)
	}
}

// changesDuring counts what all agents have changed when do returns.
func (b *bench) changesDuring(ctx context.Context, l *lab.Lab, do func() error) (c changes, err error) {
	index, err := b.index(ctx, l)
	if err != nil {
		return c, err
	}
	before, err := l.Usage(ctx, l.Spec.NodeNames()...)
	if err != nil {
		return c, err
	}
	if err := do(); err != nil {
		return c, err
	}
	after, err := l.Usage(ctx, l.Spec.NodeNames()...)
	if err != nil {
		return c, err
	}
	rates, err := lab.Rates(before, after)
	if err != nil {
		return c, err
	}
	c = countChanges(rates)
	now, err := b.index(ctx, l)
	c.events = now - index
	return c, err
}

// countChanges turns rates into counts.
func countChanges(rates map[string]*skeinv1.UsageRates) (c changes) {
	var nodes []string
	for _, name := range slices.Sorted(maps.Keys(rates)) {
		r := rates[name]
		count := func(perSecond float64) int {
			return int(math.Round(perSecond * time.Duration(r.GetIntervalNanos()).Seconds()))
		}
		paths, records := count(r.GetPathChangesPerSecond()), count(r.GetRecordsPublishedPerSecond())
		if paths == 0 && records == 0 {
			continue
		}
		nodes = append(nodes, fmt.Sprintf("%s %d paths, %d records", name, paths, records))
		c.paths += paths
		c.records += records
		if slices.Contains(crowdSample, name) {
			c.hostPaths += paths
			c.hostRecords += records
		}
	}
	c.nodes = strings.Join(nodes, "; ")
	return c
}

// index is how far the first node has the log.
func (b *bench) index(ctx context.Context, l *lab.Lab) (uint64, error) {
	c, err := l.Client(l.Spec.NodeNames()[0])
	if err != nil {
		return 0, err
	}
	st, err := c.Status(ctx, &skeinv1.StatusRequest{})
	return st.GetIndex(), err
}

// comeAndGo starts pods at a steady pace, a host after the other, and stops each some pods later and the last at the
// end. It tells how many there were.
func (b *bench) comeAndGo(ctx context.Context, l *lab.Lab, d time.Duration) (int, error) {
	n := int(d.Minutes() * podsAMinute)
	pace := time.NewTicker(d / time.Duration(n))
	defer pace.Stop()
	stop := func(i int) error {
		if i < 0 || i >= n {
			return nil
		}
		return l.StopPods(ctx, lab.StopPods{Nodes: []string{churnHost(i)}, Pods: []string{churnPod(i)}})
	}
	for i := range n + podLives {
		var err error
		if i < n {
			err = l.StartPods(ctx, 0, lab.StartPods{Nodes: []string{churnHost(i)}, Pods: []string{churnPod(i)}})
		}
		if err := errors.Join(err, stop(i-podLives)); err != nil {
			return 0, err
		}
		if i >= n {
			continue // the last end at once
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-pace.C:
		}
	}
	return n, nil
}

func churnHost(i int) string { return crowdSample[i%len(crowdSample)] }
func churnPod(i int) string  { return fmt.Sprintf("pod%d", i) }
