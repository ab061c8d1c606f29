// Command skein is the agent, the relay, the CNI plugin, the command line and the lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/cni"
)

// version is set by the linker for releases.
var version = ""

// exitFinal is the exit status of `skein up` under a supervisor that says so by $SKEIN_SUPERVISED, when starting it
// again would undo what somebody asked for, or help nothing: the service's unit has it in RestartPreventExitStatus.
// systemd calls it NOTCONFIGURED, after the Linux Standard Base. 2 could not be taken: the Go runtime ends with it when
// it panics.
const exitFinal = 6

// usageError makes the exit status 2.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// globals are the flags that every command has.
type globals struct {
	stateDir, runDir, config, output string
	configAsked                      bool
}

func main() {
	if cni.Called(os.Args, os.Getenv) {
		os.Exit(cni.Main(versionText()))
	}
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "skein: "+err.Error())
	}
	return exitStatus(err, os.Getenv("SKEIN_SUPERVISED") == "1")
}

func exitStatus(err error, supervised bool) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(usageError)):
		return 2
	case supervised && errors.Is(err, agent.ErrFinal):
		return exitFinal
	}
	return 1
}

func newRoot() *cobra.Command {
	g := &globals{}
	root := &cobra.Command{
		Use:           "skein",
		Short:         "Join hosts into one WireGuard network that finds its own way",
		Example:       "  skein up --init\n  skein token create\n  skein up --join TOKEN\n  skein status",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return c.Help()
		},
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			g.configAsked = c.Flags().Changed("config")
			if g.output != "table" && g.output != "json" {
				return usageError{fmt.Errorf("-o %s: allowed: table, json", g.output)}
			}
			return nil
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&g.stateDir, "state-dir", os.Getenv("SKEIN_STATE_DIR"), "state directory (default "+config.DefaultStateDir+
		", or $SKEIN_STATE_DIR)")
	f.StringVar(&g.runDir, "run-dir", os.Getenv("SKEIN_RUN_DIR"), "directory of the agent's sockets (default "+
		config.DefaultRunDir+", or $SKEIN_RUN_DIR)")
	f.StringVar(&g.config, "config", config.DefaultFile, "configuration file")
	f.StringVarP(&g.output, "output", "o", "table", "output: table or json")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	root.AddCommand(
		newUpCmd(g), newDownCmd(g), newReloadCmd(g), newStatusCmd(g), newNodesCmd(g), newPeersCmd(g), newGraphCmd(g),
		newNetcheckCmd(g),
		newRelayCmd(g), newTopCmd(g), newDoctorCmd(g), newDebugCmd(g),
		newTokenCmd(g), newNodeCmd(g), newEventsCmd(g), newStateCmd(g), newDiffCmd(g), newExplainCmd(g),
		newPlanCmd(g), newSettingsCmd(g), newServerCmd(g), newClusterCmd(g), newPoolCmd(g), newBlockCmd(g), newIPCmd(g),
		newImportCmd(g), newEgressCmd(g),
		newPeerCmd(g), newSiteCmd(g), newVersionCmd(g), newCNICmd(g), newLabCmd(),
	)
	strict(root)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	return root
}

// directories gives the state and run directories: flag, environment, configuration file, default.
func (g *globals) directories() (state, run string) {
	state, run = g.stateDir, g.runDir
	if state != "" && run != "" {
		return state, run
	}
	c, err := config.Load(g.config, false)
	if err != nil {
		c = config.Default()
	}
	if state == "" {
		state = c.StateDir
	}
	if run == "" {
		run = c.RunDir
	}
	return state, run
}

func (g *globals) socket() string {
	_, run := g.directories()
	return filepath.Join(run, config.SocketName)
}

func noArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unknown command or argument %q for %q; see `%s --help`", args[0], c.CommandPath(),
			c.CommandPath())}
	}
	return nil
}

// exactly demands n arguments.
func exactly(n int, what string) cobra.PositionalArgs { return between(n, n, what) }

// between demands from least to most arguments.
func between(least, most int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return usageError{fmt.Errorf("%s takes %s; see `%s --help`", c.CommandPath(), what, c.CommandPath())}
		}
		return nil
	}
}

// strict makes every complaint about arguments a usage error, and a missing or unknown subcommand one too.
func strict(c *cobra.Command) {
	for _, sub := range c.Commands() {
		strict(sub)
	}
	if c.HasSubCommands() && !c.Runnable() {
		c.Args, c.RunE = noArgs, needSubcommand
	}
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			var u usageError
			if err == nil || errors.As(err, &u) {
				return err
			}
			return usageError{fmt.Errorf("%s: %w; see `%s --help`", c.CommandPath(), err, c.CommandPath())}
		}
	}
}

func needSubcommand(c *cobra.Command, _ []string) error {
	return usageError{fmt.Errorf("%s needs a subcommand; see `%s --help`", c.CommandPath(), c.CommandPath())}
}

// group makes a command that only holds others.
func group(use, short string, subs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: noArgs, RunE: needSubcommand}
	for _, s := range subs {
		if c.Example == "" {
			c.Example = s.Example
		}
		c.AddCommand(s)
	}
	return c
}

func versionText() string {
	if version != "" {
		return version
	}
	if b, ok := debug.ReadBuildInfo(); ok {
		if b.Main.Version != "" && b.Main.Version != "(devel)" {
			return b.Main.Version
		}
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "devel-" + s.Value[:12]
			}
		}
	}
	return "devel"
}

func newVersionCmd(g *globals) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Example: "  skein version -o json", Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b, _ := debug.ReadBuildInfo()
			v := struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}{versionText(), b.GoVersion}
			if g.output == "json" {
				return printJSON(c.OutOrStdout(), v)
			}
			fmt.Fprintf(c.OutOrStdout(), "skein %s (%s)\n", v.Version, v.Go)
			return nil
		},
	}
}
