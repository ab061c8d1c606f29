package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

// poolLook is how often a pool is looked at while somebody waits until it is empty.
const poolLook = 500 * time.Millisecond

func newPoolRemoveCmd(g *globals) *cobra.Command {
	var whenEmpty bool
	var limit time.Duration
	c := &cobra.Command{
		Use: "remove NAME", Short: "Remove a pool that has no blocks, or once it has none",
		Long: "Remove a pool in which no block is anybody's. With --when-empty the pool gives nothing new from now on, " +
			"the\n" +
			"command waits until the last pod that has an address of it has ended, and removes it then. A command that is\n" +
			"stopped leaves the pool draining; give it again to go on, or take it back with `skein pool drain NAME --undo`.",
		Example: "  skein pool remove old\n  skein pool remove old --when-empty --timeout 1h", Args: cli.Exactly(1, onePool),
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case limit < 0:
				return cli.UsageError{Err: fmt.Errorf("--timeout %s: want a time such as 1h; 0 waits as long as it takes", limit)}
			case limit > 0 && !whenEmpty:
				return cli.UsageError{Err: errors.New("--timeout needs --when-empty: without it the command does not wait")}
			}
			if whenEmpty {
				if err := g.emptyPool(c, args[0], limit); err != nil {
					return g.plain(err)
				}
			}
			r, err := g.client().RemovePool(c.Context(), &skeinv1.RemovePoolRequest{Name: args[0]})
			return g.show(c, r, err, func(w io.Writer) {
				fmt.Fprintf(w, "pool %s removed, as of event %d\n", args[0], r.GetIndex())
			})
		},
	}
	c.Flags().BoolVar(&whenEmpty, "when-empty", false, "drain it, and wait until none of its blocks is anybody's")
	c.Flags().DurationVar(&limit, "timeout", 0, "how long to wait with --when-empty (0: as long as it takes)")
	return c
}

// emptyPool drains a pool and waits until no block of it is owned or reserved. A reservation ends only by a command, so
// a pool with one is refused and stays as it is.
func (g *globals) emptyPool(c *cobra.Command, name string, limit time.Duration) error {
	v, err := g.poolOf(c.Context(), name)
	if err != nil {
		return err
	}
	if n := v.GetReserved(); n > 0 {
		return fmt.Errorf("pool %s cannot become empty: %s reserved; `skein block list --pool %s --reserved` "+
			"shows why, and `skein block release` ends a reservation; nothing has changed", name, areText(n), name)
	}
	if !v.GetPool().GetDraining() {
		drain := &skeinv1.ChangePool{Name: name, Set: &skeinv1.Pool{Draining: true}, Fields: []string{"draining"}}
		if _, err := g.client().ChangePool(c.Context(), &skeinv1.ChangePoolRequest{Change: drain}); err != nil {
			return err
		}
	}
	ctx := c.Context()
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	tick := time.NewTicker(poolLook)
	defer tick.Stop()
	for told := uint64(0); ; {
		if v, err = g.poolOf(c.Context(), name); err != nil {
			return err
		}
		n := v.GetOwned() + v.GetReserved()
		if n == 0 {
			return nil
		}
		if n != told && g.output != "json" {
			fmt.Fprintf(c.ErrOrStderr(), "pool %s gives nothing new; %s in use%s\n", name, areText(n), holdersText(v))
			told = n
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("pool %s is not empty: %s in use%s; it stays draining: run the command again to go on "+
				"waiting, or end the drain with `skein pool drain %s --undo`", name, areText(n), holdersText(v), name)
		}
	}
}

// poolOf is a pool as the agent shows it.
func (g *globals) poolOf(ctx context.Context, name string) (*skeinv1.PoolView, error) {
	r, err := g.client().Pools(ctx, &skeinv1.PoolsRequest{Name: name})
	switch {
	case err != nil:
		return nil, err
	case len(r.GetPools()) == 0:
		return nil, fmt.Errorf("there is no pool named %s: `skein pool list` shows all", name)
	}
	return r.GetPools()[0], nil
}

// areText counts blocks.
func areText(n uint64) string {
	if n == 1 {
		return "1 block is"
	}
	return fmt.Sprintf("%d blocks are", n)
}

// holdersText names who has a pool's blocks, with the node that has most.
func holdersText(v *skeinv1.PoolView) string {
	h := v.GetHolders()
	switch {
	case len(h) == 0:
		return ""
	case v.GetNodes() <= 1:
		return ", on " + h[0].GetName()
	}
	return fmt.Sprintf(", on %s and %s", h[0].GetName(), plural(int(v.GetNodes())-1, "other node"))
}
