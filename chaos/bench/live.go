package bench

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

//go:embed live.yaml
var liveLab []byte

// live measures changes of what a user sets, made while everything runs.
func (b *bench) live(ctx context.Context) (out []Figure) {
	const what = "changes while it runs"
	l, down, err := b.raise(ctx, liveLab)
	if err != nil {
		return []Figure{notMeasured(what, "", err)}
	}
	defer func() {
		if err := down(); err != nil {
			out = append(out, notMeasured("taking the lab down", "", err))
		}
	}()
	f := &liveField{&field{bench: b, lab: l, names: l.Spec.NodeNames()}}
	if err := l.WaitConverged(ctx, formedWithin); err != nil {
		return f.failed(ctx, fmt.Errorf("%s: %w", what, err))
	}
	for _, part := range []func(context.Context) ([]Figure, error){f.reloads, f.labels, f.rotations} {
		figures, err := part(ctx)
		if err != nil {
			return append(out, f.failed(ctx, fmt.Errorf("%s: %w", what, err))...)
		}
		out = append(out, figures...)
	}
	return out
}

type liveField struct{ *field }

// reloads change a host's file, and wait until the kernel of each other host follows.
func (f *liveField) reloads(ctx context.Context) ([]Figure, error) {
	const host = "home1"
	var all sample
	runs := f.opts.runs(30, 5)
	f.note("reloads: %d", runs)
	for i := range runs {
		prefix := fmt.Sprintf("192.168.%d.0/24", 100+i)
		began := time.Now()
		const change = `(grep -v ^nodeAddresses: skein.yaml; echo "nodeAddresses: [$0]") >new
			mv new skein.yaml; skein reload`
		if out, exit, err := f.lab.Exec(ctx, host, "sh", "-c", change, prefix); err != nil || exit != 0 {
			return nil, fmt.Errorf("reload: exit status %d, %w: %s", exit, err, out)
		}
		for _, n := range f.names {
			if n == host {
				continue
			}
			err := f.until(ctx, formedWithin, func() error {
				out, _, err := f.lab.Exec(ctx, n, "nft", "list", "set", "inet", "skein", "skein_targets_ipv4")
				if err == nil && !strings.Contains(out, prefix) {
					err = fmt.Errorf("%s does not lead %s to %s: %s", n, prefix, host, out)
				}
				return err
			})
			if err != nil {
				return nil, err
			}
		}
		all.add(time.Since(began), prefix)
	}
	return []Figure{all.figure("a changed file: in the kernel of all hosts", 100, time.Second,
		"another prefix under nodeAddresses in one host's skein.yaml, and `skein reload`; from before the file is written "+
			"until the nft sets of the three other hosts have the prefix, looked at one after the other")}, nil
}

// labels make members gateways of an egress, one after the other.
func (f *liveField) labels(ctx context.Context) ([]Figure, error) {
	client, err := f.lab.Client("dc1")
	if err != nil {
		return nil, err
	}
	ids := map[string]string{}
	for _, n := range []string{"dc2", "home1"} {
		c, err := f.lab.Client(n)
		if err != nil {
			return nil, err
		}
		st, err := c.Status(ctx, &skeinv1.StatusRequest{})
		if err != nil {
			return nil, fmt.Errorf("node %s: %w", n, err)
		}
		ids[n] = st.GetNodeId()
	}
	forwards := func(want string) error { // a node's ID, or "" for nobody
		r, err := client.ShowEgress(ctx, &skeinv1.ShowEgressRequest{Namespace: "out", Name: "nat"})
		if err != nil {
			return err
		}
		got := ""
		for _, g := range r.GetGateways() {
			for _, s := range g.GetSlots() {
				if s.GetForwarding() {
					got += g.GetNodeId()
				}
			}
		}
		if got != want {
			return fmt.Errorf("node %q forwards, want %q", got, want)
		}
		return nil
	}
	var all sample
	runs := f.opts.runs(20, 4)
	f.note("labels: %d", runs)
	for i := range runs {
		n := []string{"dc2", "home1"}[i%2]
		began := time.Now()
		set := &skeinv1.SetNodeRequest{Node: n, SetLabels: map[string]string{"gateway": "yes"}}
		if _, err := client.SetNode(ctx, set); err != nil {
			return nil, err
		}
		if err := f.until(ctx, formedWithin, func() error { return forwards(ids[n]) }); err != nil {
			return nil, err
		}
		all.add(time.Since(began), n)
		unset := &skeinv1.SetNodeRequest{Node: n, RemoveLabels: []string{"gateway"}}
		if _, err := client.SetNode(ctx, unset); err != nil {
			return nil, err
		}
		if err := f.until(ctx, formedWithin, func() error { return forwards("") }); err != nil {
			return nil, err
		}
	}
	return []Figure{all.figure("a changed label: the new gateway forwards", 100, time.Second,
		"`skein node set NODE gateway=yes` where no member is a gateway; until the node says that it has the slot's lease "+
			"and forwards, asked every 10 ms")}, nil
}

// rotations change hosts' WireGuard keys under echoes over direct paths and a relay.
func (f *liveField) rotations(ctx context.Context) ([]Figure, error) {
	if err := f.lab.Block(lab.Block{From: []string{"home1"}, To: []string{"office1"}, Proto: "udp"}); err != nil {
		return nil, err
	}
	if err := f.until(ctx, formedWithin, func() error { return f.relayed(ctx, pair{"home1", "office1"}) }); err != nil {
		return nil, err
	}
	var streams []*ping.Stream
	stop := func() (reports []ping.Report) {
		for _, s := range streams {
			reports = append(reports, s.Stop())
		}
		streams = nil
		return reports
	}
	defer stop()
	for _, from := range f.names {
		for _, to := range f.names {
			if from == to {
				continue
			}
			s, err := f.lab.PingNode(from, to, 10*time.Millisecond, 0)
			if err != nil {
				return nil, err
			}
			streams = append(streams, s)
		}
	}
	answered := func(more int) error {
		within, cancel := context.WithTimeout(ctx, formedWithin)
		defer cancel()
		for _, s := range streams {
			if err := s.Answered(within, s.Report().Received+more); err != nil {
				return err
			}
		}
		return nil
	}
	if err := answered(50); err != nil {
		return nil, err
	}
	var agreed sample
	late, runs := 0, f.opts.runs(30, 4)
	f.note("rotated keys: %d", runs)
	for i := range runs {
		n := f.names[i%len(f.names)]
		client, err := f.lab.Client(n)
		if err != nil {
			return nil, err
		}
		r, err := client.RotateNodeKey(ctx, &skeinv1.RotateNodeKeyRequest{})
		if err != nil {
			return nil, fmt.Errorf("rotate the key of %s: %w", n, err)
		}
		late += len(r.GetLate())
		agreed.add(time.Duration(r.GetTookNanos()), n)
		if err := answered(50); err != nil {
			return nil, fmt.Errorf("after the key of %s was rotated: %w", n, err)
		}
	}
	lost, sent, longest := 0, 0, sample{}
	var detail []string
	for _, r := range stop() {
		lost, sent = lost+r.Lost(), sent+r.Received+r.Lost()
		longest.add(r.Longest(), "")
		if r.Lost() > 0 {
			detail = append(detail, fmt.Sprintf("%d of %d", r.Lost(), r.Received+r.Lost()))
		}
	}
	return []Figure{{
		Name: "WireGuard keys rotated: echoes lost", Target: "0",
		Got:     fmt.Sprintf("%d of %s in %d rotations", lost, thousands(float64(sent)), runs),
		Verdict: verdict(lost == 0), Load: loadAverage(), Detail: detail,
		How: "`skein node rotate-key` on four hosts in turn, with echoes each 10 ms from each to each: direct, and by a " +
			"relay where both ends are behind NATs",
	}, {
		Name: "  longest time without an answer", Load: loadAverage(),
		Got: fmt.Sprintf("%s; peers that were not ready: %d; from the device's change to the event: %s",
			longest.text(100), late, agreed.text(100)),
		How: "of each of the twelve streams, over all rotations",
	}}, nil
}
