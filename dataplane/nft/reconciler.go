package nft

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/nlcount"
)

const (
	socketBuffer     = 8 << 20 // bytes; the default 208 KiB refuses large transactions
	elementsPerMsg   = 400     // ranges in one message: an attribute is at most 64 KiB
	elementsPerBatch = 8000    // ranges in one transaction
)

// Reconciler keeps the table as the Spec says. It remembers the table, so that an unchanged Spec costs
// no message and no dump.
type Reconciler struct {
	conn  *nlcount.Nft
	port  atomic.Uint32
	table *nftables.Table
	n     dataplane.Numbers
	cache *State
	fails int
	noFib bool // this kernel cannot ask for the way back to a packet's source
}

// NewReconciler opens a netlink socket in the calling thread's network namespace; zero Numbers are the default ones.
func NewReconciler(n dataplane.Numbers) (*Reconciler, error) {
	n = n.Filled()
	r := &Reconciler{n: n, table: &nftables.Table{Name: n.NftTable, Family: nftables.TableFamilyINet}}
	return r, r.open()
}

// open makes the socket.
func (r *Reconciler) open() (err error) {
	r.conn, err = nlcount.NewNft(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		// Without CAP_NET_ADMIN over the host's first namespace the kernel grants less; then so be it.
		_ = c.SetReadBuffer(socketBuffer)
		_ = c.SetWriteBuffer(socketBuffer)
		raw, err := c.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(func(fd uintptr) {
			if sa, err := unix.Getsockname(int(fd)); err == nil {
				r.port.Store(portID(sa))
			}
		})
	}))
	if err != nil {
		return fmt.Errorf("opening nftables' netlink socket: %w", err)
	}
	return nil
}

// renew makes a new socket. A transaction that was refused may leave more answers in the old one than were read, and
// each would be taken for the answer to something later.
func (r *Reconciler) renew() error {
	old := r.conn
	if err := r.open(); err != nil {
		r.conn = old // better than none
		return err
	}
	_ = old.CloseLasting() // it is of no use any more
	return nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "nft" }

// PortID is the netlink address of this reconciler: notifications that carry it are our own. It changes after an
// error, and may be read from anywhere.
func (r *Reconciler) PortID() uint32 { return r.port.Load() }

// Forget makes the next Reconcile read the table first.
func (r *Reconciler) Forget() { r.cache = nil }

// Close closes the socket; the table stays.
func (r *Reconciler) Close() error { return r.conn.CloseLasting() }

// Repair is Reconcile.
func (r *Reconciler) Repair(s dataplane.Spec) (int, []string, error) { return r.Reconcile(s) }

// Reconcile makes the table what the Spec says and returns how many messages that took.
func (r *Reconciler) Reconcile(s dataplane.Spec) (writes int, notes []string, err error) {
	defer func() {
		if err != nil {
			r.cache = nil
			r.fails++
			err = errors.Join(err, r.renew())
			r.noFib = r.noFib || r.lacksFib()
		} else {
			r.fails = 0
		}
	}()
	if r.cache == nil {
		st, err := r.read()
		if err != nil {
			return 0, nil, err
		}
		r.cache = &st
	}
	want, notes := r.wanted(s)
	ops := Diff(want, *r.cache, s.Complete)
	if len(ops) == 0 {
		return 0, notes, nil
	}
	if r.fails > 1 { // small steps do not help: start over
		all := want
		if !s.Complete {
			all = union(want, *r.cache)
		}
		ops = []Op{rebuild(all)}
	}
	next, err := r.cache.Apply(ops)
	if err != nil {
		return 0, nil, fmt.Errorf("nftables table inet %s: %w", r.n.NftTable, err)
	}
	writes, err = r.write(ops, want)
	if err != nil {
		return writes, nil, fmt.Errorf("writing nftables table inet %s: %w", r.n.NftTable, err)
	}
	r.cache = &next
	return writes, notes, nil
}

// wanted is the table of a Spec as far as this kernel can have it.
func (r *Reconciler) wanted(s dataplane.Spec) (State, []string) {
	s.Numbers = r.n
	want, notes := Want(s)
	if r.noFib {
		want.dropSources()
		notes = append(notes, "this kernel's nftables cannot look up routes (CONFIG_NFT_FIB_INET): packets that pods and "+
			"neighbours send under others' addresses are not dropped")
	}
	return want, notes
}

// lacksFib tries in a table that is made and removed in one transaction, whether the kernel has what the chain of
// sources needs.
func (r *Reconciler) lacksFib() bool {
	t := &nftables.Table{Name: r.n.NftTable + "_trial", Family: nftables.TableFamilyINet}
	c := &nftables.Chain{Table: t, Name: dataplane.ChainSources, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw}
	r.conn.AddTable(t)
	r.conn.AddChain(c)
	r.conn.AddRule(&nftables.Rule{Table: t, Chain: c, Exprs: append(noWayBack(), drop)})
	r.conn.DelTable(t)
	err := r.conn.Flush()
	if err != nil {
		_ = r.renew() // more answers may wait than were read
	}
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Rewrites reads the port rewrites that the kernel has, of a former run too.
func (r *Reconciler) Rewrites() ([]dataplane.PortRewrite, error) {
	st, err := r.read()
	return st.Sets[dataplane.MapRewriteOut].Rewrites, err
}

// Diff tells what Reconcile would do, from a fresh read.
func (r *Reconciler) Diff(s dataplane.Spec) ([]string, error) {
	actual, err := r.read()
	if err != nil {
		return nil, err
	}
	var out []string
	want, _ := r.wanted(s)
	for _, op := range Diff(want, actual, s.Complete) {
		out = append(out, op.String())
	}
	return out, nil
}

// Purge deletes the table and says whether it was there.
func (r *Reconciler) Purge() (bool, error) {
	st, err := r.read()
	if err != nil || !st.Table {
		return false, err
	}
	r.cache = nil
	r.conn.DelTable(r.table)
	if err := r.conn.Flush(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("deleting nftables table inet %s: %w", r.n.NftTable, err)
	}
	return true, nil
}

func (r *Reconciler) read() (State, error) {
	s := State{Chains: map[string]Chain{}, Sets: map[string]Set{}}
	fail := func(what string, err error) (State, error) {
		return State{}, fmt.Errorf("reading nftables table inet %s, %s: %w", r.n.NftTable, what, err)
	}
	tables, err := r.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail("tables", err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool {
		return t.Name == r.table.Name && t.Family == r.table.Family
	})
	if i < 0 {
		return s, nil
	}
	s.Table = tables[i].Flags == 0 // a dormant table does nothing: as good as none
	chains, err := r.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail("chains", err)
	}
	for _, c := range chains {
		if c.Table.Name != r.table.Name {
			continue
		}
		rules, err := r.conn.GetRules(r.table, c)
		if err != nil {
			return fail("rules of "+c.Name, err)
		}
		ch := Chain{Kind: chainKind(c)}
		for _, rule := range rules {
			ch.Rules = append(ch.Rules, ruleText(r.n, rule.Exprs))
		}
		s.Chains[c.Name] = ch
	}
	sets, err := r.conn.GetSets(r.table)
	if err != nil {
		return fail("sets", err)
	}
	for _, set := range sets {
		es, err := r.conn.GetSetElements(set)
		if err != nil {
			return fail("elements of "+set.Name, err)
		}
		have := Set{Kind: setKind(set)}
		switch have.Kind {
		case kindPorts, kindPeers:
			have.Rewrites = fromRewriteElements(es)
		case kindLinks:
			have.Links = linksOf(es)
		default:
			have.Ranges = fromElements(es)
		}
		s.Sets[set.Name] = have
	}
	return s, nil
}

// write sends the operations, in as few transactions as the sizes allow.
func (r *Reconciler) write(ops []Op, want State) (int, error) {
	w := writer{r: r, want: want}
	for _, o := range ops {
		if err := w.op(o); err != nil {
			return w.sent, err
		}
	}
	return w.sent, w.flush()
}

type writer struct {
	r       *Reconciler
	want    State // for what its rules depend on
	sent    int   // messages the kernel took
	pending int   // messages of the open transaction
	ranges  int   // in the open transaction
}

func (w *writer) flush() error {
	if w.pending == 0 {
		return nil
	}
	if err := w.r.conn.Flush(); err != nil {
		return err
	}
	w.sent += w.pending
	w.pending, w.ranges = 0, 0
	return nil
}

func (w *writer) op(o Op) error {
	c, t := w.r.conn, w.r.table
	switch o.Verb {
	case Rebuild:
		c.AddTable(t) // so that deleting it cannot fail
		c.DelTable(t)
		c.AddTable(t)
		w.pending += 3
		for _, n := range slices.Sorted(maps.Keys(o.All.Sets)) {
			if err := w.op(Op{Verb: AddSet, Name: n, Kind: o.All.Sets[n].Kind}); err != nil {
				return err
			}
		}
		for _, n := range slices.Sorted(maps.Keys(o.All.Chains)) {
			ch := o.All.Chains[n]
			if err := w.op(Op{Verb: AddChain, Name: n, Kind: ch.Kind, Rules: ch.Rules}); err != nil {
				return err
			}
		}
		for _, n := range slices.Sorted(maps.Keys(o.All.Sets)) {
			s := o.All.Sets[n]
			if err := w.elements(Op{Verb: AddElements, Name: n, Kind: s.Kind, Ranges: s.Ranges, Rewrites: s.Rewrites,
				Links: s.Links}); err != nil {
				return err
			}
		}
	case AddSet:
		if err := c.AddSet(w.set(o), nil); err != nil {
			return err
		}
		w.pending++
		return w.elements(o)
	case AddChain:
		c.AddChain(w.chain(o))
		w.pending++
		w.rules(o)
	case SetRules:
		c.FlushChain(w.chain(o))
		w.pending++
		w.rules(o)
	case DelChain:
		c.FlushChain(w.chain(o))
		c.DelChain(w.chain(o))
		w.pending += 2
	case DelSet:
		c.DelSet(w.set(o))
		w.pending++
	case DelElements, AddElements:
		return w.elements(o)
	}
	return nil
}

func (w *writer) rules(o Op) {
	exprs := ruleExprs(w.want.Numbers)
	switch o.Kind {
	case kindRewriteIn:
		exprs = [][]expr.Any{rewriteInExprs(w.want.Port)}
	case kindClamp:
		exprs = [][]expr.Any{clampExprs(w.want.Numbers)}
	case kindSources:
		exprs = nil
		for _, one := range sourceRules(w.want.Numbers, w.want.Link, w.want.Control, w.want.Hops, w.want.Plain) {
			exprs = append(exprs, one.exprs)
		}
	case kindRewriteOut:
		exprs = [][]expr.Any{rewriteOutExprs(w.want.Port)}
	case kindTranslateIn, kindTranslateOut:
		exprs = nil
		for _, one := range translateRules(w.want.Translations, o.Kind == kindTranslateIn) {
			exprs = append(exprs, one.exprs)
		}
	}
	for _, e := range exprs {
		w.r.conn.AddRule(&nftables.Rule{Table: w.r.table, Chain: w.chain(o), Exprs: e})
		w.pending++
	}
}

func (w *writer) elements(o Op) error {
	for part := range slices.Chunk(o.Ranges, elementsPerMsg) {
		if err := w.some(o, len(part), toElements(part)); err != nil {
			return err
		}
	}
	for part := range slices.Chunk(o.Rewrites, elementsPerMsg) {
		if err := w.some(o, len(part), rewriteElements(o.Kind, part)); err != nil {
			return err
		}
	}
	for part := range slices.Chunk(o.Links, elementsPerMsg) {
		if err := w.some(o, len(part), linkElements(part)); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) some(o Op, n int, es []nftables.SetElement) error {
	if w.ranges+n > elementsPerBatch {
		if err := w.flush(); err != nil {
			return err
		}
	}
	do := w.r.conn.SetAddElements
	if o.Verb == DelElements {
		do = w.r.conn.SetDeleteElements
	}
	if err := do(w.set(o), es); err != nil {
		return err
	}
	w.pending++
	w.ranges += n
	return nil
}

func (w *writer) set(o Op) *nftables.Set {
	s := setOf(o.Kind)
	s.Table, s.Name, s.ID = w.r.table, o.Name, setIDs[o.Name]
	return s
}

func (w *writer) chain(o Op) *nftables.Chain {
	accept := nftables.ChainPolicyAccept
	c := &nftables.Chain{Table: w.r.table, Name: o.Name, Policy: &accept, Priority: nftables.ChainPriorityFilter}
	switch o.Kind {
	case kindPrerouting:
		c.Type, c.Hooknum = nftables.ChainTypeFilter, nftables.ChainHookPrerouting
	case kindSources:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPrerouting,
			nftables.ChainPriorityRef(-310)
	case kindOutgoing:
		c.Type, c.Hooknum = nftables.ChainTypeRoute, nftables.ChainHookOutput
	case kindClamp:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPostrouting, nftables.ChainPriorityMangle
	case kindRewriteIn:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw
	case kindTranslateIn:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPrerouting,
			nftables.ChainPriorityRef(-305)
	case kindTranslateOut:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPostrouting,
			nftables.ChainPriorityRef(310)
	case kindRewriteOut:
		c.Type, c.Hooknum, c.Priority = nftables.ChainTypeFilter, nftables.ChainHookPostrouting,
			nftables.ChainPriorityRef(300)
	default:
		c.Policy, c.Priority = nil, nil
	}
	return c
}
