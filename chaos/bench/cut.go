package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	pingEvery  = 20 * time.Millisecond // 50 a second
	cutPatient = 8 * time.Second       // a cut that takes longer counts as that long
)

// cuts measures how long traffic stands still when the direct path under it dies.
func (f *field) cuts(ctx context.Context) []Figure {
	const name, limit = "direct path cut: traffic again", time.Second
	var twoWay, oneWay, all sample
	pairs := f.directPairs()
	runs := f.opts.runs(54, 9)
	f.note("cuts: %d", runs)
	for i := range runs {
		p := pairs[(i*7)%len(pairs)] // neighbours in the list share a node
		if i%2 == 1 {
			p = pair{p.to, p.from}
		}
		b := lab.Block{From: []string{p.from}, To: []string{p.to}, Proto: "udp"}
		kind, into := "both ways", &twoWay
		switch i % 3 {
		case 1:
			b.Oneway, kind, into = true, "the pinging side's packets are lost", &oneWay
		case 2:
			b.From, b.To, b.Oneway, kind, into = b.To, b.From, true, "the answers are lost", &oneWay
		}
		d, err := f.cut(ctx, p, b)
		if err != nil {
			return []Figure{notMeasured(name, "≤ 1.00 s at p99", fmt.Errorf("cut %d, %s, %s: %w", i+1, p, kind, err))}
		}
		into.add(d, p.String())
		all.add(d, fmt.Sprintf("%s, %s", p, kind))
	}
	return []Figure{
		all.figure(name, 99, limit, fmt.Sprintf("ping 50/s over a direct path whose UDP is cut, then no answer until the next answered echo; two-way: %s; one-way: %s", twoWay.text(100), oneWay.text(100))),
	}
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
