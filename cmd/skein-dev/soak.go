package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/soak"
	"github.com/skeinmesh/skein/internal/cli"
)

// newSoakCmd makes `skein-dev soak`.
func newSoakCmd(g *globals) *cobra.Command {
	var opts soak.Options
	var artifacts string
	var crowd int
	c := &cobra.Command{
		Use:   "soak [FILE]",
		Short: "Kill agents at random, and check that the mesh stands it",
		Long: "Bring a lab up (without a file: three sites, seven nodes), kill -9 random agents and let them return, " +
			"again\n" +
			"and again. Meanwhile the invariants are checked; at the end the mesh has to become whole by itself: all agents\n" +
			"agree, every pair reaches the other, every pair that can be direct is direct, nothing decided is forgotten.\n" +
			"No agent may crash, and at rest the mesh may hold no more goroutines, files, connections and memory than it\n" +
			"held before the first kill. By how much they grow in an hour is reported.",
		Example: "  skein-dev soak --for 5m\n  skein-dev soak --for 1m --seed 7 examples/three-sites.yaml\n" +
			"  skein-dev soak --for 30m --crowd 40 --burn 2 --freeze",
		Args: cli.Between(0, 1, "at most one lab file"),
		RunE: func(c *cobra.Command, args []string) (err error) {
			spec, err := soakLab(c, args, crowd, &opts)
			if err != nil {
				return err
			}
			if !c.Flags().Changed("seed") {
				opts.Seed = rand.Uint64N(1 << 32)
			}
			ctx, stop := cli.UntilSignal(c.Context())
			defer stop()
			progress := cli.Progress(cli.Notes(c))
			opts.Progress = func(format string, a ...any) { progress(fmt.Sprintf(format, a...)) }
			opts.Progress("seed %d: repeat these kills with --seed %d", opts.Seed, opts.Seed)
			l, err := lab.Up(ctx, spec, lab.Options{Dir: g.labs, Binary: g.skein, Progress: progress, Artifacts: artifacts})
			if err != nil {
				return err
			}
			down := context.WithoutCancel(ctx)
			defer func() { err = errors.Join(err, l.Down(down)) }()
			report, err := soak.Run(ctx, l, opts)
			if err != nil && ctx.Err() == nil {
				where, serr := l.SaveArtifacts(down, artifacts)
				err = errors.Join(fmt.Errorf("%w\nlogs and states are in %s", err, where), serr)
			}
			if cli.JSON(c) {
				return errors.Join(err, cli.PrintJSON(c.OutOrStdout(), report))
			}
			printSoak(c.OutOrStdout(), report)
			return err
		},
	}
	f := c.Flags()
	f.DurationVar(&opts.For, "for", 5*time.Minute, "how long agents are killed")
	f.DurationVar(&opts.Pause, "pause", 4*time.Second, "an agent stays dead for at most that long")
	f.DurationVar(&opts.Recovery, "recovery", time.Minute,
		"what the mesh gets to become whole at the end; with --crowd 3m")
	f.DurationVar(&opts.Settle, "settle", 0, "what a whole mesh gets to come to rest before it is measured (default: a "+
		"tenth of --for, at most 2m30s)")
	f.DurationVar(&opts.Sample, "sample", 10*time.Second, "between two readings of what agents hold")
	f.IntVar(&crowd, "crowd", 0, "instead of a file: so many agents, behind five kinds of NAT")
	f.IntVar(&opts.Burn, "burn", 0, "so many processes take a core each, now and then for 20 to 60 seconds")
	f.BoolVar(&opts.Freeze, "freeze", false, "now and then an agent is stopped by SIGSTOP, for at most 30 seconds")
	f.IntVar(&opts.Half, "half", 0, "in every such round half of the agents are killed and start at once (default: "+
		"never; with --crowd 10)")
	f.IntVar(&opts.Spare, "spare", 0, "so many agents are never killed: they show what leaks with time (default: none; "+
		"with --crowd a quarter)")
	f.Uint64Var(&opts.Seed, "seed", 0, "choose the same victims as a former run (default: random)")
	f.StringVar(&artifacts, "artifacts", "lab-failures", "where logs and states are kept when it fails")
	return c
}

// soakLab is the lab that is soaked, and completes the options by what is usual for it.
func soakLab(c *cobra.Command, args []string, crowd int, opts *soak.Options) (*lab.Spec, error) {
	f := c.Flags()
	switch {
	case opts.For <= 0:
		return nil, cli.UsageError{Err: errors.New("--for must be above zero")}
	case opts.Sample <= 0:
		return nil, cli.UsageError{Err: errors.New("--sample must be above zero")}
	case opts.Burn < 0, opts.Half < 0, opts.Spare < 0, opts.Settle < 0:
		return nil, cli.UsageError{Err: errors.New("--burn, --half, --spare and --settle must not be below zero")}
	case f.Changed("crowd") && (crowd < 2 || crowd > fabric.MaxHosts):
		return nil, cli.UsageError{Err: fmt.Errorf("--crowd must be 2 to %d", fabric.MaxHosts)}
	case crowd > 0 && len(args) > 0:
		return nil, cli.UsageError{Err: errors.New("give either --crowd or a lab file, and not both")}
	case len(args) == 1:
		return lab.Load(args[0])
	case crowd == 0:
		return lab.Parse("soak.yaml", soak.Mesh)
	}
	if !f.Changed("half") {
		opts.Half = 10
	}
	if !f.Changed("spare") {
		opts.Spare = max(1, crowd/4)
	}
	if !f.Changed("recovery") {
		opts.Recovery = 3 * time.Minute
	}
	return lab.Parse("crowd.yaml", lab.Crowd(fmt.Sprintf("soak%d", crowd), crowd))
}

func printSoak(w io.Writer, r soak.Report) {
	kills := 0
	for _, n := range r.Kills {
		kills += n
	}
	fmt.Fprintf(w, "%d kills in %d rounds, %d answers checked, %d commands kept (%d found no leader in time)\n",
		kills, r.Rounds, r.Looks, r.Commands, r.Refused)
	if r.Freezes > 0 || r.Halves > 0 || r.Burned > 0 {
		fmt.Fprintf(w, "%d times an agent was frozen, %d times half of all were killed at once, cores burned for %.0f s\n",
			r.Freezes, r.Halves, r.Burned)
	}
	printHeld(w, r.Resources)
}
