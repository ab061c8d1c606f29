package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/internal/cli"
)

// newCNICmd makes `skein cni`. As a plugin the program never comes here: see main.
func newCNICmd(g *globals) *cobra.Command {
	c := &cobra.Command{
		Use:   "cni",
		Short: "Be the CNI plugin, or install it",
		Long: "Container runtimes run this program as their plugin " + cni.Type +
			", with what they want in the environment\n" +
			"(CNI_COMMAND) and on standard input. People install it: see docs/cni.md.",
		Example: "  skein cni install\n  skein cni install --chain portmap,bandwidth --dry-run",
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cli.UsageError{Err: fmt.Errorf("skein cni: CNI_COMMAND is not set: container runtimes run the plugin; " +
				"`skein cni " +
				"install` puts it in place")}
		},
	}
	c.AddCommand(newCNIInstallCmd(g), newCNIRemoveCmd(g))
	return c
}

func newCNIInstallCmd(g *globals) *cobra.Command {
	var in cni.Install
	c := &cobra.Command{
		Use:   "install",
		Short: "Put the plugin and its configuration where container runtimes look",
		Long: "Copy this program to the plugins' directory as " + cni.Type + " and write a network configuration. What is " +
			"there\n" +
			"and right is left alone; a configuration that says something else is replaced with --force only.",
		Example: "  skein cni install\n  skein cni install --chain portmap,bandwidth --dry-run\n  skein cni install --name " +
			"pods --conf-dir /etc/cni/net.d",
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var err error
			if in.Program, err = os.Executable(); err != nil {
				return fmt.Errorf("find the skein program: %w", err)
			}
			_, run := g.directories()
			in.Socket = filepath.Join(run, cniserver.SocketName)
			r, err := in.Run(c.Context())
			if err != nil {
				return err
			}
			if g.output == "json" {
				return cli.PrintJSON(c.OutOrStdout(), r)
			}
			printInstall(c.OutOrStdout(), c.ErrOrStderr(), r, in.DryRun)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&in.BinDir, "bin-dir", cni.DefaultBinDir, "directory of plugins")
	f.StringVar(&in.ConfDir, "conf-dir", cni.DefaultConfDir, "directory of network configurations")
	f.StringVar(&in.Name, "name", "skein", "name of the network")
	f.StringSliceVar(&in.Chain, "chain", nil, "plugins that come after, for instance portmap,bandwidth")
	f.BoolVar(&in.Force, "force", false, "replace another configuration, and chain plugins that are not there")
	f.BoolVar(&in.DryRun, "dry-run", false, "only say what would be written")
	return c
}

func newCNIRemoveCmd(g *globals) *cobra.Command {
	var in cni.Install
	c := &cobra.Command{
		Use:   "remove",
		Short: "Take the plugin and its configuration away again",
		Long: "Remove what `skein cni install` has put in place: the configuration, unless it is another's, and the " +
			"plugin. Pods\n" +
			"that run keep their links.",
		Example: "  skein cni remove\n  skein cni remove --bin-dir /opt/cni/bin --conf-dir /etc/cni/net.d --dry-run",
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := in.Uninstall()
			if err != nil {
				return err
			}
			if g.output == "json" {
				return cli.PrintJSON(c.OutOrStdout(), r)
			}
			printInstall(c.OutOrStdout(), c.ErrOrStderr(), r, false)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&in.BinDir, "bin-dir", cni.DefaultBinDir, "directory of plugins")
	f.StringVar(&in.ConfDir, "conf-dir", cni.DefaultConfDir, "directory of network configurations")
	f.BoolVar(&in.DryRun, "dry-run", false, "only say what would be removed")
	return c
}

func printInstall(out, errs io.Writer, r *cni.Report, dry bool) {
	for _, c := range r.Changes {
		fmt.Fprintf(out, "%s: %s\n", c.Path, c.Detail)
	}
	if dry {
		fmt.Fprint(out, r.Conf)
	}
	for _, w := range r.Warnings {
		fmt.Fprintln(errs, "skein: "+w)
	}
}
