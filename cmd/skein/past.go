package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newStateCmd(g *globals) *cobra.Command {
	var at string
	c := &cobra.Command{
		Use: "state", Short: "The agreed state, now or then", Args: cli.NoArgs,
		Example: "  skein state\n  skein state --at 17 -o json\n  skein state --at 5m",
		RunE: func(c *cobra.Command, _ []string) error {
			q := &skeinv1.StateRequest{}
			var err error
			if q.At, q.AtTime, err = parseAt(at, time.Now()); err != nil {
				return err
			}
			r, err := g.client().State(c.Context(), q)
			return g.show(c, r, err, func(w io.Writer) { printState(w, r) })
		},
	}
	c.Flags().StringVar(&at, "at", "", atHelp)
	return c
}

func newDiffCmd(g *globals) *cobra.Command {
	var plan bool
	var node string
	c := &cobra.Command{
		Use: "diff A B", Short: "What changed between two moments, in what is agreed or in a node's kernel",
		Args: cli.Exactly(2, "two moments"),
		Example: "  skein diff 10 20\n  skein diff 2h 1h\n  skein diff 14:00:00 14:05:00 --plan\n" +
			"  skein diff 10m 5m --plan --node home1",
		RunE: func(c *cobra.Command, args []string) error {
			now := time.Now()
			var index [2]uint64
			var at [2]int64
			for i, arg := range args {
				var err error
				if index[i], at[i], err = parseAt(arg, now); err != nil || arg == "" {
					return cli.UsageError{Err: fmt.Errorf("%q is not a moment: want an index such as 17, "+
						"a time such as 2026-01-02T15:04:05Z or 15:04:05, or an age such as 5m", arg)}
				}
			}
			if !plan {
				if node != "" {
					return cli.UsageError{Err: fmt.Errorf("--node %s needs --plan: the agreed state is the same on every node",
						node)}
				}
				r, err := g.client().Diff(c.Context(), &skeinv1.DiffRequest{
					From: index[0], To: index[1], FromTime: at[0], ToTime: at[1],
				})
				return g.show(c, r, err, func(w io.Writer) { printLines(w, r.GetLines(), "nothing changed") })
			}
			r, err := g.client().PlanSteps(c.Context(), &skeinv1.PlanStepsRequest{
				Node: node, From: index[0], To: index[1], FromTime: at[0], ToTime: at[1],
			})
			return g.show(c, r, err, func(w io.Writer) {
				names := g.names(c)
				printSteps(w, r.GetSteps(), g.eventLines(c.Context(), r.GetSteps(), names))
			})
		},
	}
	c.Flags().BoolVar(&plan, "plan", false, "what the kernel had to change, and why")
	c.Flags().StringVar(&node, "node", "", "with --plan: ask this member, by name or ID; for admins and servers")
	return c
}

// eventLines are the events that came with the steps of a plan, as far as they are kept, by index.
func (g *globals) eventLines(
	ctx context.Context, steps []*skeinv1.PlanStep, names *strings.Replacer,
) map[uint64]string {
	out := map[uint64]string{}
	if len(steps) == 0 {
		return out
	}
	first, last := steps[0].GetFromIndex()+1, steps[len(steps)-1].GetIndex()
	if last < first {
		return out
	}
	stream, err := g.client().Events(ctx, &skeinv1.EventsRequest{Since: first, Limit: uint32(min(last-first+1, 1<<20))})
	if err != nil {
		return out
	}
	defer stream.Close()
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		out[e.GetIndex()] = strings.TrimSpace(eventLine(e, names))
	}
	return out
}

// printSteps shows each change of a plan under its time, with its reasons.
func printSteps(w io.Writer, steps []*skeinv1.PlanStep, events map[uint64]string) {
	if len(steps) == 0 {
		fmt.Fprintln(w, "nothing changed")
	}
	const shown = 8 // events of one step
	for _, s := range steps {
		fmt.Fprintf(w, "%s\n", time.Unix(0, s.GetTime()).Format("2006-01-02 15:04:05.000"))
		reasons := 0
		because := func(text string) {
			reasons++
			fmt.Fprintln(w, wrap("    because "+text, 12))
		}
		for i := s.GetFromIndex() + 1; i <= s.GetIndex(); i++ {
			if reasons == shown {
				fmt.Fprintf(w, "    … and events %d to %d\n", i, s.GetIndex())
				break
			}
			text, known := events[i]
			if !known {
				text = fmt.Sprintf("%d, which is no longer kept", i)
			}
			because("event " + text)
		}
		for _, b := range s.GetBecause() {
			because(b)
		}
		if reasons == 0 {
			because("of this host's own settings and links, or of what another node says of itself")
		}
		for _, l := range s.GetRemoved() {
			fmt.Fprintln(w, wrap("  - "+l, 8))
		}
		for _, l := range s.GetAdded() {
			fmt.Fprintln(w, wrap("  + "+l, 8))
		}
	}
}

func newPlanCmd(g *globals) *cobra.Command {
	var node, at string
	var diff bool
	c := &cobra.Command{
		Use: "plan", Short: "What the kernel should hold, now or then, and what would change", Args: cli.NoArgs,
		Example: "  skein plan\n  skein plan --diff\n  skein plan --at 5m\n  skein plan --node home1 --at 17",
		RunE: func(c *cobra.Command, _ []string) error {
			q := &skeinv1.PlanRequest{Node: node, Diff: diff}
			var err error
			if q.At, q.AtTime, err = parseAt(at, time.Now()); err != nil {
				return err
			}
			r, err := g.client().Plan(c.Context(), q)
			return g.show(c, r, err, func(w io.Writer) {
				if !diff {
					for l := range strings.Lines(r.GetText()) {
						fmt.Fprintln(w, wrap(strings.TrimSuffix(l, "\n"), 4))
					}
					return
				}
				printLines(w, r.GetChanges(), "nothing to change: the kernel holds what it should")
			})
		},
	}
	c.Flags().StringVar(&node, "node", "", "ask this member, by name or ID; for admins and servers")
	c.Flags().StringVar(&at, "at", "", atHelp)
	c.Flags().BoolVar(&diff, "diff", false, "only what differs between the plan and the kernel")
	return c
}
