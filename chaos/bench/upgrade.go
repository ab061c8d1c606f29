package bench

import (
	"context"
	"errors"
	"fmt"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// upgrades measures what is lost when a pair leaves its relay for a direct path.
func (f *field) upgrades(ctx context.Context) []Figure {
	const name = "relay to direct path: echoes lost"
	echoes := f.opts.runs(1000, 200)
	target := fmt.Sprintf("0 of %s", thousands(float64(echoes)))
	f.note("upgrades under %d echoes", echoes)
	pairs := f.directPairs()
	lost, done, switches := 0, 0, 0
	var detail []string
	for ; done < echoes; switches++ {
		p := pairs[(switches*7)%len(pairs)]
		r, err := f.upgrade(ctx, p)
		if err != nil {
			return []Figure{notMeasured(name, target, fmt.Errorf("upgrade %d, %s: %w", switches+1, p, err))}
		}
		done, lost = done+r.Received+r.Lost(), lost+r.Lost()
		if r.Lost() > 0 {
			detail = append(detail, fmt.Sprintf("%s: %d", p, r.Lost()))
		}
	}
	return []Figure{{
		Name: name, Target: target, Got: fmt.Sprintf("%d of %s", lost, thousands(float64(done))), Verdict: verdict(lost == 0),
		Load: loadAverage(), Detail: detail,
		How: fmt.Sprintf("ping 50/s over a relay while the pair's UDP is let through again, until 50 echoes after both "+
			"ends are direct; %d upgrades", switches),
	}}
}

// upgrade lets a relayed pair turn direct under a running ping.
func (f *field) upgrade(ctx context.Context, p pair) (r ping.Report, err error) {
	none := ping.Report{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.lab.Heal(ctx, p.from, p.to)) // what is measured next needs it
		}
	}()
	if err := f.until(ctx, formedWithin, func() error { return f.direct(ctx, p) }); err != nil {
		return none, err
	}
	if err := f.lab.Block(lab.Block{From: []string{p.from}, To: []string{p.to}, Proto: "udp"}); err != nil {
		return none, err
	}
	// It takes traffic to notice soon; that one's losses are the cut's.
	s, err := f.lab.PingNode(p.from, p.to, pingEvery, 0)
	if err != nil {
		return none, err
	}
	err = f.until(ctx, formedWithin, func() error { return f.relayed(ctx, p) })
	s.Stop()
	if err != nil {
		return none, err
	}
	if s, err = f.lab.PingNode(p.from, p.to, pingEvery, 0); err != nil {
		return none, err
	}
	wait, cancel := context.WithTimeout(ctx, formedWithin)
	defer cancel()
	if err = s.Answered(wait, 25); err == nil {
		err = f.lab.Heal(ctx, p.from, p.to)
	}
	if err == nil {
		err = f.until(ctx, formedWithin, func() error { return f.direct(ctx, p) })
	}
	if err == nil {
		err = s.Answered(wait, s.Report().Received+50)
	}
	return s.Stop(), err
}

// relayed tells whether both ends use a relay.
func (f *field) relayed(ctx context.Context, p pair) error {
	for _, e := range []pair{p, {p.to, p.from}} {
		v, err := f.lab.Path(ctx, e.from, e.to)
		if err != nil {
			return err
		}
		if v.GetPath() != "relay" || !v.GetAlive() {
			return fmt.Errorf("%s: path %s (%s)", e, v.GetPath(), v.GetReason())
		}
	}
	return nil
}
