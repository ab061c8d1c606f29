package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/owners"
	"github.com/skeinmesh/skein/internal/cli"
)

// newOwnersCmd makes `skein-dev owners`: no egress slot forwards in two places, whatever goes wrong.
func newOwnersCmd(g *globals) *cobra.Command {
	opts := owners.Options{Recovery: 40 * time.Second}
	var write, artifacts, mutation string
	c := &cobra.Command{
		Use:   "owners",
		Short: "Show that an egress slot never has two owners, under seeded faults",
		Long: "Bring up three servers, three gateways and clients behind NATs, and let seeded schedules of faults hit " +
			"them: agents\n" +
			"killed, paused, cut off, cut from the servers in one or both directions, drained, and the leader likewise. An " +
			"observer\n" +
			"outside the mesh takes down who sends each packet of each slot, and compares that with the event log. The exit " +
			"status\n" +
			"is 0 only when no packet was seen that the log does not allow, and the mesh recovered after each schedule.",
		Example: "  skein-dev owners --schedules 6\n  skein-dev owners --schedules 200 --seed 7 --write docs/egress-proof.md",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if opts.Schedules < 1 {
				return cli.UsageError{Err: errors.New("--schedules must be above zero")}
			}
			if mutation != "" && (write != "" || !slices.Contains(owners.Mutations(), mutation)) {
				return cli.UsageError{Err: fmt.Errorf("--mutation %s: allowed: %s, and not together with --write", mutation,
					strings.Join(owners.Mutations(), ", "))}
			}
			if !cmd.Flags().Changed("seed") {
				opts.Seed = rand.Uint64N(1 << 32)
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Progress = cli.Progress(cmd.ErrOrStderr())
			opts.Lab = lab.Options{Dir: g.labs, Binary: g.skein, Progress: opts.Progress, Artifacts: artifacts}
			opts.Artifacts = artifacts
			run := owners.Run
			if mutation != "" {
				opts.Artifacts = ""
				run = func(ctx context.Context, opts owners.Options) (*owners.Report, error) {
					return owners.RunMutated(ctx, opts, mutation)
				}
			}
			r, err := run(ctx, opts)
			if cli.JSON(cmd) {
				err = errors.Join(err, cli.PrintJSON(cmd.OutOrStdout(), r))
			} else {
				r.Text(cmd.OutOrStdout())
			}
			if write != "" && !errors.Is(err, context.Canceled) {
				err = errors.Join(err, r.Write(write))
			}
			return err
		},
	}
	f := c.Flags()
	f.IntVar(&opts.Schedules, "schedules", 20, "how many schedules of faults, one after another")
	f.Uint64Var(&opts.Seed, "seed", 0, "repeat the schedules of a former run (default: random)")
	f.DurationVar(&opts.Recovery, "recovery", opts.Recovery, "what the mesh gets to recover after each schedule")
	f.BoolVar(&opts.Small, "small", false, "one server, two gateways and one client, for an emulated machine")
	f.BoolVar(&opts.Clock, "clock", false, "also turn this machine's wall clock, by minutes to hours, and back: only on "+
		"a machine for nothing else, such as a test guest")
	f.StringVar(&artifacts, "artifacts", "lab-failures", "where logs and states are kept when it fails")
	f.StringVar(&mutation, "mutation", "", "build agents with this bug from the sources here, which the run must find: "+
		"long-lease, a kernel that counts leases five times too long")
	f.StringVar(&mutation, "plant", "", "the former name of --mutation")
	_ = f.MarkDeprecated("plant", "it is --mutation now")
	f.StringVar(&write, "write", "", "put the report into this Markdown file, between its marks")
	return c
}
