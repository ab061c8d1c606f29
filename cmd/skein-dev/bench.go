package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/bench"
	"github.com/skeinmesh/skein/internal/cli"
)

// newBenchCmd makes `skein-dev bench`: the figures that are promised, measured.
func newBenchCmd(g *globals) *cobra.Command {
	var opts bench.Options
	var write string
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure what is promised: times between hosts, memory, rates",
		Long: "Measure every figure that is promised and print it beside its target. Times between hosts come from real\n" +
			"agents in a lab; rates of the code from its Go benchmarks, for which it needs the source and Go.\n" +
			"The exit status is 0 only when every target is reached.",
		Example: "  skein-dev bench\n  skein-dev bench --quick\n  skein-dev bench --only memory\n" +
			"  skein-dev bench --only sites --faults killed,zombie-new --runs 5",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Dir, opts.Binary, opts.Progress = g.labs, g.skein, cli.Progress(cmd.ErrOrStderr())
			r, err := bench.Run(ctx, opts)
			if err != nil {
				return err
			}
			return show(cmd, r, write, r.WriteFile, r.Reached(), "not every target is reached")
		},
	}
	c.Flags().BoolVar(&opts.Quick, "quick", false, "fewer runs: a first look in three minutes")
	c.Flags().StringSliceVar(&opts.Only, "only", nil, "measure only these groups: "+strings.Join(bench.Groups(), ", "))
	c.Flags().IntVar(&opts.Runs, "runs", 0, "runs of each fault in the group sites (default 30, with --quick 3)")
	c.Flags().StringSliceVar(&opts.Faults, "faults", nil, "in the group sites only these: "+
		strings.Join(bench.Faults(), ", "))
	c.Flags().StringVar(&opts.Source, "source", ".", "where the source is")
	c.Flags().StringVar(&opts.Artifacts, "artifacts", "lab-failures", "where logs are kept when a target is missed")
	c.Flags().StringVar(&write, "write", "", "write the report to this file, as Markdown")
	return c
}
