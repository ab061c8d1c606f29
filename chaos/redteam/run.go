package redteam

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/chaos/lab"
)

//go:embed redteam.yaml
var source []byte

const (
	window = 2 * time.Second // of the pair alone, before each flood
	// attemptLimit bounds one attempt.
	attemptLimit = 45 * time.Second
	// MaxLoss is what an honest pair may lose beside an attempt, over what it loses without.
	MaxLoss = 0.05
)

// Options say what is tried, and where.
type Options struct {
	Lab       lab.Options
	Name      string   // of the lab; default redteam
	Short     bool     // without the attempts that take long
	Only      string   // attempts whose name, place or guard holds this text; empty: all
	Names     []string // attempts of these names; nil: all
	Expected  bool     // that attempts gain something is not an error: the binary has holes
	Artifacts string   // where logs are left when something went wrong; empty: nowhere
	Progress  func(string)
}

func (o Options) wants(a Attempt) bool {
	if o.Short && a.Long || o.Names != nil && !slices.Contains(o.Names, a.Name) {
		return false
	}
	return o.Only == "" || strings.Contains(strings.ToLower(a.Name+"|"+string(a.From)+"|"+string(a.Guard)),
		strings.ToLower(o.Only))
}

// Run raises a lab, tries the catalogue and takes the lab down. The error is nil only when every attempt could be made,
// none gained anything, and none cost the honest pair more than MaxLoss.
func Run(ctx context.Context, opts Options) (report *Report, err error) {
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	report = &Report{At: time.Now(), Short: opts.Short}
	spec, err := lab.Parse("redteam.yaml", source)
	if err != nil {
		return report, err
	}
	if opts.Name != "" {
		spec.Name = opts.Name
	}
	if err := lab.Down(ctx, spec.Name, opts.Lab.Dir); err != nil { // what a run that was killed has left is in the way
		return report, err
	}
	l, err := lab.Up(ctx, spec, opts.Lab)
	if err != nil {
		return report, err
	}
	defer func() {
		down := context.WithoutCancel(ctx)
		if err != nil && ctx.Err() == nil && opts.Artifacts != "" {
			if dir, aerr := l.SaveArtifacts(down, opts.Artifacts); aerr == nil {
				err = fmt.Errorf("%w\nlogs and states are in %s", err, dir)
			}
		}
		err = errors.Join(err, l.Down(down))
	}()
	if err := attack(ctx, l, opts, report); err != nil {
		return report, err
	}
	report.Seconds = time.Since(report.At).Seconds()
	if opts.Expected {
		return report, nil
	}
	return report, report.Err()
}

// attack tries the catalogue.
func attack(ctx context.Context, l *lab.Lab, opts Options, report *Report) error {
	if err := l.WaitConverged(ctx, 60*time.Second); err != nil {
		return err
	}
	f, err := newField(ctx, l)
	if err != nil {
		return fmt.Errorf("before the first attempt: %w", err)
	}
	if err := l.Serve(lab.Serve{Nodes: []string{other}, Port: pairPort}); err != nil {
		return err
	}
	alone := func() error { pause.For(ctx, window); return ctx.Err() }
	if report.Alone, err = f.beside(ctx, alone); err != nil {
		return err
	}
	opts.Progress(fmt.Sprintf("the honest pair alone: %s", report.Alone))
	var chosen, floods []Attempt
	for _, a := range All() {
		switch {
		case !opts.wants(a):
		case a.Flood:
			floods = append(floods, a)
		default:
			chosen = append(chosen, a)
		}
	}
	var quiet, loud []Outcome
	for _, a := range floods {
		o, err := f.flood(ctx, a)
		if err != nil {
			return err
		}
		loud = append(loud, o)
		opts.Progress(o.String())
	}
	report.Beside, err = f.beside(ctx, func() error {
		for _, a := range chosen {
			o, err := f.attempt(ctx, a)
			if err != nil {
				return err
			}
			quiet = append(quiet, o)
			opts.Progress(o.String())
		}
		return nil
	})
	report.Outcomes = append(quiet, loud...)
	return err
}

func (f *Field) beside(ctx context.Context, during func() error) (Cost, error) {
	return beside(ctx, f.ns(victim), f.overlay(other, true), during)
}

// floodTries is how often a flood that cost the pair too much is repeated: what others on this machine do at the same
// time costs it once, and a victim that does not bear the flood each time.
const floodTries = 3

// flood is an attempt with the pair measured before and beside it.
func (f *Field) flood(ctx context.Context, a Attempt) (o Outcome, err error) {
	for range floodTries {
		before, err := f.beside(ctx, func() error { pause.For(ctx, window); return ctx.Err() })
		if err != nil {
			return o, err
		}
		during, err := f.beside(ctx, func() (err error) { o, err = f.attempt(ctx, a); return err })
		o.Before, o.During = &before, &during
		if err != nil || !o.tooDear() || o.Gained != "" || o.Invalid != "" {
			return o, err
		}
	}
	return o, nil
}

// attempt makes one and judges it. An error is only that of a run that is to end.
func (f *Field) attempt(ctx context.Context, a Attempt) (Outcome, error) {
	o := Outcome{Name: a.Name, From: a.From, Guard: a.Guard, Flood: a.Flood}
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, attemptLimit)
	defer cancel()
	seen, err := a.Try(limited, f)
	if ctx.Err() != nil {
		return o, ctx.Err()
	}
	if err != nil {
		o.Invalid = err.Error()
	} else {
		o.Gained = a.Judge(seen)
	}
	o.Refusal = seen.Refusal
	if seen.Bound > 0 {
		o.Counted = fmt.Sprintf("%s, at most %s are allowed", plural(seen.Count), plural(seen.Bound))
	}
	o.Gained = strings.Join(slices.DeleteFunc(append([]string{o.Gained}, f.suffering(ctx)...),
		func(s string) bool { return s == "" }), "; ")
	o.Seconds = time.Since(began).Seconds()
	return o, ctx.Err()
}
