package nft

import (
	"errors"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// Reconciler keeps the table as the Spec says. It remembers the table, so that an unchanged Spec costs
// no message and no dump.
type Reconciler struct {
	t     *nftable.Reconciler
	n     dataplane.Numbers
	noFib bool // this kernel cannot ask for the way back to a packet's source
}

// NewReconciler opens a netlink socket in the calling thread's network namespace; zero Numbers are the default ones.
func NewReconciler(n dataplane.Numbers) (*Reconciler, error) {
	t, err := nftable.NewReconciler(0)
	if err != nil {
		return nil, err
	}
	return &Reconciler{t: t, n: n.Filled()}, nil
}

// Name of the subsystem in reports.
func (r *Reconciler) Name() string { return "nft" }

// PortID is the netlink address of this reconciler: notifications that carry it are our own. It changes after an
// error, and may be read from anywhere.
func (r *Reconciler) PortID() uint32 { return r.t.PortID() }

// Forget makes the next Reconcile read the table first.
func (r *Reconciler) Forget() { r.t.Forget() }

// Close closes the socket; the table stays.
func (r *Reconciler) Close() error { return r.t.Close() }

// Repair is Reconcile.
func (r *Reconciler) Repair(s dataplane.Spec) (int, []string, error) { return r.Reconcile(s) }

// Reconcile makes the table what the Spec says and returns how many messages that took.
func (r *Reconciler) Reconcile(s dataplane.Spec) (writes int, notes []string, err error) {
	defer func() {
		if err != nil {
			r.noFib = r.noFib || r.lacksFib()
		}
	}()
	have, err := r.t.State(r.layout())
	if err != nil {
		return 0, nil, err
	}
	want, notes := r.wanted(s, have)
	writes, err = r.t.Reconcile(want, s.Complete)
	return writes, notes, err
}

// layout names the table.
func (r *Reconciler) layout() nftable.Table { return nftable.Table{Name: r.n.NftTable} }

// wanted is the table of a Spec as far as this kernel can have it.
func (r *Reconciler) wanted(s dataplane.Spec, have nftable.State) (nftable.Table, []string) {
	s.Numbers = r.n
	want, notes := Want(s, have)
	if r.noFib {
		want = withoutSources(want)
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
	conn := r.t.Nft()
	conn.AddTable(t)
	conn.AddChain(c)
	conn.AddRule(&nftables.Rule{Table: t, Chain: c, Exprs: append(noWayBack(), nftable.Drop)})
	conn.DelTable(t)
	err := conn.Flush()
	if err != nil {
		_ = r.t.Renew() // more answers may wait than were read
	}
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Rewrites reads the port rewrites that the kernel has, of a former run too.
func (r *Reconciler) Rewrites() ([]dataplane.PortRewrite, error) {
	have, err := r.t.Read(r.layout())
	return rewritesIn(have), err
}

// Diff tells what Reconcile would do, from a fresh read.
func (r *Reconciler) Diff(s dataplane.Spec) ([]string, error) {
	have, err := r.t.Read(r.layout())
	if err != nil {
		return nil, err
	}
	want, _ := r.wanted(s, have)
	var out []string
	for _, o := range nftable.Diff(want, have, s.Complete) {
		out = append(out, o.String())
	}
	return out, nil
}

// Purge deletes the table and says whether it was there.
func (r *Reconciler) Purge() (bool, error) { return r.t.Purge(r.layout()) }
