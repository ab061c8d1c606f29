package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	pingEvery  = 20 * time.Millisecond // 50 a second
	cutPatient = 8 * time.Second       // a cut that takes longer counts as that long
	cutLimit   = 750 * time.Millisecond
	wakeWithin = 30 * time.Second // that a pair which can be direct may take to be, from its first packet
)

// cutSamples are how long traffic stood still when the direct path under it was cut.
type cutSamples struct{ all, twoWay, oneWay sample }

// next cuts a pair's path, in turns both ways and one way, and adds what that took.
func (s *cutSamples) next(ctx context.Context, f *field, p pair) error {
	i := len(s.all.took)
	b := lab.Block{From: []string{p.from}, To: []string{p.to}, Proto: "udp"}
	kind, into := "both ways", &s.twoWay
	switch i % 3 {
	case 1:
		b.Oneway, kind, into = true, "the pinging side's packets are lost", &s.oneWay
	case 2:
		b.From, b.To, b.Oneway, kind, into = b.To, b.From, true, "the answers are lost", &s.oneWay
	}
	d, err := f.cut(ctx, p, b)
	if err != nil {
		return fmt.Errorf("cut %d, %s, %s: %w", i+1, p, kind, err)
	}
	into.add(d, p.String())
	s.all.add(d, fmt.Sprintf("%s, %s", p, kind))
	return nil
}

func (s *cutSamples) figure(name, how string) Figure {
	how = fmt.Sprintf("%s; two-way: %s; one-way: %s", how, s.twoWay.text(100), s.oneWay.text(100))
	return s.all.figure(name, 99, cutLimit, how)
}

// cuts measures how long traffic stands still when the direct path under it dies.
func (f *field) cuts(ctx context.Context) []Figure {
	const name = "direct path cut: traffic again"
	var s cutSamples
	pairs := f.directPairs()
	runs := f.opts.runs(54, 9)
	f.note("cuts: %d", runs)
	for i := range runs {
		p := pairs[(i*7)%len(pairs)] // neighbours in the list share a node
		if i%2 == 1 {
			p = pair{p.to, p.from}
		}
		if err := s.next(ctx, f, p); err != nil {
			return []Figure{notMeasured(name, "≤ "+ms(cutLimit)+" at p99", err)}
		}
	}
	return []Figure{s.figure(name,
		"ping 50/s over a direct path whose UDP is cut, then no answer until the next answered echo")}
}

// wokenCuts measures the same in a crowd, where a pair is idle until it has traffic.
func (b *bench) wokenCuts(ctx context.Context, l *lab.Lab) []Figure {
	name := fmt.Sprintf("%d agents: direct path of a pair just woken cut: traffic again", len(l.Spec.NodeNames()))
	var cuts cutSamples
	var woken sample
	f := &field{bench: b, lab: l, names: l.Spec.NodeNames()}
	pairs, err := f.idlePairs(ctx)
	runs := b.opts.runs(21, 6)
	if err == nil && len(pairs) < runs {
		err = fmt.Errorf("%d pairs are idle and can be direct, want %d", len(pairs), runs)
	}
	b.note("crowd: %d cuts of idle pairs, of %d", runs, len(pairs))
	for i := 0; i < runs && err == nil; i++ {
		p := pairs[i*len(pairs)/runs]
		if i%2 == 1 {
			p = pair{p.to, p.from}
		}
		if err = f.wake(ctx, p, &woken); err == nil {
			err = cuts.next(ctx, f, p)
		}
	}
	if err != nil {
		return []Figure{notMeasured(name, "≤ "+ms(cutLimit)+" at p99", err)}
	}
	return []Figure{
		cuts.figure(name, "each of another pair: ping 50/s until the idle pair is direct at both ends, then the path's UDP "+
			"is cut under the ping, then no answer until the next answered echo"),
		{
			Name: "  from its first packet until both ends are direct", Got: woken.text(100), Load: loadAverage(),
			How: "the same pairs, with ping 50/s",
		},
	}
}

// idlePairs lists pairs between sites that can be direct and are idle at both ends.
func (f *field) idlePairs(ctx context.Context) ([]pair, error) {
	idle := map[pair]bool{}
	for _, from := range f.names {
		c, err := f.lab.Client(from)
		if err != nil {
			return nil, err
		}
		r, err := c.Peers(ctx, &skeinv1.PeersRequest{})
		if err != nil {
			return nil, fmt.Errorf("ask %s for its peers: %w", from, err)
		}
		for _, p := range r.GetPeers() {
			idle[pair{from, p.GetName()}] = p.GetRule() == ruleIdle
		}
	}
	return slices.DeleteFunc(f.directPairs(), func(p pair) bool {
		return f.site(p.from) == f.site(p.to) || !idle[p] || !idle[pair{p.to, p.from}]
	}), nil
}

// ruleIdle is what an agent gives as the rule of a pair that no traffic asks for.
const ruleIdle = "idle"

// wake pings until an idle pair is direct, and adds how long that took.
func (f *field) wake(ctx context.Context, p pair, into *sample) error {
	began := time.Now()
	s, err := f.lab.PingNode(p.from, p.to, pingEvery, 0)
	if err != nil {
		return err
	}
	defer s.Stop()
	if err := f.until(ctx, wakeWithin, func() error { return f.direct(ctx, p) }); err != nil {
		return fmt.Errorf("%s was idle and has traffic: %w", p, err)
	}
	into.add(time.Since(began), p.String())
	return nil
}

// cut blocks a direct path under a running ping and returns the longest silence.
func (f *field) cut(ctx context.Context, p pair, b lab.Block) (time.Duration, error) {
	if err := f.until(ctx, formedWithin, func() error { return f.direct(ctx, p) }); err != nil {
		return 0, err
	}
	s, err := f.lab.PingNode(p.from, p.to, pingEvery, 0)
	if err != nil {
		return 0, err
	}
	wait, cancel := context.WithTimeout(ctx, cutPatient)
	err = s.Answered(wait, 25)
	cancel()
	if err == nil {
		err = f.until(ctx, cutPatient, func() error { return f.direct(ctx, p) }) // it may have been given up between
	}
	if err != nil {
		s.Stop()
		return 0, fmt.Errorf("before the cut: %w", err)
	}
	before := s.Report().Received
	if err := f.lab.Block(b); err != nil {
		s.Stop()
		return 0, err
	}
	wait, cancel = context.WithTimeout(ctx, cutPatient)
	_ = s.Answered(wait, before+60) // if not, the report says for how long there was silence
	cancel()
	r := s.Stop()
	return r.Longest(), f.lab.Heal(ctx, p.from, p.to)
}
