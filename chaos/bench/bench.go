package bench

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/pause"
)

//go:embed bench.yaml
var meshLab []byte

//go:embed fleet.yaml
var fleetLab []byte

// Options say what is measured.
type Options struct {
	Dir       string       // where labs keep their directories; default lab.DefaultDir
	Binary    string       // the skein program; default the one that runs now
	Source    string       // the module's directory, for figures that Go benchmarks give
	Quick     bool         // fewer runs: a first look in three minutes
	Only      []string     // groups to measure; none: all
	Runs      int          // of each fault in the group sites; 0: 30, or 3 with Quick
	Faults    []string     // of the group sites, by the names of Faults; none: all
	Artifacts string       // where a lab that failed leaves its logs
	Progress  func(string) // told what happens, a line each; may be nil
}

func (o Options) pick(full, quick time.Duration) time.Duration {
	if o.Quick {
		return quick
	}
	return full
}

func (o Options) runs(full, quick int) int {
	if o.Quick {
		return quick
	}
	return full
}

// Groups are the names that Options.Only knows, in the order in which they run.
func Groups() []string {
	var names []string
	for _, g := range (&bench{}).groups() {
		names = append(names, g.name)
	}
	return names
}

type bench struct{ opts Options }

type group struct {
	name string
	run  func(context.Context) []Figure
}

func (b *bench) groups() []group {
	return []group{
		{"mesh", b.mesh}, {"prediction", b.prediction}, {"relay-udp", b.relayUDP}, {"pods", b.pods}, {"blocks", b.blocks},
		{"egress", b.egress}, {"egress-scale", b.egressScale}, {"live", b.live}, {"sites", b.siteGroup}, {"crowd", b.crowd},
		{"memory", b.memory}, {"site-fleet", b.siteFleet}, {"throughput", b.throughput}, {"code", b.code},
	}
}

// Run measures. The report is never nil; the error tells what could not be measured at all.
func Run(ctx context.Context, opts Options) (*Report, error) {
	b := &bench{opts: opts}
	r := newReport(opts.Quick)
	if err := opts.checkFaults(); err != nil {
		return r, err
	}
	start := time.Now()
	for _, g := range b.groups() {
		if !opts.wants(g.name) {
			continue
		}
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		r.Figures = append(r.Figures, g.run(ctx)...)
	}
	r.Seconds = time.Since(start).Seconds()
	if len(r.Figures) == 0 {
		return r, fmt.Errorf("nothing was measured: no group is called %q; groups: %q", opts.Only, Groups())
	}
	return r, ctx.Err()
}

func (o Options) wants(name string) bool {
	for _, n := range o.Only {
		if n == name {
			return true
		}
	}
	return len(o.Only) == 0
}

func (b *bench) note(format string, a ...any) {
	if b.opts.Progress != nil {
		b.opts.Progress(fmt.Sprintf(format, a...))
	}
}

// raise brings a lab up and gives the function that takes it down again.
func (b *bench) raise(ctx context.Context, source []byte) (*lab.Lab, func() error, error) {
	spec, err := lab.Parse("bench.yaml", source)
	if err != nil {
		return nil, nil, err
	}
	// What a bench that was killed left behind is in the way.
	if err := lab.Down(ctx, spec.Name, b.opts.Dir); err != nil {
		return nil, nil, err
	}
	l, err := lab.Up(ctx, spec, lab.Options{Dir: b.opts.Dir, Binary: b.opts.Binary, Artifacts: b.opts.Artifacts,
		Progress: b.opts.Progress})
	if err != nil {
		return nil, nil, err
	}
	return l, func() error { return l.Down(context.WithoutCancel(ctx)) }, nil
}

const lookAgain = 10 * time.Millisecond

// until looks again and again until check holds.
func (b *bench) until(ctx context.Context, within time.Duration, check func() error) error {
	return b.untilEvery(ctx, lookAgain, within, check)
}

// untilEvery is until for looks that cost the agents more.
func (b *bench) untilEvery(ctx context.Context, every, within time.Duration, check func() error) error {
	return pause.Until(ctx, within, every, check)
}
