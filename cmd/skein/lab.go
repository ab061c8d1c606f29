package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/cli"
)

// newLabCmd makes `skein lab`: a cluster of real agents behind real NATs, on one machine.
func newLabCmd() *cobra.Command {
	var dir string
	c := &cobra.Command{
		Use:   "lab",
		Short: "Run a mesh on this machine: hosts and NATs in network namespaces, faults, scenarios",
		Long: "Run a mesh of real agents on this machine, each in a network namespace of its own, behind real NATs,\n" +
			"as a YAML file describes it (docs/lab.md). It needs root and touches nothing outside its namespaces.",
		Example: "  skein lab run examples/three-sites.yaml\n  skein lab up examples/three-sites.yaml\n  skein lab exec " +
			"home1 -- skein status\n  skein lab down",
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return cli.NeedSubcommand(c, nil)
		},
	}
	c.PersistentFlags().StringVar(&dir, "dir", lab.DefaultDir, "where labs keep their directories")
	c.AddCommand(newLabUpCmd(&dir), newLabStatusCmd(&dir), newLabExecCmd(&dir), newLabRunCmd(&dir), newLabDownCmd(&dir),
		newLabDemoCmd(&dir))
	return c
}

func newLabUpCmd(dir *string) *cobra.Command {
	var artifacts string
	c := &cobra.Command{
		Use:     "up FILE",
		Short:   "Bring a lab up and leave it up",
		Example: "  skein lab up examples/three-sites.yaml",
		Args:    cli.Exactly(1, "one lab file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := lab.Load(args[0])
			if err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			l, err := lab.Up(ctx, spec, lab.Options{Dir: *dir, Progress: cli.Progress(cli.Notes(cmd)), Artifacts: artifacts})
			if err != nil {
				return err
			}
			if cli.JSON(cmd) {
				return cli.PrintJSON(cmd.OutOrStdout(), l.Status(ctx))
			}
			labHints(cmd.OutOrStdout(), l)
			return nil
		},
	}
	c.Flags().StringVar(&artifacts, "artifacts", "lab-failures", "where logs and states are kept when it fails")
	return c
}

func labHints(w io.Writer, l *lab.Lab) {
	names := l.Spec.NodeNames()
	node := names[len(names)-1]
	info, err := l.Node(node)
	if err != nil {
		return
	}
	fmt.Fprintf(w, `
Lab %s is up. Look around:
  skein lab status                        every node, and the paths between them
  skein lab exec %s -- skein peers    any command, as on that host
  skein lab exec %s -- sh             a shell there
  ip netns exec %s ip addr
  tail -f %s
  skein lab down %s                     take it down
`, l.Spec.Name, node, node, info.Namespace, info.Log, l.Spec.Name)
}

func newLabStatusCmd(dir *string) *cobra.Command {
	return &cobra.Command{
		Use:     "status [NAME|FILE]",
		Short:   "Show a lab's nodes and the paths between them",
		Example: "  skein lab status\n  skein lab status three-sites -o json",
		Args:    cli.Between(0, 1, "at most one lab's name or file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := labFind(*dir, args)
			if err != nil {
				return err
			}
			st := l.Status(cmd.Context())
			if cli.JSON(cmd) {
				return cli.PrintJSON(cmd.OutOrStdout(), st)
			}
			labTable(cmd.OutOrStdout(), st)
			return nil
		},
	}
}

func newLabExecCmd(dir *string) *cobra.Command {
	var name string
	c := &cobra.Command{
		Use:   "exec [--lab NAME] NODE[/POD] -- COMMAND…",
		Short: "Run a command on a lab's node, or in a pod",
		Long: "Run a command inside the network namespace of a node, or of a pod as NODE/POD, with the environment that\n" +
			"makes skein's commands ask that node's agent. The exit status is the command's.",
		Example: "  skein lab exec home1 -- skein status\n  skein lab exec home1 -- ip route show table 180\n  skein lab " +
			"exec home1/web -- ip addr",
		Args: cli.Between(2, math.MaxInt, "a node and a command, such as `home1 -- skein status`"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var which []string
			if name != "" {
				which = []string{name}
			}
			l, err := labFind(*dir, which)
			if err != nil {
				return err
			}
			// The command itself hears Ctrl-C from the terminal; what it does then is its own affair.
			ctx := context.WithoutCancel(cmd.Context())
			command := args[1:]
			if command[0] == "--" {
				command = command[1:]
			}
			exit, err := l.ExecIO(ctx, args[0], command, lab.Stdio{In: cmd.InOrStdin(), Out: cmd.OutOrStdout(),
				Err: cmd.ErrOrStderr()})
			if err == nil && exit != 0 {
				os.Exit(exit) // the command's own status, and it has said why itself
			}
			return err
		},
	}
	c.Flags().StringVar(&name, "lab", "", "the lab's name; needed when several are up")
	c.Flags().SetInterspersed(false) // what follows the node is the command's
	c.DisableFlagsInUseLine = true
	return c
}

func newLabRunCmd(dir *string) *cobra.Command {
	var opts lab.RunOptions
	c := &cobra.Command{
		Use:   "run FILE…",
		Short: "Bring a lab up, run its steps, take it down",
		Long: "Bring each file's lab up, run its steps and take it down again, one after the other. The exit status is\n" +
			"0 only when every step of every file held. A failed run leaves logs, states and the kernel's tables in a folder.",
		Example: "  skein lab run examples/three-sites.yaml\n  skein lab run -o json examples/*.yaml",
		Args:    cli.Between(1, math.MaxInt, "one lab file or several"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var specs []*lab.Spec
			var errs []error
			for _, file := range args {
				spec, err := lab.Load(file)
				specs, errs = append(specs, spec), append(errs, err)
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			opts.Dir = *dir
			var results []*lab.Result
			for _, spec := range specs {
				if ctx.Err() != nil {
					break
				}
				res, err := labRunOne(ctx, cmd, spec, opts)
				results, errs = append(results, res), append(errs, err)
			}
			if cli.JSON(cmd) {
				errs = append(errs, cli.PrintJSON(cmd.OutOrStdout(), results))
			}
			return errors.Join(errs...)
		},
	}
	c.Flags().StringVar(&opts.Artifacts, "artifacts", "lab-failures", "where a failed run leaves its folder")
	c.Flags().BoolVar(&opts.Keep, "keep", false, "leave the lab up at the end")
	return c
}

func labRunOne(ctx context.Context, cmd *cobra.Command, spec *lab.Spec, opts lab.RunOptions) (*lab.Result, error) {
	w := cli.Notes(cmd)
	fmt.Fprintf(w, "lab %s (%s): %d sites, %d nodes, %d steps\n", spec.Name, spec.File, len(spec.Sites), len(spec.Nodes),
		len(spec.Steps))
	opts.Progress = cli.Progress(w)
	res, err := lab.Run(ctx, spec, opts)
	held := 0
	for _, s := range res.Steps {
		if s.OK {
			held++
		}
	}
	verdict := "ok"
	if err != nil {
		verdict = "FAILED"
	}
	fmt.Fprintf(w, "lab %s: %s, %d of %d steps held, %.1fs\n", spec.Name, verdict, held, len(spec.Steps), res.Seconds)
	return res, err
}

func newLabDownCmd(dir *string) *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:   "down [NAME|FILE]",
		Short: "Take a lab down, whatever state it is in",
		Long: "Take a lab down: its processes, namespaces with all links, rules and routes, and its directory. It works\n" +
			"after a crash too, and finding nothing is not an error.",
		Example: "  skein lab down\n  skein lab down three-sites\n  skein lab down --all",
		Args:    cli.Between(0, 1, "at most one lab's name or file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			names, err := labNames(*dir, args, all)
			if err != nil {
				return err
			}
			// Not to be broken off half way: it takes a second.
			ctx := context.WithoutCancel(cmd.Context())
			for _, name := range names {
				if derr := lab.Down(ctx, name, *dir); derr != nil {
					err = errors.Join(err, derr)
					continue
				}
				fmt.Fprintf(cli.Notes(cmd), "lab %s is down\n", name)
			}
			return err
		},
	}
	c.Flags().BoolVar(&all, "all", false, "every lab there is")
	return c
}

// labNames tells which labs are meant.
func labNames(dir string, args []string, all bool) ([]string, error) {
	if len(args) == 1 && !all {
		name, err := labName(args[0])
		return []string{name}, err
	}
	names, err := lab.List(dir)
	if err != nil || all || len(names) < 2 {
		return names, err
	}
	return nil, fmt.Errorf("several labs are up: name one of %s", strings.Join(names, ", "))
}

// labName takes a lab's name, or the file that has it.
func labName(arg string) (string, error) {
	if !strings.ContainsAny(arg, "/.") {
		return arg, nil
	}
	spec, err := lab.Load(arg)
	if err != nil {
		return "", err
	}
	return spec.Name, nil
}

func labFind(dir string, args []string) (*lab.Lab, error) {
	names, err := labNames(dir, args, false)
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		return nil, errors.New("no lab is up: `skein lab up FILE` brings one up")
	}
	return lab.Attach(names[0], lab.Options{Dir: dir})
}

// labTable shows the nodes, then the paths as a matrix.
func labTable(out io.Writer, st lab.Status) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "#\tNODE\tSITE\tNAT\tADDRESS\tOVERLAY\tPID\tPHASE\tINDEX")
	for i, n := range st.Nodes {
		role := ""
		switch {
		case n.Leader:
			role = " (leader)"
		case n.Server:
			role = " (server)"
		}
		fmt.Fprintf(w, "%d\t%s%s\t%s\t%s\t%s\t%s\t%d\t%s\t%d\n", i+1, n.Name, role, n.Site, n.NAT, n.Address, n.IPv4, n.PID,
			n.Phase, n.Index)
	}
	w.Flush()
	fmt.Fprintln(out, "\nPATHS, as the row's agent sees them: d direct, r relay, - none, ? not told")
	fmt.Fprint(out, "      ")
	for i := range st.Nodes {
		fmt.Fprintf(out, "%3d", i+1)
	}
	fmt.Fprintln(out)
	for i, n := range st.Nodes {
		fmt.Fprintf(out, "%4d  ", i+1)
		for j, m := range st.Nodes {
			fmt.Fprintf(out, "%3s", labPathMark(i == j, n, m.Name))
		}
		fmt.Fprintf(out, "  %s\n", n.Name)
	}
	for _, h := range st.Hosts {
		fmt.Fprintf(out, "host: %s at %s, %s, without an agent\n", h.Name, h.Site, h.Address)
	}
	for _, c := range st.Cuts {
		fmt.Fprintf(out, "cut: %s from %s to %s\n", labCutWhat(c), c.From, c.To)
	}
	for _, z := range st.Zombies {
		fmt.Fprintf(out, "zombie: %s lives and drops of what it passes on: %s\n", z.Node, z.Drops)
	}
}

// labCutWhat says which packets a fault takes.
func labCutWhat(c lab.Cut) string {
	what := "everything"
	if c.Proto != "" {
		what = c.Proto
	}
	if c.Percent != 0 {
		what = fmt.Sprintf("%d %% of %s", c.Percent, what)
	}
	if c.Above != 0 {
		what += fmt.Sprintf(" above %d bytes", c.Above)
	}
	return what
}

func labPathMark(self bool, n lab.NodeStatus, peer string) string {
	path, known := n.Paths[peer]
	switch {
	case self:
		return "."
	case !known:
		return "?"
	case path == "direct":
		return "d"
	case path == "relay":
		return "r"
	}
	return "-"
}
