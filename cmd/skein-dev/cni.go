package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/cnitable"
	"github.com/skeinmesh/skein/internal/cli"
)

// newCNICmd makes `skein-dev cni`: every verb of CNI in every version, under every fault.
func newCNICmd(g *globals) *cobra.Command {
	var opts cnitable.Options
	var write, verb, fault string
	c := &cobra.Command{
		Use:   "cni",
		Short: "Try the installed CNI plugin: verb × version × fault, with cnitool",
		Long: "Bring up a small mesh, install the plugin on a node, and try every verb in every version of the CNI\n" +
			"specification under every fault, by cnitool and by the plugin's own command line (docs/cni.md). The exit\n" +
			"status is 0 only when everything came out as expected. `make cni-tools` builds cnitool, portmap and bandwidth.",
		Example: "  skein-dev cni\n  skein-dev cni --verb CHECK\n  skein-dev cni --fault quorum --versions 1.1.0",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if write != "" && (verb != "" || fault != "" || len(opts.Versions) > 0) {
				return cli.UsageError{Err: errors.New("--write keeps the whole table: leave out --verb, --fault and --versions")}
			}
			opts.Only = func(c cnitable.Case) bool {
				return (verb == "" || strings.EqualFold(c.Verb, verb)) && strings.Contains(c.Fault, fault)
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Dir, opts.Binary, opts.Progress = g.labs, g.skein, cli.Progress(cmd.ErrOrStderr())
			r, err := cnitable.Run(ctx, opts)
			if err != nil {
				return err
			}
			return show(cmd, r, write, r.Write, r.OK(), "not everything came out as expected")
		},
	}
	f := c.Flags()
	f.StringVar(&verb, "verb", "", "only this verb")
	f.StringVar(&fault, "fault", "", "only faults that hold this text")
	f.StringSliceVar(&opts.Versions, "versions", nil, "only these versions of the specification")
	f.StringVar(&opts.Tools, "tools", "bin/tools", "where cnitool, portmap and bandwidth are; else the path")
	f.StringVar(&opts.Artifacts, "artifacts", "lab-failures", "where logs are kept when the lab does not come up")
	f.StringVar(&write, "write", "", "put the table into this Markdown file, between its marks")
	return c
}
