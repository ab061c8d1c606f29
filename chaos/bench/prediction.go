package bench

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

//go:embed prediction.yaml
var predictionLab []byte

const (
	predictionPairs   = 16 // in one lab
	predictionWithin  = 15 * time.Second
	predictionBudget  = 60 * time.Second // for all pairs of a lab, two at a time for each host
	predictionMedian  = 3 * time.Second
	predictionShare   = 98 // percent
	predictionProbes  = 2048
	predictionSockets = 256
)

// predictions are the runs that were seen.
type predictions struct {
	took     sample
	runs     int
	probes   []int
	sockets  []int
	failures []string
}

// prediction measures pairs of a port-restricted cone and a symmetric NAT, which meet by port prediction alone.
func (b *bench) prediction(ctx context.Context) []Figure {
	const name = "port-restricted with symmetric direct"
	target := fmt.Sprintf("≥ %d %% of 100 runs, median ≤ %s, ≤ %d probes, ≤ %d mappings", predictionShare,
		ms(predictionMedian), predictionProbes, predictionSockets)
	var g predictions
	for want := b.opts.runs(100, predictionPairs); g.runs < want; {
		if err := b.predictionRound(ctx, &g, want); err != nil {
			return []Figure{notMeasured(name, target, err)}
		}
		b.note("port prediction: %d of %d runs", g.runs, want)
	}
	return []Figure{g.figure(name, target)}
}

func (g *predictions) figure(name, target string) Figure {
	f := Figure{Name: name, Target: target, Load: loadAverage(), Detail: g.failures,
		How: "fresh agents behind 4 × 4 NATs of their own; from the agreement to begin until both ends have switched; the " +
			"first attempt of each pair; " +
			"probes from WireGuard's port at the one end, mappings of sockets at the other"}
	if len(g.took.took) == 0 {
		f.Got, f.Verdict = "no pair became direct", Missed
		return f
	}
	share := 100 * len(g.took.took) / g.runs
	f.Got = fmt.Sprintf("%d of %d direct, %s; probes median %d, most %d; mappings most %d", len(g.took.took), g.runs,
		g.took.text(95), middle(g.probes), slices.Max(g.probes), slices.Max(g.sockets))
	f.Verdict = verdict(share >= predictionShare && g.took.quantile(50) <= predictionMedian &&
		slices.Max(g.probes) <= predictionProbes &&
		slices.Max(g.sockets) <= predictionSockets)
	return f
}

func middle(all []int) int {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// predictionRound lets all pairs of a new lab meet.
func (b *bench) predictionRound(ctx context.Context, g *predictions, want int) (err error) {
	l, down, err := b.raise(ctx, predictionLab)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	f := &field{bench: b, lab: l, names: l.Spec.NodeNames()}
	if err := l.WaitConverged(ctx, formedWithin); err != nil {
		return err
	}
	limit := time.Now().Add(predictionBudget)
	for _, p := range f.pairs() {
		if !strings.HasPrefix(p.from, "home") || !strings.HasPrefix(p.to, "cloud") || g.runs == want {
			continue
		}
		g.runs++
		left := max(time.Until(limit), time.Second)
		_ = b.until(ctx, left, func() error { return f.firstPrediction(ctx, p) })
		if err := g.add(ctx, f, p); err != nil {
			g.failures = append(g.failures, err.Error())
			if kept := f.keep(ctx); kept != nil {
				b.note("logs: %v", kept)
			}
		}
	}
	return ctx.Err()
}

// firstPrediction tells whether a pair's first attempt is over.
func (f *field) firstPrediction(ctx context.Context, p pair) error {
	for _, e := range []pair{p, {p.to, p.from}} {
		v, err := f.explain(ctx, e)
		if err != nil {
			return err
		}
		if v.GetPeer().GetPath() != "direct" && v.GetGuess().GetTries() == 0 {
			return fmt.Errorf("%s: path %s, %s", e, v.GetPeer().GetPath(), v.GetGuess().GetOutcome())
		}
	}
	return nil
}

func (f *field) explain(ctx context.Context, p pair) (*skeinv1.ExplainPeerResponse, error) {
	c, err := f.lab.Client(p.from)
	if err != nil {
		return nil, err
	}
	return c.ExplainPeer(ctx, &skeinv1.ExplainPeerRequest{Peer: p.to})
}

// add takes a pair's first attempt down, or tells why it was none that counts as won.
func (g *predictions) add(ctx context.Context, f *field, p pair) error {
	var began, direct time.Time
	probes, sockets := 0, 0
	defer func() { g.probes, g.sockets = append(g.probes, probes), append(g.sockets, sockets) }()
	for _, e := range []pair{p, {p.to, p.from}} {
		v, err := f.explain(ctx, e)
		if err != nil {
			return err
		}
		q := v.GetGuess()
		probes, sockets = max(probes, int(q.GetProbes())), max(sockets, int(q.GetSockets())) // each counts at one end
		if v.GetPeer().GetPath() != "direct" || q.GetTries() > 0 {
			return fmt.Errorf("%s: path %s after %d failed attempts: %s", e, v.GetPeer().GetPath(), q.GetTries(), q.GetOutcome())
		}
		b, d := predictionTimes(v.GetHistory())
		if b.IsZero() || d.IsZero() {
			return fmt.Errorf("%s: the journal does not tell when the attempt began and ended", e)
		}
		if began.IsZero() || b.Before(began) {
			began = b
		}
		if d.After(direct) {
			direct = d
		}
	}
	if direct.Sub(began) > predictionWithin {
		return fmt.Errorf("%s: direct after %s", p, direct.Sub(began))
	}
	g.took.add(direct.Sub(began), p.String())
	return nil
}

// predictionTimes are when the peers agreed to begin and when the path became direct, by a journal.
func predictionTimes(history []*skeinv1.JournalEntry) (began, direct time.Time) {
	for _, e := range history {
		at := time.Unix(0, e.GetTime())
		if in := e.GetPathInput(); in.GetKind() == "guess" && began.IsZero() &&
			strings.Contains(in.GetDetail(), `"Phase":0`) {
			began = at
		}
		if strings.HasPrefix(e.GetPathDecision().GetTo(), "direct:") && (direct.IsZero() || at.Before(direct)) {
			direct = at
		}
	}
	return began, direct
}
