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
	"github.com/skeinmesh/skein/internal/cli"
)

// version is set by the linker for releases.
var version = ""

// exitFinal is the exit status of `skein up` under a supervisor that says so by $SKEIN_SUPERVISED, when starting it
// again would undo what somebody asked for, or help nothing: the service's unit has it in RestartPreventExitStatus.
// systemd calls it NOTCONFIGURED, after the Linux Standard Base. 2 could not be taken: the Go runtime ends with it when
// it panics.
const exitFinal = 6

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
	if supervised && errors.Is(err, agent.ErrFinal) {
		return exitFinal
	}
	return cli.ExitStatus(err)
}

func newRoot() *cobra.Command {
	g := &globals{}
	root := &cobra.Command{
		Use:           "skein",
		Short:         "Join hosts into one WireGuard network that finds its own way",
		Example:       "  skein up --init\n  skein token create\n  skein up --join TOKEN\n  skein status",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return c.Help()
		},
		PersistentPreRunE: func(c *cobra.Command, _ []string) error {
			g.configAsked = c.Flags().Changed("config")
			return cli.CheckOutput(g.output)
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&g.stateDir, "state-dir", os.Getenv("SKEIN_STATE_DIR"), "state directory (default "+config.DefaultStateDir+
		", or $SKEIN_STATE_DIR)")
	f.StringVar(&g.runDir, "run-dir", os.Getenv("SKEIN_RUN_DIR"), "directory of the agent's sockets (default "+
		config.DefaultRunDir+", or $SKEIN_RUN_DIR)")
	f.StringVar(&g.config, "config", config.DefaultFile, "configuration file")
	cli.OutputFlag(root, &g.output)
	root.AddCommand(
		newUpCmd(g), newDownCmd(g), newReloadCmd(g), newStatusCmd(g), newNodesCmd(g), newPeersCmd(g), newGraphCmd(g),
		newNetcheckCmd(g),
		newRelayCmd(g), newTopCmd(g), newDoctorCmd(g), newDebugCmd(g),
		newTokenCmd(g), newNodeCmd(g), newEventsCmd(g), newStateCmd(g), newDiffCmd(g), newExplainCmd(g),
		newPlanCmd(g), newSettingsCmd(g), newServerCmd(g), newClusterCmd(g), newPoolCmd(g), newBlockCmd(g), newIPCmd(g),
		newImportCmd(g), newEgressCmd(g),
		newPeerCmd(g), newSiteCmd(g), newVersionCmd(g), newCNICmd(g), newLabCmd(),
	)
	cli.Strict(root)
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
		Use: "version", Short: "Print the version", Example: "  skein version -o json", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b, _ := debug.ReadBuildInfo()
			v := struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}{versionText(), b.GoVersion}
			if g.output == "json" {
				return cli.PrintJSON(c.OutOrStdout(), v)
			}
			fmt.Fprintf(c.OutOrStdout(), "skein %s (%s)\n", v.Version, v.Go)
			return nil
		},
	}
}
