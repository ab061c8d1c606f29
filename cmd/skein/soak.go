package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/soak"
)

// newLabSoakCmd makes `skein lab soak`.
func newLabSoakCmd(dir *string) *cobra.Command {
	var opts soak.Options
	var artifacts string
	c := &cobra.Command{
		Use:   "soak [FILE]",
		Short: "Kill agents at random, and check that the mesh stands it",
		Long: "Bring a lab up (without a file: three sites, seven nodes), kill -9 random agents and let them return, again\n" +
			"and again. Meanwhile the invariants are checked; at the end the mesh has to become whole by itself: all agents\n" +
			"agree, every pair reaches the other, every pair that can be direct is direct, nothing decided is forgotten.",
		Example: "  skein lab soak --for 5m\n  skein lab soak --for 1m --seed 7 examples/three-sites.yaml",
		Args:    between(0, 1, "at most one lab file"),
		RunE: func(c *cobra.Command, args []string) (err error) {
			if opts.For <= 0 {
				return usageError{errors.New("--for must be above zero")}
			}
			spec, err := lab.Parse("soak.yaml", soak.Mesh)
			if len(args) == 1 {
				spec, err = lab.Load(args[0])
			}
			if err != nil {
				return err
			}
			if !c.Flags().Changed("seed") {
				opts.Seed = rand.Uint64N(1 << 32)
			}
			ctx, stop := labContext(c.Context())
			defer stop()
			progress := labProgress(labNotes(c))
			opts.Progress = func(format string, a ...any) { progress(fmt.Sprintf(format, a...)) }
			opts.Progress("seed %d: repeat these kills with --seed %d", opts.Seed, opts.Seed)
			l, err := lab.Up(ctx, spec, lab.Options{Dir: *dir, Progress: progress, Artifacts: artifacts})
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
			if labJSON(c) {
				return errors.Join(err, printJSON(c.OutOrStdout(), report))
			}
			kills := 0
			for _, n := range report.Kills {
				kills += n
			}
			fmt.Fprintf(c.OutOrStdout(), "%d kills in %d rounds, %d answers checked, %d commands kept (%d found no leader in time)\n",
				kills, report.Rounds, report.Looks, report.Commands, report.Refused)
			return err
		},
	}
	c.Flags().DurationVar(&opts.For, "for", 5*time.Minute, "how long agents are killed")
	c.Flags().DurationVar(&opts.Pause, "pause", 4*time.Second, "an agent stays dead for at most that long")
	c.Flags().DurationVar(&opts.Recovery, "recovery", time.Minute, "what the mesh gets to become whole at the end")
	c.Flags().Uint64Var(&opts.Seed, "seed", 0, "choose the same victims as a former run (default: random)")
	c.Flags().StringVar(&artifacts, "artifacts", "lab-failures", "where logs and states are kept when it fails")
	return c
}
