// Command skein-dev is for those who build skein: it measures, soaks, proves and attacks meshes of real agents, in labs
// on this machine. The agents are those of another program, skein.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/cli"
)

// globals are the flags that every command has.
type globals struct {
	labs   string // the directory of labs
	skein  string // the program of the agents
	output string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "skein-dev: "+err.Error())
	}
	os.Exit(cli.ExitStatus(err))
}

func newRoot() *cobra.Command {
	g := &globals{}
	root := &cobra.Command{
		Use:   "skein-dev",
		Short: "Measure, soak, prove and attack meshes of real agents, in labs on this machine",
		Long: "Measure, soak, prove and attack meshes of real agents, each in a network namespace of its own, behind real\n" +
			"NATs (docs/lab.md). It needs root and touches nothing outside its namespaces.",
		Example:       "  skein-dev bench --quick\n  skein-dev soak --for 5m",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cli.NoArgs,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
		PersistentPreRunE: func(*cobra.Command, []string) (err error) {
			if err := cli.CheckOutput(g.output); err != nil {
				return err
			}
			if g.skein, err = findSkein(g.skein); err != nil {
				return cli.UsageError{Err: fmt.Errorf("the agents' program: %w; name it with --skein", err)}
			}
			return nil
		},
	}
	f := root.PersistentFlags()
	f.StringVar(&g.labs, "dir", lab.DefaultDir, "where labs keep their directories")
	f.StringVar(&g.skein, "skein", "", "the program of the agents (default: skein beside this program, else by the PATH)")
	cli.OutputFlag(root, &g.output)
	root.AddCommand(newBenchCmd(g), newSoakCmd(g), newMatrixCmd(g), newOwnersCmd(g), newRedteamCmd(g), newCNICmd(g))
	cli.Strict(root)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	return root
}

// show prints a report, puts it into a file if one is named, and says what is wrong unless all is well.
func show(c *cobra.Command, r interface{ Text(w io.Writer) }, file string, write func(file string) error, well bool,
	wrong string) (err error) {
	if cli.JSON(c) {
		err = cli.PrintJSON(c.OutOrStdout(), r)
	} else {
		r.Text(c.OutOrStdout())
	}
	if file != "" {
		err = errors.Join(err, write(file))
	}
	if err == nil && !well {
		err = errors.New(wrong)
	}
	return err
}

// findSkein gives the absolute path of the agents' program.
func findSkein(named string) (string, error) {
	if named == "" {
		own, err := os.Executable()
		if err != nil {
			return "", err
		}
		if beside := filepath.Join(filepath.Dir(own), "skein"); isFile(beside) {
			return beside, nil
		}
		named = "skein"
	}
	found, err := exec.LookPath(named)
	if err != nil {
		return "", err
	}
	return filepath.Abs(found)
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular()
}
