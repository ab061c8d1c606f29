package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	formedWithin = 60 * time.Second
	// directRetry lets pairs come back to a direct path between two runs without minutes of waiting. It
	// has no part in what is measured.
	directRetry = 3 // seconds
)

// mesh measures what happens between hosts.
func (b *bench) mesh(ctx context.Context) (out []Figure) {
	var fresh sample
	for left := b.opts.runs(4, 2); left > 0; left-- {
		out = b.inMesh(ctx, func(f *field) []Figure {
			if err := f.met(ctx, &fresh); err != nil || left > 1 {
				return f.failed(ctx, err)
			}
			f.fresh = fresh
			return f.measure(ctx)
		})
		if len(out) > 0 {
			break
		}
	}
	return out
}

const everything = "everything between hosts"

// inMesh runs fn in a new lab.
func (b *bench) inMesh(ctx context.Context, fn func(*field) []Figure) (out []Figure) {
	l, down, err := b.raise(ctx, meshLab)
	if err != nil {
		return []Figure{notMeasured(everything, "", err)}
	}
	defer func() {
		if err := down(); err != nil {
			out = append(out, notMeasured("taking the lab down", "", err))
		}
	}()
	f := &field{bench: b, lab: l, names: l.Spec.NodeNames()}
	if err := f.form(ctx); err != nil {
		return f.failed(ctx, err)
	}
	return fn(f)
}

func (f *field) failed(ctx context.Context, err error) []Figure {
	if err == nil {
		return nil
	}
	return []Figure{notMeasured(everything, "", errors.Join(err, f.keep(ctx)))}
}

func (f *field) measure(ctx context.Context) (out []Figure) {
	for _, part := range []func(context.Context) []Figure{f.records, f.cuts, f.upgrades, f.starts, f.leaders} {
		out = append(out, part(ctx)...)
	}
	f.keepMisses(ctx, f.lab, out)
	return out
}

// met adds, for every pair of a mesh that was just formed, how long it took from both ends' first record of
// the other to a direct path at both.
func (f *field) met(ctx context.Context, into *sample) error {
	for _, p := range f.pairs() {
		if !f.canBeDirect(p) {
			continue
		}
		since, err := f.directSince(ctx, p)
		if err != nil {
			return err
		}
		var known time.Time
		for _, e := range []pair{p, {p.to, p.from}} {
			at, err := f.knownSince(ctx, e)
			if err != nil {
				return err
			}
			if at.After(known) {
				known = at
			}
		}
		into.add(max(0, since.Sub(known)), p.String()+" newly met")
	}
	return nil
}

// knownSince is when a node's journal first has a record of the other.
func (f *field) knownSince(ctx context.Context, p pair) (time.Time, error) {
	history, err := f.history(ctx, p)
	if err != nil {
		return time.Time{}, err
	}
	for _, e := range history {
		if e.GetPathInput().GetKind() == "record" {
			return time.Unix(0, e.GetTime()), nil
		}
	}
	return time.Time{}, fmt.Errorf("the journal of %s does not tell when the first record of %s came", p.from, p.to)
}

// field is the lab in which several figures are measured, one after the other.
type field struct {
	*bench
	lab   *lab.Lab
	names []string
	fresh sample // of pairs that met for the first time
}

// pair is two nodes, one of which begins.
type pair struct{ from, to string }

func (p pair) String() string { return p.from + "→" + p.to }

// pairs lists every two nodes once.
func (f *field) pairs() (out []pair) {
	for i, a := range f.names {
		for _, b := range f.names[i+1:] {
			out = append(out, pair{a, b})
		}
	}
	return out
}

// directPairs lists those that can be direct.
func (f *field) directPairs() []pair {
	return slices.DeleteFunc(f.pairs(), func(p pair) bool { return !f.canBeDirect(p) })
}

// canBeDirect leaves out the pairs of a symmetric NAT and one that filters by ports: they meet by port prediction,
// whose time has no bound and a figure of its own (group prediction). All others meet by probing.
func (f *field) canBeDirect(p pair) bool {
	a, b := f.site(p.from), f.site(p.to)
	return a == b || !predicted(f.kind(a), f.kind(b)) && !predicted(f.kind(b), f.kind(a))
}

func predicted(a, b fabric.NAT) bool {
	return a == fabric.Symmetric && (b == fabric.Symmetric || b == fabric.PortRestrictedCone || b == fabric.Double)
}

func (f *field) site(node string) string {
	n, _ := f.lab.Spec.Node(node)
	return n.Site
}

// kind is the NAT that a site is behind.
func (f *field) kind(site string) fabric.NAT {
	for _, s := range f.lab.Spec.Sites {
		if s.Name == site {
			return s.NAT
		}
	}
	return ""
}

func (f *field) keep(ctx context.Context) error { return f.bench.keep(ctx, f.lab) }

// keep leaves logs for whoever looks into a miss.
func (b *bench) keep(ctx context.Context, l *lab.Lab) error {
	if b.opts.Artifacts == "" {
		return nil
	}
	dir, err := l.SaveArtifacts(context.WithoutCancel(ctx), b.opts.Artifacts)
	if err == nil {
		b.note("logs and states are in %s", dir)
	}
	return err
}

// keepMisses is keep where a figure is missed or could not be taken.
func (b *bench) keepMisses(ctx context.Context, l *lab.Lab, of []Figure) {
	if !slices.ContainsFunc(of, func(f Figure) bool { return f.Verdict == Missed || f.Verdict == Failed }) {
		return
	}
	if err := b.keep(ctx, l); err != nil {
		b.note("logs: %v", err)
	}
}

// form waits until the mesh stands as it should.
func (f *field) form(ctx context.Context) error {
	c, err := f.lab.Client(f.names[0])
	if err != nil {
		return err
	}
	if _, err := c.Settings(ctx,
		&skeinv1.SettingsRequest{Change: &skeinv1.Settings{DirectRetryIntervalSeconds: directRetry},
			Fields: []string{"direct_retry_interval_seconds"}}); err != nil {
		return fmt.Errorf("settings: %w", err)
	}
	if err := f.lab.WaitConverged(ctx, formedWithin); err != nil {
		return err
	}
	return f.awaitDirect(ctx)
}

// awaitDirect waits until every pair that can be direct is direct at both ends, and there are three voters.
func (f *field) awaitDirect(ctx context.Context) error {
	if err := f.until(ctx, formedWithin, func() error { return f.voters(ctx, 3) }); err != nil {
		return err
	}
	for _, p := range f.pairs() {
		if !f.canBeDirect(p) {
			continue
		}
		if err := f.until(ctx, formedWithin, func() error { return f.direct(ctx, p) }); err != nil {
			return err
		}
	}
	return nil
}

func (f *field) voters(ctx context.Context, want int) error {
	c, err := f.lab.Client(f.names[0])
	if err != nil {
		return err
	}
	st, err := c.Status(ctx, &skeinv1.StatusRequest{})
	if err != nil {
		return err
	}
	n := 0
	for _, s := range st.GetServers() {
		if s.GetVoter() {
			n++
		}
	}
	if n != want {
		return fmt.Errorf("%d voters, want %d", n, want)
	}
	return nil
}

// direct tells whether both ends use a direct path that answers.
func (f *field) direct(ctx context.Context, p pair) error {
	_, err := f.directSince(ctx, p)
	return err
}

// directSince is when the later of the two ends left the relay for a direct path. Moves from one direct
// endpoint to a better one do not count.
func (f *field) directSince(ctx context.Context, p pair) (time.Time, error) {
	var since time.Time
	for _, e := range []pair{p, {p.to, p.from}} {
		v, err := f.lab.Path(ctx, e.from, e.to)
		if err != nil {
			return since, err
		}
		if v.GetPath() != "direct" || !v.GetAlive() {
			return since, fmt.Errorf("%s: path %s (%s)", e, v.GetPath(), v.GetReason())
		}
		history, err := f.history(ctx, e)
		if err != nil {
			return since, err
		}
		t := v.GetSince()
		for _, h := range history {
			d := h.GetPathDecision()
			if strings.HasPrefix(d.GetTo(), "direct:") && !strings.HasPrefix(d.GetFrom(), "direct:") {
				t = h.GetTime()
			}
		}
		if t := time.Unix(0, t); t.After(since) {
			since = t
		}
	}
	return since, nil
}

// history is what a node's journal has of a peer, the oldest first.
func (f *field) history(ctx context.Context, p pair) ([]*skeinv1.JournalEntry, error) {
	c, err := f.lab.Client(p.from)
	if err != nil {
		return nil, err
	}
	r, err := c.ExplainPeer(ctx, &skeinv1.ExplainPeerRequest{Peer: p.to})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(r.GetHistory(), func(a, b *skeinv1.JournalEntry) int {
		return cmp.Compare(a.GetTime(), b.GetTime())
	})
	return r.GetHistory(), nil
}

func (f *field) status(ctx context.Context, node string) (*skeinv1.StatusResponse, error) {
	c, err := f.lab.Client(node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return c.Status(ctx, &skeinv1.StatusRequest{})
}

// held is what a node holds of others: name → record and when it was taken in.
type held struct {
	record *skeinv1.Record
	at     time.Time
}

func (f *field) recordsOf(ctx context.Context, node string) (map[string]held, error) {
	c, err := f.lab.Client(node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	r, err := c.Nodes(ctx, &skeinv1.NodesRequest{})
	if err != nil {
		return nil, err
	}
	now := time.Now()
	out := map[string]held{}
	for _, n := range r.GetNodes() {
		if n.GetRecord() != nil {
			out[n.GetNode().GetName()] = held{n.GetRecord(), now.Add(-time.Duration(n.GetRecordAgeNanos()))}
		}
	}
	return out, nil
}
