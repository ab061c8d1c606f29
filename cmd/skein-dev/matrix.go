package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/matrix"
	"github.com/skeinmesh/skein/internal/cli"
)

// newMatrixCmd makes `skein-dev matrix`: every kind of NAT with every other.
func newMatrixCmd(g *globals) *cobra.Command {
	var opts matrix.Options
	var write string
	var quick bool
	c := &cobra.Command{
		Use:   "matrix",
		Short: "Try every kind of NAT with every other: expected path, path, times",
		Long: "Bring up two nodes of each kind of NAT in one mesh and see which path each pair of kinds gets, and how\n" +
			"soon. The exit status is 0 only when every pair gets the path that is expected (docs/nat-traversal.md).",
		Example: "  skein-dev matrix\n  skein-dev matrix --quick\n  skein-dev matrix --kinds symmetric,double",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case quick && len(opts.Kinds) > 0:
				return cli.UsageError{Err: errors.New("--quick and --kinds both choose kinds: give one of them")}
			case write != "" && (quick || len(opts.Kinds) > 0):
				return cli.UsageError{Err: errors.New("--write keeps the whole matrix: leave out --quick and --kinds")}
			case quick:
				opts.Kinds = matrix.Quick
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Dir, opts.Binary, opts.Progress = g.labs, g.skein, cli.Progress(cmd.ErrOrStderr())
			r, err := matrix.Run(ctx, opts)
			if err != nil {
				return err
			}
			return show(cmd, r, write, r.Write, r.OK(), "not every pair came out as expected")
		},
	}
	c.Flags().StringSliceVar(&opts.Kinds, "kinds", nil, "only these kinds: "+strings.Join(matrix.Kinds(), ", "))
	c.Flags().BoolVar(&quick, "quick", false, "only "+strings.Join(matrix.Quick, ", "))
	c.Flags().DurationVar(&opts.Patience, "patience", 0,
		"how long to wait for pairs that are not as expected (default 3m)")
	c.Flags().StringVar(&opts.Artifacts, "artifacts", "lab-failures", "where logs are kept when a pair is not as expected")
	c.Flags().StringVar(&write, "write", "", "put the matrix into this Markdown file, between its marks")
	return c
}
