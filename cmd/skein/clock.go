package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// newClusterCmd has what concerns the log as a whole.
func newClusterCmd(g *globals) *cobra.Command {
	var yes bool
	c := &cobra.Command{
		Use: "repair-clock", Short: "Set the time of the log to the leader's clock",
		Long: "Set the time of the log to the leader's clock, after a wrong clock has made it run ahead.\n\n" +
			"Tokens expire and blocks rest by the time of the log. It follows the leader's clock, and goes back by\n" +
			"this command alone. What was stored with a later time counts as stored now. Without --yes it only shows\n" +
			"how far off it is.",
		Example: "  skein cluster repair-clock\n  skein cluster repair-clock --yes", Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			r, err := g.client().RepairClock(c.Context(), &skeinv1.RepairClockRequest{DryRun: !yes})
			return g.show(c, r, err, func(w io.Writer) { printClock(w, r, yes) })
		},
	}
	c.Flags().BoolVar(&yes, "yes", false, "really do it")
	return cli.Group("cluster", "The cluster as a whole", c, newRotateCmd(g))
}

func printClock(w io.Writer, r *skeinv1.RepairClockResponse, done bool) {
	at := func(ns int64) string { return time.Unix(0, ns).UTC().Format(time.RFC3339) }
	ahead := time.Duration(r.GetBefore() - r.GetAfter()).Round(time.Second)
	switch {
	case done && ahead.Abs() <= time.Second:
		fmt.Fprintf(w, "the time of the log is right: %s\n", at(r.GetAfter()))
	case done:
		fmt.Fprintf(w, "the time of the log was %s and is %s, from event %d on\n", at(r.GetBefore()),
			at(r.GetAfter()), r.GetIndex())
	case ahead > time.Second:
		fmt.Fprintf(w, "the last event, %d, is of %s: %s ahead of this host's clock (%s)\nif this clock is right, and the "+
			"leader's: skein cluster repair-clock --yes\n",
			r.GetIndex(), at(r.GetBefore()), ahead, at(r.GetAfter()))
	default:
		fmt.Fprintf(w, "the last event, %d, is of %s, and this host's clock says %s: nothing to repair\n", r.GetIndex(),
			at(r.GetBefore()), at(r.GetAfter()))
	}
}
