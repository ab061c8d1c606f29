package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/demo"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/cli"
)

// newLabDemoCmd makes `skein lab demo`, which is what `make demo` runs.
func newLabDemoCmd(dir *string) *cobra.Command {
	keep := os.Getenv("KEEP") == "1"
	c := &cobra.Command{
		Use:     "demo",
		Short:   "Show a mesh at work: three sites, seven nodes, and what networks do to them",
		Example: "  skein lab demo\n  KEEP=1 skein lab demo",
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := cli.UntilSignal(c.Context())
			defer stop()
			return demo.Run(ctx, demo.Options{Lab: lab.Options{Dir: *dir, Artifacts: "lab-failures"},
				Out: c.OutOrStdout(), Keep: keep})
		},
	}
	c.Flags().BoolVar(&keep, "keep", keep, "leave the mesh up at the end (also KEEP=1)")
	return c
}
