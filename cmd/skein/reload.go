package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newReloadCmd(g *globals) *cobra.Command {
	var dryRun bool
	c := &cobra.Command{
		Use:   "reload",
		Short: "Have the agent read its configuration file anew",
		Long: "Have the agent read its configuration file anew: the one that it was started with. Values that can change\n" +
			"while it runs take effect; the others are named, with the reason. A file that is wrong anywhere changes\n" +
			"nothing.\n\n" +
			"The agent also does so by itself when the file changes, and on SIGHUP. --dry-run only checks the file.",
		Example: "  skein reload\n  skein reload --dry-run",
		Args:    cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := g.client().Reload(cmd.Context(), &skeinv1.ReloadRequest{DryRun: dryRun})
			return g.show(cmd, r, err, func(w io.Writer) { reloadText(w, r, dryRun, time.Now()) })
		},
	}
	c.Flags().BoolVar(&dryRun, "dry-run", false, "say what would change, and change nothing")
	return c
}

// reloadText says what came of reading the configuration file.
func reloadText(w io.Writer, r *skeinv1.ReloadResponse, dryRun bool, now time.Time) {
	if len(r.GetLive())+len(r.GetLast())+len(r.GetRestartDue())+len(r.GetAgreed()) == 0 {
		fmt.Fprintf(w, "%s says what the agent runs with: nothing is changed\n", r.GetFile())
	}
	changes := func(head string, all []*skeinv1.ConfigChange) {
		if len(all) == 0 {
			return
		}
		fmt.Fprintln(w, head)
		for _, c := range all {
			fmt.Fprintf(w, "  %s: %s -> %s\n", c.GetKey(), unset(c.GetOld()), unset(c.GetNew()))
			if c.GetWhy() != "" {
				fmt.Fprintf(w, "    %s\n", c.GetWhy())
			}
		}
	}
	switch took := time.Duration(r.GetTookNanos()).Round(time.Millisecond); {
	case dryRun:
		changes("would take effect now:", r.GetLive())
	case r.GetNotFollowed() && len(r.GetLive()) > 0:
		changes(fmt.Sprintf("taken over, but the data plane has not followed within %s (see skein status):", took),
			r.GetLive())
	default:
		changes(fmt.Sprintf("took effect within %s:", took), r.GetLive())
	}
	if len(r.GetLast()) > 0 {
		ago := now.Sub(time.Unix(0, r.GetLastAt()))
		within := ""
		if took := time.Duration(r.GetLastTookNanos()); took > 0 {
			within = " within " + took.Round(time.Millisecond).String()
		}
		changes("took effect"+within+", "+short(ago)+" ago, when the changed file was read:", r.GetLast())
	}
	changes("takes effect when the agent is restarted:", r.GetRestartDue())
	changes("has no effect here:", r.GetAgreed())
}

func unset(value string) string {
	if value == "" {
		return "(not set)"
	}
	return value
}
