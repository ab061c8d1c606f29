package bench

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
	"github.com/skeinmesh/skein/chaos/owners"
)

//go:embed egress.yaml
var egressLab []byte

const (
	failoverP50, failoverP99 = 1500 * time.Millisecond, 3 * time.Second
	egressPatience           = 40 * time.Second
	egressPort               = 80
	egressClient             = "home1/web"
	egressEvery              = 2 * time.Millisecond // of the flows
	restFor, restMost        = 10 * time.Second, 5  // percent of a core
)

var (
	egressRef      = lab.Ref{Namespace: "out", Name: "fixed"}
	egressSlot     = owners.SlotName(egressRef, 0)
	egressGateways = []string{"gw1", "gw2"}
)

// egress measures how gateways of an egress replace each other, as a host outside the mesh and a client behind a NAT
// see it; and what the code for gateways costs.
func (b *bench) egress(ctx context.Context) []Figure {
	f, err := b.measureEgress(ctx)
	if err != nil {
		f = append(f, notMeasured("egress gateways", "", err))
	}
	return append(f, b.measure(ctx, egressJobs())...)
}

// way is a lab with a client that uses the egress, and an observer at the target.
type way struct {
	*bench
	lab     *lab.Lab
	capture *owners.Capture
	target  netip.AddrPort
}

func (b *bench) measureEgress(ctx context.Context) (out []Figure, err error) {
	l, down, err := b.raise(ctx, egressLab)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	if err := l.Serve(lab.Serve{Nodes: []string{"target"}, Port: egressPort}); err != nil {
		return nil, err
	}
	if err := l.StartPods(ctx, 10*time.Second, lab.StartPods{Nodes: []string{"home1"}, Pods: []string{"web"},
		Annotations: map[string]string{"skein.dev/egress.out": "fixed"}}); err != nil {
		return nil, err
	}
	info, err := l.Node("target")
	if err != nil {
		return nil, err
	}
	w := &way{bench: b, lab: l, target: netip.AddrPortFrom(info.Host.Addr, egressPort)}
	watch, _, err := owners.WatchOf(ctx, l, "target", egressPort, egressGateways, []lab.Ref{egressRef})
	if err != nil {
		return nil, err
	}
	if w.capture, err = owners.Open(watch); err != nil {
		return nil, err
	}
	defer w.capture.Close()
	if err := w.ready(ctx); err != nil {
		return nil, err
	}
	atRest, err := w.atRest(ctx, []string{"gw1", "gw2", "home1"})
	if err != nil {
		return nil, err
	}
	f, err := w.failover(ctx, b.opts.runs(50, 5))
	if err != nil {
		return nil, err
	}
	out = append(out, atRest, f)
	more, err := w.drain(ctx, b.opts.runs(20, 3))
	return append(out, more...), err
}

// ready waits until a client's packet gets through and every gateway could take the slot.
func (w *way) ready(ctx context.Context) error {
	if err := w.lab.WaitConverged(ctx, egressPatience); err != nil {
		return err
	}
	return w.untilEvery(ctx, 100*time.Millisecond, egressPatience, func() error {
		if _, err := w.lab.Get(ctx, egressClient, w.target); err != nil {
			return err
		}
		c, err := w.lab.Client("dc1")
		if err != nil {
			return err
		}
		e, err := c.ShowEgress(ctx, &skeinv1.ShowEgressRequest{Namespace: egressRef.Namespace, Name: egressRef.Name})
		if err != nil {
			return err
		}
		able := 0
		for _, g := range e.GetGateways() {
			if g.GetState().GetReady() {
				able++
			}
		}
		if able != len(egressGateways) {
			return fmt.Errorf("%d of %d gateways are ready", able, len(egressGateways))
		}
		return nil
	})
}

// owner is the slot's, by the agreed state.
func (w *way) owner(ctx context.Context) (string, error) {
	e, err := w.lab.Egress(ctx, egressRef)
	if err != nil {
		return "", err
	}
	for _, s := range e.GetSlots() {
		if s.GetOwner() != "" {
			return s.GetOwner(), nil
		}
	}
	return "", fmt.Errorf("egress %s has no owner", egressRef)
}

// atRest tells what agents cost while nothing happens.
func (w *way) atRest(ctx context.Context, names []string) (Figure, error) {
	w.note("egress: agents at rest for %s", restFor)
	var before []time.Duration
	pids := make([]int, len(names))
	for i, name := range names {
		info, err := w.lab.Node(name)
		if err != nil {
			return Figure{}, err
		}
		used, err := lab.ProcessorTime(info.PID)
		if err != nil {
			return Figure{}, err
		}
		pids[i], before = info.PID, append(before, used)
	}
	began := time.Now()
	if !pause.For(ctx, restFor) {
		return Figure{}, ctx.Err()
	}
	var texts []string
	worst := 0.0
	for i, name := range names {
		used, err := lab.ProcessorTime(pids[i])
		if err != nil {
			return Figure{}, err
		}
		share := 100 * (used - before[i]).Seconds() / time.Since(began).Seconds()
		worst = max(worst, share)
		texts = append(texts, fmt.Sprintf("%s %.1f %%", name, share))
	}
	return Figure{Name: "egress gateways and a client's host at rest", Target: fmt.Sprintf("≤ %d %% of one core",
		restMost), Got: strings.Join(texts, ", "), Load: loadAverage(), Verdict: verdict(worst <= restMost),
		How: fmt.Sprintf("processor time of these agents over %s, six nodes, one slot, no traffic; one of the gateways has "+
			"the slot", restFor)}, nil
}

// failover kills the owner's agent again and again, under a UDP flow.
func (w *way) failover(ctx context.Context, runs int) (Figure, error) {
	w.note("egress: %d gateways killed", runs)
	var took sample
	for i := range runs {
		d, who, err := w.killOwner(ctx)
		if err != nil {
			return Figure{}, fmt.Errorf("kill %d: %w", i+1, err)
		}
		if took.add(d, who+" killed"); d > failoverP99 {
			if dir, err := w.lab.SaveArtifacts(ctx, w.opts.Artifacts); err == nil {
				w.note("kill %d of %s took %s; logs and states are in %s", i+1, who, d.Round(time.Millisecond), dir)
			}
		}
	}
	return Figure{Name: "egress gateway killed: the client leaves by another", Target: "≤ 1.50 s at p50, ≤ 3.00 s at p99",
		Got: took.text(99), Load: loadAverage(),
		Verdict: verdict(took.quantile(50) <= failoverP50 && took.quantile(99) <= failoverP99),
		Detail:  took.slowest(failoverP99),
		How: "kill -9 of the owner's agent; from the kill to the first packet of the client that an observer in the " +
			"target's network namespace sees come from the new owner's link; lease of 1.2 s, three servers"}, nil
}

func (w *way) killOwner(ctx context.Context) (time.Duration, string, error) {
	owner, err := w.owner(ctx)
	if err != nil {
		return 0, "", err
	}
	f, err := w.lab.OpenFlow(ctx, egressClient, w.target, "udp", egressEvery)
	if err != nil {
		return 0, owner, err
	}
	defer f.Abandon()
	if err := f.Answered(ctx, 50); err != nil {
		return 0, owner, err
	}
	killed := time.Now()
	if err := w.lab.Kill(ctx, owner); err != nil {
		return 0, owner, err
	}
	var first time.Time
	if err := w.until(ctx, egressPatience, func() error {
		seen, err := w.capture.Seen()
		if err != nil {
			return err
		}
		for _, c := range owners.Changes(egressSlot, seen.Spells[egressSlot], killed) {
			if c.To != owner {
				first = c.At
				return nil
			}
		}
		return fmt.Errorf("nobody but %s has sent", owner)
	}); err != nil {
		return 0, owner, err
	}
	if err := w.lab.Start(ctx, owner); err != nil {
		return 0, owner, err
	}
	return first.Sub(killed), owner, w.ready(ctx)
}

// drain moves the slot by command under a TCP and a UDP flow.
func (w *way) drain(ctx context.Context, runs int) ([]Figure, error) {
	w.note("egress: %d drains", runs)
	var pause, took sample
	lost, sent, broken := 0, 0, 0
	for i := range runs {
		reports, d, err := w.drainOwner(ctx)
		if err != nil {
			return nil, fmt.Errorf("drain %d: %w", i+1, err)
		}
		took.add(d, fmt.Sprintf("drain %d", i+1))
		for _, r := range reports {
			pause.add(r.Longest(), fmt.Sprintf("drain %d", i+1))
			lost, sent = lost+r.Lost(), sent+r.Sent
			if r.broken {
				broken++
			}
		}
	}
	const how = "`skein node drain` of the owner while a pod behind a NAT has one TCP connection and one UDP flow, a " +
		"number each 2 ms both ways, through the slot's own source address; connections move with it"
	return []Figure{
		{Name: "egress drained: lost of running flows", Target: "0", Got: fmt.Sprintf("%d of %d numbers lost, %d of %d TCP "+
			"connections broken", lost, sent, broken, runs), Load: loadAverage(),
			Verdict: verdict(lost == 0 && broken == 0), How: how},
		{Name: "  longest time without an answer", Got: pause.text(99), Load: loadAverage(), How: "of each of these flows"},
		{Name: "  from the command until the slot is gone from there", Got: took.text(99), Load: loadAverage(),
			How: "asked of the agent every 10 ms"},
	}, nil
}

type flowOutcome struct {
	ping.Report
	broken bool
}

func (w *way) drainOwner(ctx context.Context) (out []flowOutcome, took time.Duration, err error) {
	owner, err := w.owner(ctx)
	if err != nil {
		return nil, 0, err
	}
	var flows []*lab.FlowStream
	defer func() {
		for _, f := range flows {
			f.Abandon()
		}
	}()
	for _, proto := range []string{"tcp", "udp"} {
		f, err := w.lab.OpenFlow(ctx, egressClient, w.target, proto, egressEvery)
		if err != nil {
			return nil, 0, err
		}
		flows = append(flows, f)
		if err := f.Answered(ctx, 50); err != nil {
			return nil, 0, err
		}
	}
	c, err := w.lab.Client("dc1")
	if err != nil {
		return nil, 0, err
	}
	began := time.Now()
	if _, err := c.DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: owner}); err != nil {
		return nil, 0, err
	}
	if err := w.until(ctx, egressPatience, func() error {
		now, err := w.owner(ctx)
		if err == nil && now == owner {
			err = fmt.Errorf("%s still has the slot", owner)
		}
		return err
	}); err != nil {
		return nil, 0, err
	}
	took = time.Since(began)
	// The new owner has to be seen, or the flows might have ended before anything moved.
	if err := w.until(ctx, egressPatience, func() error {
		seen, err := w.capture.Seen()
		if spells := seen.Spells[egressSlot]; err == nil && (len(spells) == 0 || spells[len(spells)-1].Node == owner) {
			err = fmt.Errorf("only %s has sent", owner)
		}
		return err
	}); err != nil {
		return nil, 0, err
	}
	for _, f := range flows {
		if err := f.Answered(ctx, f.Count()+100); err != nil && f.Broken() == nil {
			return nil, 0, err
		}
	}
	for _, f := range flows {
		r := f.Stop()
		out = append(out, flowOutcome{r, f.Broken() != nil})
	}
	flows = nil
	if _, err := c.DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: owner, Undo: true}); err != nil {
		return nil, 0, err
	}
	return out, took, w.ready(ctx)
}

// egressJobs are the figures of a gateway's and the tunnels' own code.
func egressJobs() []job {
	return []job{
		{name: "1,000 clients on one gateway: messages for one more", target: "constant", pkg: "./chaos/bench",
			run: "BenchmarkClients", count: "1x",
			how: "the network namespace of a gateway, with the tunnels' driver that this kernel has: 1,000 dual-stack clients " +
				"at once, with the memory that the process takes then; one more beside 1,000, and beside 10; messages to the " +
				"kernel",
			judge: func(m metrics) (string, bool) {
				few, many := m["10/one-more-writes"], m["1000/one-more-writes"]
				return fmt.Sprintf("%.0f, beside 10 clients %.0f; %.1f ms, beside 10 %.1f ms; all 1,000 in %.0f ms, %.1f MiB", many,
						few, m["1000/one-more-ms"], m["10/one-more-ms"], m["1000/setup-ms"], m["1000/memory-bytes"]/(1<<20)),
					many > 0 && many <= few
			}},
		{name: "FoU over TUN beside plain forwarding over TUN", pkg: "./dataplane/fou",
			run: "BenchmarkTCP/^(plain|userspace)$", count: "2000x",
			how: "one TCP connection from a client through a gateway to a target, in network namespaces: through two TUN " +
				"drivers, and the same way over two TUN devices of one process that copies packets from one to the other and " +
				"does " +
				"nothing else; 2 GB each, in the same run",
			judge: func(m metrics) (string, bool) {
				text := func(family string) string {
					plain, ours := m["plain/"+family+"/MB/s"], m["userspace/"+family+"/MB/s"]
					return fmt.Sprintf("%s %.2f beside %.2f Gb/s (%.0f %%)", family, ours*8/1000, plain*8/1000, 100*ours/plain)
				}
				return text("IPv4") + "; " + text("IPv6"), m["userspace/IPv4/MB/s"] > 0 && m["userspace/IPv6/MB/s"] > 0
			}},
	}
}
