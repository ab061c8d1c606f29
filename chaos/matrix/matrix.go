package matrix

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

// Options say what is measured.
type Options struct {
	Kinds     []string // none: all, and the pairs that share a public address
	Dir       string   // where labs keep their directories
	Binary    string   // the skein program; default the one that runs now
	Patience  time.Duration
	Progress  func(string)
	Artifacts string // where logs are left when a pair did not come out as expected; "": nowhere
}

// Patience of a run that names none: birthday probing may fail, and tries again after half a minute.
const defaultPatience = 3 * time.Minute

const (
	atOnce    = 4                      // agents that join at the same time
	askEvery  = 50 * time.Millisecond  // between echoes until the first is answered
	lookEvery = 500 * time.Millisecond // at paths
	hold      = 2 * time.Second        // that all have to stay as expected
	slow      = 10 * time.Second       // a first packet that took longer is worth its logs
)

// Outcome is what became of a pair.
type Outcome struct {
	Pair   string        `json:"pair"`
	Kinds  [2]string     `json:"kinds"`
	Want   string        `json:"want"`
	Got    string        `json:"got"` // direct, relay, none; both where the ends differ
	OK     bool          `json:"ok"`
	IPv6   bool          `json:"ipv6,omitempty"` // the direct path's
	UDP    bool          `json:"udp,omitempty"`  // the relayed path goes through UDP ports of the relay, at both ends
	Rule   string        `json:"rule"`
	First  time.Duration `json:"first_packet"` // -1: none
	Direct time.Duration `json:"direct"`       // until both ends were direct; -1: never
	Why    string        `json:"why,omitempty"`
}

// Report is all that a run has seen.
type Report struct {
	At       time.Time `json:"at"`
	CPUs     int       `json:"cpus"`
	Seconds  float64   `json:"seconds"`
	Kinds    []string  `json:"kinds"`
	Whole    bool      `json:"whole"`
	Outcomes []Outcome `json:"outcomes"`
}

// OK is true when every pair came out as expected.
func (r *Report) OK() bool {
	return !slices.ContainsFunc(r.Outcomes, func(o Outcome) bool { return !o.OK })
}

// Run measures.
func Run(ctx context.Context, opts Options) (*Report, error) {
	chosen, err := choose(opts.Kinds)
	if err != nil {
		return nil, err
	}
	if opts.Patience == 0 {
		opts.Patience = defaultPatience
	}
	r := &Report{At: time.Now(), CPUs: runtime.NumCPU(), Whole: len(opts.Kinds) == 0}
	for _, k := range chosen {
		r.Kinds = append(r.Kinds, k.Name)
	}
	name := fmt.Sprintf("matrix%d", os.Getpid()%10000)
	meshes := grids(name, chosen)
	if r.Whole {
		meshes = append(meshes, together(name+"-t"))
	}
	for i, m := range meshes {
		if opts.Progress != nil {
			opts.Progress(fmt.Sprintf("lab %d of %d: %d pairs", i+1, len(meshes), len(m.pairs)))
		}
		out, err := measure(ctx, m, opts)
		if err != nil {
			return nil, err
		}
		r.Outcomes = append(r.Outcomes, out...)
	}
	slices.SortStableFunc(r.Outcomes, func(a, b Outcome) int {
		return cmp.Or(order(a.Kinds[0], b.Kinds[0]), order(a.Kinds[1], b.Kinds[1]))
	})
	r.Seconds = time.Since(r.At).Seconds()
	return r, nil
}

// order compares kinds as the table has them; what is not a kind comes last, as it is.
func order(a, b string) int {
	place := func(n string) int { return (slices.Index(Kinds(), n) + len(kinds) + 1) % (len(kinds) + 1) }
	return cmp.Compare(place(a), place(b))
}

func choose(names []string) ([]Kind, error) {
	if len(names) == 0 {
		return kinds, nil
	}
	var out []Kind
	for _, n := range names {
		i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == n })
		if i < 0 {
			return nil, fmt.Errorf("%q is not a kind; allowed: %s", n, strings.Join(Kinds(), ", "))
		}
		out = append(out, kinds[i])
	}
	return out, nil
}

// measure brings a lab up and watches its pairs.
func measure(ctx context.Context, m mesh, opts Options) (out []Outcome, err error) {
	spec, err := lab.Parse("matrix.yaml", []byte(m.file))
	if err != nil {
		return nil, err
	}
	f := newField(ctx, m.pairs)
	l, err := lab.Up(ctx, spec, lab.Options{Dir: opts.Dir, Binary: opts.Binary, Progress: opts.Progress,
		Artifacts: opts.Artifacts, AtOnce: atOnce, Joined: f.joined})
	defer f.end()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Down(context.WithoutCancel(ctx))) }()
	f.awaitSettled(ctx, l, opts.Patience)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	for _, p := range m.pairs {
		out = append(out, f.outcome(ctx, l, p))
	}
	if bad := slices.ContainsFunc(out, func(o Outcome) bool { return !o.OK || o.First > slow }); bad &&
		opts.Artifacts != "" {
		dir, err := l.SaveArtifacts(ctx, opts.Artifacts)
		if err == nil && opts.Progress != nil {
			opts.Progress("logs and states are in " + dir)
		}
	}
	return out, nil
}

// field watches the pairs of one lab.
type field struct {
	ctx    context.Context
	cancel context.CancelFunc
	pairs  []Pair
	asking sync.WaitGroup

	mu     sync.Mutex
	up     map[string]bool
	met    map[Pair]meeting
	direct map[[2]string]time.Time // since when, by the one end's word, it had a direct path to the other
}

// meeting is a pair's beginning.
type meeting struct {
	known    time.Time // when the later end had the other's record
	asked    time.Time // when the first echo left
	answered time.Time // when the first one was answered; zero: none
}

func newField(ctx context.Context, pairs []Pair) *field {
	f := &field{pairs: pairs, up: map[string]bool{}, met: map[Pair]meeting{}, direct: map[[2]string]time.Time{}}
	f.ctx, f.cancel = context.WithCancel(ctx)
	return f
}

func (f *field) end() { f.cancel(); f.asking.Wait() }

// joined begins to ask for an answer in every pair whose second node has just come up.
func (f *field) joined(l *lab.Lab, node string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.up[node] = true
	for _, p := range f.pairs {
		if (p.From == node && f.up[p.To]) || (p.To == node && f.up[p.From]) {
			f.asking.Go(func() { f.ask(l, p) })
		}
	}
}

// ask sends echoes until one is answered, and then sees in the journals when both ends knew each other.
func (f *field) ask(l *lab.Lab, p Pair) {
	m := meeting{asked: time.Now()}
	s, err := l.PingNode(p.From, p.To, askEvery, 0)
	if err != nil {
		return
	}
	if s.Answered(f.ctx, 1) == nil {
		m.answered = time.Now()
	}
	s.Stop()
	for _, e := range [][2]string{{p.From, p.To}, {p.To, p.From}} {
		if at, err := firstRecord(f.ctx, l, e[0], e[1]); err == nil && at.After(m.known) {
			m.known = at
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.met[p] = m
}

// firstRecord is when a node's journal first has a record of the other.
func firstRecord(ctx context.Context, l *lab.Lab, node, of string) (time.Time, error) {
	c, err := l.Client(node)
	if err != nil {
		return time.Time{}, err
	}
	r, err := c.ExplainPeer(ctx, &skeinv1.ExplainPeerRequest{Peer: of})
	if err != nil {
		return time.Time{}, err
	}
	var first time.Time
	for _, e := range r.GetHistory() {
		if at := time.Unix(0, e.GetTime()); e.GetPathInput().GetKind() == "record" && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	return first, nil
}

// awaitSettled looks at all paths until every pair is as expected and stays so, or patience is over.
func (f *field) awaitSettled(ctx context.Context, l *lab.Lab, patience time.Duration) {
	var held time.Time
	for deadline := time.Now().Add(patience); ; {
		switch left, now := f.look(ctx, l), time.Now(); {
		case left > 0:
			held = time.Time{}
		case held.IsZero():
			held = now
		}
		if now := time.Now(); now.After(deadline) || !held.IsZero() && now.Sub(held) >= hold {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookEvery):
		}
	}
}

// look asks every node for its paths and counts the pairs that are not as they should be.
func (f *field) look(ctx context.Context, l *lab.Lab) (left int) {
	ends := map[string][]string{}
	for _, p := range f.pairs {
		ends[p.From], ends[p.To] = append(ends[p.From], p.To), append(ends[p.To], p.From)
	}
	is := map[[2]string]string{}
	for node, peers := range ends {
		views, err := peersOf(ctx, l, node)
		if err != nil {
			continue
		}
		for _, peer := range peers {
			v := views[peer]
			if !v.GetAlive() {
				continue
			}
			e := [2]string{node, peer}
			is[e] = v.GetPath()
			f.mu.Lock()
			if _, seen := f.direct[e]; !seen && v.GetPath() == "direct" {
				f.direct[e] = time.Unix(0, v.GetSince())
			}
			f.mu.Unlock()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.pairs {
		want := p.Want.Path()
		if is[[2]string{p.From, p.To}] != want || is[[2]string{p.To, p.From}] != want || f.met[p].answered.IsZero() {
			left++
		}
	}
	return left
}

func peersOf(ctx context.Context, l *lab.Lab, node string) (map[string]*skeinv1.PeerView, error) {
	c, err := l.Client(node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := c.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, err
	}
	out := map[string]*skeinv1.PeerView{}
	for _, p := range r.GetPeers() {
		out[p.GetName()] = p
	}
	return out, nil
}

// outcome sums up a pair.
func (f *field) outcome(ctx context.Context, l *lab.Lab, p Pair) Outcome {
	o := Outcome{Pair: p.String(), Kinds: p.Kinds, Want: p.Want.String(), First: -1, Direct: -1}
	var got []string
	o.UDP = true
	for _, e := range [][2]string{{p.From, p.To}, {p.To, p.From}} {
		v, err := l.Path(ctx, e[0], e[1])
		if err != nil {
			o.Why = err.Error()
			v = &skeinv1.PeerView{Path: "unknown"}
		}
		if path := v.GetPath(); !slices.Contains(got, path) {
			got = append(got, path)
		}
		o.UDP = o.UDP && v.GetPath() == "relay" && v.GetDetail() == "udp"
		o.Rule, o.IPv6 = v.GetRule(), v.GetPath() == "direct" && strings.HasPrefix(v.GetEndpoint(), "[")
		if v.GetPath() != p.Want.Path() {
			o.Why = e[0] + ": " + v.GetReason()
		}
	}
	o.Got = strings.Join(got, " and ")
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.met[p]
	if from := later(m.known, m.asked); !m.answered.IsZero() {
		o.First = max(0, m.answered.Sub(from))
	}
	a, okA := f.direct[[2]string{p.From, p.To}]
	b, okB := f.direct[[2]string{p.To, p.From}]
	if okA && okB && !m.known.IsZero() {
		o.Direct = max(0, later(a, b).Sub(m.known))
	}
	o.OK = o.Got == p.Want.Path() && o.First >= 0
	if o.First < 0 && o.Why == "" {
		o.Why = "no echo was answered"
	}
	return o
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
