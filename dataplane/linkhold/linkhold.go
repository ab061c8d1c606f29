// Package linkhold keeps back for a moment what leaves by a link, and lets it go in the order in which it came: while
// WireGuard changes its key, what it sends is not taken by a peer that has not heard of that yet.
//
// A table of its own gives the packets to a queue in postrouting. Should the process end, the kernel lets them pass,
// since nobody has the queue, and the next start removes the table.
package linkhold

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Options of a hold.
type Options struct {
	Table string // nftables, family inet; nobody else's
	Link  string
	Queue uint16 // NFQUEUE
	// Port is the destination port of UDP and TCP that is not kept back: the control net's.
	Port uint16
	Log  *slog.Logger
}

// Hold is what a link sends, kept back.
type Hold struct {
	table string
	queue *hold.Queue
}

// Start keeps back what leaves by the link from now on.
func Start(o Options) (*Hold, error) {
	q, err := hold.Open("", o.Queue, o.Log)
	if err != nil {
		return nil, err
	}
	if err := enter(o); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return &Hold{o.Table, q}, nil
}

// End lets everything go, and tells how many packets have waited. The table goes last: when its chain does, the kernel
// drops what is in any queue.
func (h *Hold) End() (n int, err error) {
	n, err = h.queue.Release()
	return n, errors.Join(err, h.empty(), h.queue.Close(), Remove(h.table))
}

// empty removes the rules, so that no more packets come to the queue.
func (h *Hold) empty() error {
	return transact("empty", h.table, func(c *nlcount.Nft, t *nftables.Table) { c.FlushTable(t) })
}

// Remove takes a hold's table away, if it is there.
func Remove(table string) error {
	return transact("remove", table, func(c *nlcount.Nft, t *nftables.Table) {
		c.AddTable(t) // so that there is one to remove
		c.DelTable(t)
	})
}

func transact(what, table string, fill func(*nlcount.Nft, *nftables.Table)) error {
	c, err := nlcount.NewNft()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	fill(c, &nftables.Table{Family: nftables.TableFamilyINet, Name: table})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("%s the nft table %s: %w", what, table, err)
	}
	return nil
}

func enter(o Options) error {
	var errs []error
	for _, f := range hold.Forms() {
		err := enterWith(o, f.Statement(o.Queue))
		if err == nil {
			return nil
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("hold packets that leave by %s: this kernel cannot queue packets from nftables rules "+
		"(it needs NFT_QUEUE, or NFT_COMPAT and NETFILTER_XT_TARGET_NFQUEUE): %w", o.Link, errors.Join(errs...))
}

func enterWith(o Options, queue expr.Any) error {
	return transact("make", o.Table, func(c *nlcount.Nft, table *nftables.Table) {
		c.AddTable(table)
		c.DelTable(table) // one that a former run has left
		c.AddTable(table)
		chain := c.AddChain(&nftables.Chain{Name: "skein_leaving", Table: table, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityLast})
		link := nftable.Link(expr.MetaKeyOIFNAME, o.Link)
		for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: slices.Concat(link, nftable.L4(proto), []expr.Any{
				nftable.DestPort(), nftable.Equal(binaryutil.BigEndian.PutUint16(o.Port)...), nftable.Accept})})
		}
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(link, queue)})
	})
}
