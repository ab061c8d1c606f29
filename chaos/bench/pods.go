package bench

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

//go:embed pods.yaml
var podsLab []byte

const (
	addP50, addP99 = 15 * time.Millisecond, 50 * time.Millisecond
	burst          = 100 // pods that start at once
	burstLimit     = 5 * time.Second
	fullNode       = 500 // pods
	fullStart      = time.Second
	podPatience    = time.Minute
)

// pods measures what a container runtime and its pods wait for: a real agent, the real plugin, veth pairs and routes.
func (b *bench) pods(ctx context.Context) []Figure {
	f, err := b.measurePods(ctx)
	if err != nil {
		f = append(f, notMeasured("pods on a node", "", err))
	}
	return f
}

func (b *bench) measurePods(ctx context.Context) (out []Figure, err error) {
	l, down, err := b.raise(ctx, podsLab)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	if _, err := startPods(ctx, l, "first", 1); err != nil { // after it there are blocks
		return nil, err
	}
	runs := b.opts.runs(200, 50)
	b.note("pods: %d, one after another", runs)
	one := sample{}
	for i := range runs {
		got, err := startPods(ctx, l, fmt.Sprintf("one%d-", i), 1)
		if err != nil {
			return nil, err
		}
		one.add(got.took[0], got.what[0])
	}
	out = append(out, Figure{Name: "CNI ADD, one after another", Target: "≤ 15 ms at p50, ≤ 50 ms at p99",
		Got: one.text(99), Load: loadAverage(), Verdict: verdict(one.quantile(50) <= addP50 && one.quantile(99) <= addP99),
		How: "from the start of the plugin's process to its end: dual stack, veth pair, addresses, routes; blocks of 32 " +
			"addresses, so every 32nd pod begins a block that was spare", Detail: one.slowest(addP99)})

	b.note("pods: %d at once", burst)
	began := time.Now()
	all, err := startPods(ctx, l, "burst", burst)
	took := time.Since(began)
	if err != nil {
		return out, err
	}
	out = append(out, Figure{Name: fmt.Sprintf("%d CNI ADDs at once on one node", burst), Target: "≤ 5 s, 0 errors",
		Got: fmt.Sprintf("%s, 0 errors; single ADDs %s", ms(took), all.text(99)), Load: loadAverage(),
		Verdict: verdict(took <= burstLimit), How: "as many processes of the plugin on this machine's processors, with " +
			"their network namespaces; four blocks have to be asked for meanwhile"})

	f, err := b.fullStart(ctx, l, fullNode-runs-burst-1)
	return append(out, f), err
}

// startPods starts n pods at once and tells what each ADD took.
func startPods(ctx context.Context, l *lab.Lab, prefix string, n int) (s sample, err error) {
	var mu sync.Mutex
	start := lab.StartPods{Nodes: []string{"dc1"}, Told: func(name string, took time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		s.add(took, name)
	}}
	for i := range n {
		start.Pods = append(start.Pods, fmt.Sprintf("%s%d", prefix, i))
	}
	err = l.StartPods(ctx, 0, start)
	return s, err
}

// fullStart measures the start of an agent whose node is full of pods.
func (b *bench) fullStart(ctx context.Context, l *lab.Lab, more int) (Figure, error) {
	b.note("pods: %d more, and the agent is started anew", more)
	for left := more; left > 0; left -= burst {
		if _, err := startPods(ctx, l, fmt.Sprintf("full%d-", left), min(left, burst)); err != nil {
			return Figure{}, err
		}
	}
	c, err := l.Client("dc1")
	if err != nil {
		return Figure{}, err
	}
	s := sample{}
	for range b.opts.runs(10, 3) {
		if err := l.Kill(ctx, "dc1"); err != nil {
			return Figure{}, err
		}
		started := make(chan error, 1)
		began := time.Now()
		go func() { started <- l.Start(ctx, "dc1") }()
		err := b.until(ctx, podPatience, func() error { return b.knowsPods(ctx, c) })
		s.add(time.Since(began), "start")
		if err := errors.Join(err, <-started); err != nil {
			return Figure{}, err
		}
	}
	return s.figure(fmt.Sprintf("agent start with %d pods", fullNode), 100, fullStart,
		"kill -9, then from the start of the process until its API tells of all pods; the agent is a server, and makes its "+
			"userspace WireGuard anew"), nil
}

func (b *bench) knowsPods(ctx context.Context, c podsClient) error {
	r, err := c.Pods(ctx, &skeinv1.PodsRequest{})
	if err != nil {
		return err
	}
	if n := len(r.GetPods()); n != fullNode {
		return fmt.Errorf("the agent knows %d pods, want %d", n, fullNode)
	}
	return nil
}

// podsClient is the part of the agent's API that tells of pods.
type podsClient interface {
	Pods(context.Context, *skeinv1.PodsRequest) (*skeinv1.PodsResponse, error)
}
