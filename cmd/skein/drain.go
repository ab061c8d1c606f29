package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// drainLook is how often a drain is looked at while somebody waits for it.
const drainLook = 250 * time.Millisecond

func newNodeDrainCmd(g *globals) *cobra.Command {
	var undo, dry bool
	var wait time.Duration
	c := &cobra.Command{
		Use: "drain NODE", Short: "Move a member's egress slots away, and give it none",
		Long: "Move a member's egress slots to other gateways, one after the other and with their connections where these\n" +
			"can move, and give it no new ones until --undo. The command waits until it has none left. In topology site a " +
			"member\n" +
			"that drains leads its site only where nobody else can; packets go by other leaders without a loss.",
		Example: "  skein node drain gw1\n  skein node drain gw1 --dry-run\n  skein node drain gw1 --undo",
		Args:    cli.Exactly(1, "one node's name or ID"),
		RunE: func(c *cobra.Command, args []string) error {
			if undo && dry {
				return cli.UsageError{Err: errors.New("--undo and --dry-run cannot be used together: give one of them")}
			}
			if wait < 0 {
				return cli.UsageError{Err: fmt.Errorf("--wait %s: want a time such as 60s; 0 does not wait", wait)}
			}
			r, err := g.client().DrainNode(c.Context(), &skeinv1.DrainNodeRequest{Node: args[0], Undo: undo, DryRun: dry})
			if err != nil || undo || dry || wait == 0 || len(r.GetSlots()) == 0 {
				return g.show(c, r, err, func(w io.Writer) { printDrain(w, r, undo, dry, g.successors(c, r)) })
			}
			d := drain{g: g, c: c, first: r, start: time.Now()}
			return d.wait(wait)
		},
	}
	f := c.Flags()
	f.BoolVar(&undo, "undo", false, "let it have slots again")
	f.BoolVar(&dry, "dry-run", false, "only say which slots would move, and who could take them")
	f.DurationVar(&wait, "wait", time.Minute, "how long to wait until it has none (0: not at all)")
	return c
}

// slotName is an egress's slot as people read it.
func slotName(s *skeinv1.EgressSlot) string {
	return fmt.Sprintf("slot %d of %s/%s", s.GetNumber(), s.GetNamespace(), s.GetName())
}

// successors are the other nodes that could have a drained node's slots, by egress.
func (g *globals) successors(c *cobra.Command, r *skeinv1.DrainNodeResponse) map[string][]string {
	out := map[string][]string{}
	if len(r.GetSlots()) == 0 {
		return out
	}
	all, err := g.client().Egresses(c.Context(), &skeinv1.EgressesRequest{})
	if err != nil {
		return out
	}
	for _, e := range all.GetEgresses() {
		out[egressName(e.GetEgress())] = slices.DeleteFunc(e.GetEligible(), func(name string) bool {
			return name == r.GetNode().GetName()
		})
	}
	return out
}

func successorsText(s *skeinv1.EgressSlot, successors map[string][]string) string {
	others := successors[s.GetNamespace()+"/"+s.GetName()]
	if len(others) == 0 {
		return "no other node is eligible: see `skein explain egress " + s.GetNamespace() + "/" + s.GetName() + "`"
	}
	return "can go to " + strings.Join(others, ", ")
}

// printDrain shows what was decided, and the slots that the node still has.
func printDrain(w io.Writer, r *skeinv1.DrainNodeResponse, undo, dry bool, successors map[string][]string) {
	name := r.GetNode().GetName()
	switch {
	case undo:
		fmt.Fprintf(w, "node %s may have egress slots again, as of event %d\n", name, r.GetIndex())
		return
	case dry && len(r.GetSlots()) == 0:
		fmt.Fprintf(w, "node %s has no egress slot: nothing would move\n", name)
	case dry:
		fmt.Fprintf(w, "node %s would give away %s:\n", name, plural(len(r.GetSlots()), "egress slot"))
	case len(r.GetSlots()) == 0:
		fmt.Fprintf(w, "node %s gets no egress slots, as of event %d; it has none\n", name, r.GetIndex())
	default:
		fmt.Fprintf(w, "node %s gives away %s, as of event %d:\n", name,
			plural(len(r.GetSlots()), "egress slot"), r.GetIndex())
	}
	for _, v := range r.GetSlots() {
		fmt.Fprintln(w, wrap(fmt.Sprintf("  %s: %s", slotName(v.GetSlot()), successorsText(v.GetSlot(), successors)), 4))
	}
	if dry {
		fmt.Fprintln(w, "this was a dry run: nothing has changed; repeat it without --dry-run")
	}
}

// drain is one that somebody waits for.
type drain struct {
	g     *globals
	c     *cobra.Command
	first *skeinv1.DrainNodeResponse
	start time.Time
}

// wait looks until the node has no slot, and tells of each that has gone.
func (d *drain) wait(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(d.c.Context(), limit)
	defer cancel()
	tick := time.NewTicker(drainLook)
	defer tick.Stop()
	name, last := d.first.GetNode().GetName(), d.first
	d.progress("node %s gives away %s, as of event %d", name, plural(len(last.GetSlots()), "egress slot"), last.GetIndex())
	for len(last.GetSlots()) > 0 {
		select {
		case <-ctx.Done():
			if d.c.Context().Err() != nil {
				return fmt.Errorf("stopped waiting: node %s still has %s; the drain continues without this command",
					name, plural(len(last.GetSlots()), "egress slot"))
			}
			return d.stuck(last, limit)
		case <-tick.C:
		}
		now, err := d.g.client().DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: d.first.GetNode().GetId(), DryRun: true})
		if err != nil {
			if ctx.Err() != nil {
				continue
			}
			return d.g.plain(err)
		}
		d.report(last, now)
		last = now
	}
	last.Index = d.first.GetIndex()
	return d.g.show(d.c, last, nil, func(w io.Writer) {
		fmt.Fprintf(w, "node %s has no egress slot any more, after %s\n", name,
			time.Since(d.start).Round(100*time.Millisecond))
	})
}

// report says where slots went.
func (d *drain) report(before, now *skeinv1.DrainNodeResponse) {
	var gone []*skeinv1.EgressSlot
	for _, b := range before.GetSlots() {
		if !slices.ContainsFunc(now.GetSlots(), func(v *skeinv1.SlotView) bool {
			return slotName(v.GetSlot()) == slotName(b.GetSlot())
		}) {
			gone = append(gone, b.GetSlot())
		}
	}
	if len(gone) == 0 {
		return
	}
	owner := map[string]string{}
	if all, err := d.g.client().Egresses(d.c.Context(), &skeinv1.EgressesRequest{}); err == nil {
		for _, e := range all.GetEgresses() {
			for _, s := range e.GetSlots() {
				owner[slotName(s.GetSlot())] = s.GetOwner()
			}
		}
	}
	for _, s := range gone {
		to := "is gone"
		if o := owner[slotName(s)]; o != "" {
			to = "moved to " + o
		}
		d.progress("%s %s", slotName(s), to)
	}
}

func (d *drain) progress(format string, a ...any) {
	if d.g.output != "json" {
		fmt.Fprintf(d.c.ErrOrStderr(), format+"\n", a...)
	}
}

// stuck says what stays, and why.
func (d *drain) stuck(last *skeinv1.DrainNodeResponse, limit time.Duration) error {
	successors := d.g.successors(d.c, last)
	var why []string
	for _, v := range last.GetSlots() {
		why = append(why, slotName(v.GetSlot())+": "+successorsText(v.GetSlot(), successors))
	}
	return fmt.Errorf("node %s still has %s after %s (%s); the node stays draining: wait longer, or end the drain with "+
		"`skein node drain %s --undo`",
		last.GetNode().GetName(), plural(len(last.GetSlots()), "egress slot"), limit, strings.Join(why, "; "),
		last.GetNode().GetName())
}
