package soak

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	answerWithin = 5 * time.Second // an agent that is asked what it holds
	// restWithin is what a mesh that is whole again gets to let go of what its faults took: connections that were
	// closed wait for two minutes, and mappings that were answered live for two.
	restWithin = 4 * time.Minute
	public     = "public nodes"
)

// resources is what was read of agents and namespaces.
type resources struct {
	mu       sync.Mutex
	began    time.Time
	readings []Reading
	start    map[string]map[Metric]float64 // at rest, by whatever is judged together
	blind    error                         // why connections are not counted
}

// look reads what agents and namespaces hold now. An agent that is dead or frozen is left out.
func (r *run) look(ctx context.Context, nodes []string) []Reading {
	at := time.Since(r.held.began)
	ask, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	all, _ := r.lab.Usage(ask, nodes...) // whoever does not answer is left out
	return r.record(at, all)
}

// lookAtRest is look after the agents' garbage has been collected, and all of them have to answer.
func (r *run) lookAtRest(ctx context.Context) ([]Reading, error) {
	at := time.Since(r.held.began)
	ask, cancel := context.WithTimeout(ctx, r.opts.Recovery)
	defer cancel()
	all, err := r.lab.LiveUsage(ask, r.lab.Spec.NodeNames()...)
	if err != nil {
		return nil, fmt.Errorf("ask the agents what they hold at rest: %w", err)
	}
	return r.record(at, all), nil
}

// record adds the connections to what agents said, and remembers it all.
func (r *run) record(at time.Duration, said answers) []Reading {
	var now []Reading
	for node, u := range said {
		now = append(now, readingOf(at, node, u))
	}
	connections, err := r.lab.Conntrack()
	for ns, n := range connections {
		now = append(now, Reading{At: at, Of: ns, Values: map[Metric]float64{Connections: float64(n)}})
	}
	r.held.mu.Lock()
	defer r.held.mu.Unlock()
	if err != nil {
		r.held.blind = err
	}
	r.held.readings = append(r.held.readings, now...)
	return now
}

// sample reads all the time, until ctx ends.
func (r *run) sample(ctx context.Context) {
	for pause.For(ctx, r.opts.Sample) {
		r.look(ctx, r.lab.Running())
	}
}

// group is what a node or a namespace is judged as. Public nodes may relay, and what relays hold of a pair moves from
// one to another when the first is killed: they are judged together. So are their namespaces.
func (r *run) group(of string) string {
	ns := strings.HasPrefix(of, fabric.Prefix(r.lab.Spec.Name))
	for _, n := range r.publicNodes() {
		if !ns && of == n {
			return public
		}
		if ns && of == fabric.HostNS(r.lab.Spec.Name, n) {
			return "namespaces of " + public
		}
	}
	return of
}

// members is of how many agents a group holds something: a router has connections of all that are behind it.
func (r *run) members(group string) int {
	if strings.HasSuffix(group, public) {
		return len(r.publicNodes())
	}
	behind := 0
	for _, n := range r.lab.Spec.NodeNames() {
		host, _ := r.lab.Plan.Host(n)
		if strings.HasPrefix(group, fabric.Router(r.lab.Spec.Name, host.Site)) {
			behind++
		}
	}
	return max(1, behind)
}

// publicNodes are those that no NAT hides.
func (r *run) publicNodes() (out []string) {
	for _, n := range r.lab.Spec.NodeNames() {
		host, _ := r.lab.Plan.Host(n)
		if site, ok := r.lab.Plan.Site(host.Site); ok && site.NAT == fabric.None {
			out = append(out, n)
		}
	}
	return out
}

// rest lets a mesh that is whole come to rest, and notes what it holds then.
func (r *run) rest(ctx context.Context) error {
	r.opts.Progress("the mesh rests for %s", r.opts.Settle.Round(time.Second))
	if !pause.For(ctx, r.opts.Settle) {
		return context.Cause(ctx)
	}
	now, err := r.lookAtRest(ctx)
	if err != nil {
		return err
	}
	r.held.start = together(now, r.group)
	return nil
}

// leaks waits until the mesh holds no more than it did before the first fault. What it still holds when its time is
// over is a leak.
func (r *run) leaks(ctx context.Context) error {
	end := time.Now().Add(max(r.opts.Settle, restWithin))
	lowest := map[string]map[Metric]float64{}
	for {
		now, err := r.lookAtRest(ctx)
		if err != nil {
			return err
		}
		lower(lowest, together(now, r.group))
		r.report.Resources.Rest, err = Judge(r.held.start, lowest, r.members, r.unjudged()...)
		if err == nil || time.Now().After(end) {
			return err
		}
		r.opts.Progress("not at rest: %s", strings.SplitN(err.Error(), "\n", 2)[0])
		if !pause.For(ctx, r.opts.Sample) {
			return context.Cause(ctx)
		}
	}
}

// unjudged is what a soak is too short for: for two minutes the kernel keeps connections that were closed, and a short
// soak would wait longer for them than it lasts.
func (r *run) unjudged() []Metric {
	if r.opts.For < restWithin {
		return []Metric{Connections}
	}
	return nil
}

// trends sums up what was read under faults: also of a soak that failed.
func (r *run) trends() {
	r.held.mu.Lock()
	defer r.held.mu.Unlock()
	s := &r.report.Resources
	under := slices.DeleteFunc(slices.Clone(r.held.readings), func(x Reading) bool {
		return r.healed > 0 && x.At > r.healed
	})
	s.Mesh, s.Runs = Trends(under, r.soaked+warming(r.opts.For), max(shortestTrend, r.opts.For/3))
	var moments []time.Duration
	for _, x := range r.held.readings {
		moments = append(moments, x.At)
	}
	slices.Sort(moments)
	s.Readings = len(slices.Compact(moments))
	if r.held.blind != nil {
		s.NotCounted = r.held.blind.Error()
	}
}

// warming is how much of a soak's beginning is left out of trends: caches, pools and stacks grow to what faults need.
func warming(d time.Duration) time.Duration { return min(3*time.Minute, d/4) }
