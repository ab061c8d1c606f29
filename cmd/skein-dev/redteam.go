package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/redteam"
	"github.com/skeinmesh/skein/internal/cli"
)

// newRedteamCmd makes `skein-dev redteam`: a hostile member, pod, neighbour or stranger gains nothing.
func newRedteamCmd(g *globals) *cobra.Command {
	var opts redteam.Options
	var write, artifacts, holes string
	c := &cobra.Command{
		Use:   "redteam",
		Short: "Attack a mesh as a hostile member, pod, neighbour or stranger, and show what it gains",
		Long: "Bring up three servers, a gateway, two nodes behind symmetric NATs and a hostile member, and try a " +
			"catalogue of\n" +
			"attacks: with a member's keys, with a gossip key or a token alone, as a revoked node, from a pod, from a host in " +
			"a\n" +
			"member's LAN, and as a stranger. What was gained is judged by what the victims show. An honest pair sends all " +
			"the\n" +
			"time; what it loses beside an attack is shown. The exit status is 0 only when every attempt was made, none " +
			"gained\n" +
			"anything, and the pair lost less than 5 % more beside any of them than without.",
		Example: "  skein-dev redteam\n  skein-dev redteam --only 'LAN neighbour'\n  skein-dev redteam --write " +
			"docs/security.md",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Progress = cli.Progress(cmd.ErrOrStderr())
			opts.Lab = lab.Options{Dir: g.labs, Binary: g.skein, Progress: opts.Progress, Artifacts: artifacts}
			opts.Artifacts = artifacts
			var r *redteam.Report
			var err error
			if holes != "" {
				r, err = redteam.Holes(ctx, holes, opts)
			} else {
				r, err = redteam.Run(ctx, opts)
			}
			if r == nil {
				return err
			}
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
	f.BoolVar(&opts.Short, "short", false, "without the attempts that take long")
	f.StringVar(&opts.Only, "only", "", "only attempts whose name, place or guard holds this text")
	f.StringVar(&holes, "holes", "", "the sources' directory: build skein without its guards, and show that the "+
		"attempts see it")
	f.StringVar(&artifacts, "artifacts", "lab-failures", "where logs and states are kept when it fails")
	f.StringVar(&write, "write", "", "put the table into this Markdown file, between its marks")
	return c
}
