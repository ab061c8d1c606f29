package nlcount

import (
	"sync/atomic"

	"github.com/google/nftables"
)

// around are the messages that begin and end a transaction of nftables.
const around = 2

// Nft is a connection to nftables whose requests are counted. It has the methods that this project uses, and hides the
// others so that none goes uncounted.
type Nft struct {
	c      *nftables.Conn
	queued atomic.Int64 // changes that Flush will send
}

// NewNft is nftables.New.
func NewNft(opts ...nftables.ConnOption) (*Nft, error) {
	c, err := nftables.New(opts...)
	if err != nil {
		return nil, err
	}
	return &Nft{c: c}, nil
}

// CloseLasting closes the socket of a connection that has one.
func (n *Nft) CloseLasting() error { return n.c.CloseLasting() }

// Flush sends what is queued as one transaction.
func (n *Nft) Flush() error {
	if k := n.queued.Swap(0); k > 0 {
		Sent(int(k) + around)
	}
	return n.c.Flush()
}

// ListTablesOfFamily asks for tables.
func (n *Nft) ListTablesOfFamily(f nftables.TableFamily) ([]*nftables.Table, error) {
	Sent(1)
	return n.c.ListTablesOfFamily(f)
}

// ListChainsOfTableFamily asks for chains.
func (n *Nft) ListChainsOfTableFamily(f nftables.TableFamily) ([]*nftables.Chain, error) {
	Sent(1)
	return n.c.ListChainsOfTableFamily(f)
}

// ListChain asks for one chain.
func (n *Nft) ListChain(t *nftables.Table, chain string) (*nftables.Chain, error) {
	Sent(1)
	return n.c.ListChain(t, chain)
}

// GetRules asks for a chain's rules.
func (n *Nft) GetRules(t *nftables.Table, c *nftables.Chain) ([]*nftables.Rule, error) {
	Sent(1)
	return n.c.GetRules(t, c)
}

// GetSets asks for a table's sets.
func (n *Nft) GetSets(t *nftables.Table) ([]*nftables.Set, error) {
	Sent(1)
	return n.c.GetSets(t)
}

// GetSetElements asks for a set's elements.
func (n *Nft) GetSetElements(s *nftables.Set) ([]nftables.SetElement, error) {
	Sent(1)
	return n.c.GetSetElements(s)
}

// GetNamedObjects asks for a table's objects.
func (n *Nft) GetNamedObjects(t *nftables.Table) ([]nftables.Obj, error) {
	Sent(1)
	return n.c.GetNamedObjects(t)
}

// AddTable queues a table.
func (n *Nft) AddTable(t *nftables.Table) *nftables.Table {
	n.queued.Add(1)
	return n.c.AddTable(t)
}

// FlushTable removes the rules of a table's chains.
func (n *Nft) FlushTable(t *nftables.Table) {
	n.queued.Add(1)
	n.c.FlushTable(t)
}

// DelTable queues the end of a table.
func (n *Nft) DelTable(t *nftables.Table) {
	n.queued.Add(1)
	n.c.DelTable(t)
}

// AddChain queues a chain.
func (n *Nft) AddChain(c *nftables.Chain) *nftables.Chain {
	n.queued.Add(1)
	return n.c.AddChain(c)
}

// DelChain queues the end of a chain.
func (n *Nft) DelChain(c *nftables.Chain) {
	n.queued.Add(1)
	n.c.DelChain(c)
}

// FlushChain queues the end of a chain's rules.
func (n *Nft) FlushChain(c *nftables.Chain) {
	n.queued.Add(1)
	n.c.FlushChain(c)
}

// AddRule queues a rule.
func (n *Nft) AddRule(r *nftables.Rule) *nftables.Rule {
	n.queued.Add(1)
	return n.c.AddRule(r)
}

// AddObj queues an object.
func (n *Nft) AddObj(o nftables.Obj) nftables.Obj {
	n.queued.Add(1)
	return n.c.AddObj(o)
}

// AddSet queues a set, and its elements if it comes with any.
func (n *Nft) AddSet(s *nftables.Set, elements []nftables.SetElement) error {
	n.queued.Add(1)
	if len(elements) > 0 {
		n.queued.Add(1)
	}
	return n.c.AddSet(s, elements)
}

// DelSet queues the end of a set.
func (n *Nft) DelSet(s *nftables.Set) {
	n.queued.Add(1)
	n.c.DelSet(s)
}

// FlushSet queues the end of a set's elements.
func (n *Nft) FlushSet(s *nftables.Set) {
	n.queued.Add(1)
	n.c.FlushSet(s)
}

// SetAddElements queues elements.
func (n *Nft) SetAddElements(s *nftables.Set, elements []nftables.SetElement) error {
	n.queued.Add(1)
	return n.c.SetAddElements(s, elements)
}

// SetDeleteElements queues the end of elements.
func (n *Nft) SetDeleteElements(s *nftables.Set, elements []nftables.SetElement) error {
	n.queued.Add(1)
	return n.c.SetDeleteElements(s, elements)
}
