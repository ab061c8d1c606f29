package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func newBlockCmd(g *globals) *cobra.Command {
	return cli.Group("block", "Blocks of addresses, and who has them", newBlockListCmd(g), newBlockReserveCmd(g),
		newBlockReleaseCmd(g))
}

func newBlockListCmd(g *globals) *cobra.Command {
	r := &skeinv1.BlocksRequest{}
	c := &cobra.Command{
		Use: "list", Short: "Blocks that belong to a node or are reserved",
		Example: "  skein block list\n  skein block list --pool default --node home1\n  skein block list --reserved",
		Args:    cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if r.GetReserved() && r.GetNode() != "" {
				return cli.UsageError{Err: errors.New("--reserved and --node cannot be used together: a reserved block " +
					"has no node")}
			}
			blocks, err := g.client().Blocks(c.Context(), r)
			return g.show(c, blocks, err, func(w io.Writer) { printBlocks(w, blocks.GetBlocks()) })
		},
	}
	c.Flags().StringVar(&r.Pool, "pool", "", "only those of this pool")
	c.Flags().StringVar(&r.Node, "node", "", "only those of this node")
	c.Flags().BoolVar(&r.Reserved, "reserved", false, "only reserved ones")
	return c
}

func printBlocks(w io.Writer, blocks []*skeinv1.BlockView) {
	if len(blocks) == 0 {
		fmt.Fprintln(w, "no blocks: none were given to nodes, and none are reserved")
		return
	}
	t := blockTable(slices.ContainsFunc(blocks, func(v *skeinv1.BlockView) bool { return dual(v.GetBlock()) }), "USED")
	for _, v := range blocks {
		used := "-"
		if v.GetLocal() {
			used = fmt.Sprintf("%d/%s", v.GetUsed(), blockSize(v.GetBlock()))
		}
		t.block(v.GetBlock(), v.GetNode(), used)
	}
	t.print(w)
}

// blocks lays out blocks; dual says whether one has both families.
type blocks struct {
	table
	dual bool
}

func blockTable(dual bool, more ...string) *blocks {
	t := &blocks{dual: dual}
	t.head = append([]string{"POOL", "NUMBER", "PREFIX"}, more...)
	t.head = append(t.head, "SINCE", "NODE")
	if dual {
		t.head = append(t.head, "IPV6 PREFIX")
	}
	t.head = append(t.head, "REASON")
	return t
}

func (t *blocks) block(b *skeinv1.Block, node string, more ...string) {
	prefix, second := b.GetIpv4(), b.GetIpv6()
	if prefix == "" {
		prefix, second = second, ""
	}
	if b.GetNodeId() == "" {
		node = "(reserved)"
	}
	row := append([]string{b.GetPool(), fmt.Sprint(b.GetNumber()), dash(prefix)}, more...)
	row = append(row, since(b.GetSince()), dash(node))
	if t.dual {
		row = append(row, dash(second))
	}
	t.add(append(row, dash(b.GetReason()))...)
}

func dual(b *skeinv1.Block) bool { return b.GetIpv4() != "" && b.GetIpv6() != "" }

// blockSize is how many addresses a block has.
func blockSize(b *skeinv1.Block) string {
	s := b.GetIpv4()
	if s == "" {
		s = b.GetIpv6()
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return "?"
	}
	if bits := p.Addr().BitLen() - p.Bits(); bits < 32 {
		return fmt.Sprint(1 << bits)
	}
	return fmt.Sprintf("2^%d", p.Addr().BitLen()-p.Bits())
}

func newBlockReserveCmd(g *globals) *cobra.Command {
	r := &skeinv1.ReserveBlockRequest{}
	c := &cobra.Command{
		Use: "reserve PREFIX|ADDRESS", Short: "Keep a block from all nodes", Example: "  skein block reserve 10.64.3.0/27 " +
			"--pool default --reason 'old load balancers'\n  skein block reserve 10.64.3.7 --pool default",
		Args: cli.Exactly(1, "one block's prefix, or an address in it"),
		RunE: func(c *cobra.Command, args []string) error {
			var err error
			if r.Prefix, err = parseBlock(args[0]); err != nil {
				return err
			}
			if r.GetPool() == "" {
				return cli.UsageError{Err: errors.New("--pool is missing: name the pool that the block belongs to")}
			}
			b, err := g.client().ReserveBlock(c.Context(), r)
			return g.show(c, b, err, func(w io.Writer) {
				fmt.Fprintln(w, wrap(fmt.Sprintf("block %d of pool %s, %s, reserved by event %d", b.GetBlock().GetNumber(),
					b.GetBlock().GetPool(), blockText(b.GetBlock()), b.GetBlock().GetIndex()), 4))
			})
		},
	}
	c.Flags().StringVar(&r.Pool, "pool", "", "the pool that the block is of")
	c.Flags().StringVar(&r.Reason, "reason", "", "why, for the record")
	return c
}

func newBlockReleaseCmd(g *globals) *cobra.Command {
	r := &skeinv1.ReleaseBlockRequest{}
	c := &cobra.Command{
		Use: "release PREFIX", Short: "End the reservation of a block", Example: "  skein block release 10.64.3.0/27",
		Args: cli.Exactly(1, "one block's prefix"),
		RunE: func(c *cobra.Command, args []string) error {
			var err error
			if r.Prefix, err = parseBlock(args[0]); err != nil {
				return err
			}
			b, err := g.client().ReleaseBlock(c.Context(), r)
			return g.show(c, b, err, func(w io.Writer) {
				if b.GetBlock() == nil {
					fmt.Fprintf(w, "%s is not reserved, and no node has it: nothing to release\n", args[0])
					return
				}
				fmt.Fprintln(w, wrap(fmt.Sprintf("block %d of pool %s, %s, released, as of event %d", b.GetBlock().GetNumber(),
					b.GetBlock().GetPool(), blockText(b.GetBlock()), b.GetIndex()), 4))
			})
		},
	}
	c.Flags().StringVar(&r.Pool, "pool", "", "the pool that the block is of, if that is not clear from the prefix")
	return c
}

func blockText(b *skeinv1.Block) string { return prefixes(b.GetIpv4(), b.GetIpv6()) }

// parseBlock wants a prefix or an address, and leaves all else to the leader.
func parseBlock(s string) (string, error) {
	if _, err := netip.ParsePrefix(s); err == nil {
		return s, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return s, nil
	}
	return "", cli.UsageError{Err: fmt.Errorf("%q is neither a prefix such as 10.64.3.0/27 nor an address", s)}
}
