package egressns

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/internal/nlcount"
)

const (
	socketBuffer     = 8 << 20 // bytes; the default 208 KiB refuses large transactions
	elementsPerMsg   = 400     // in one message: an attribute is at most 64 KiB
	elementsPerBatch = 8000    // in one transaction
)

// table writes and reads our table in one network namespace.
type table struct {
	ns    int // file descriptor
	conn  *nlcount.Nft
	port  atomic.Uint32
	table *nftables.Table
	hold  hold.Form
}

func openTable(ns int) (*table, error) {
	t := &table{ns: ns, table: &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}, hold: hold.Native}
	return t, t.open()
}

func (t *table) open() (err error) {
	t.conn, err = nlcount.NewNft(nftables.AsLasting(), nftables.WithNetNSFd(t.ns),
		nftables.WithSockOptions(func(c *netlink.Conn) error {
			// Without CAP_NET_ADMIN over the host's first namespace the kernel grants less; then so be it.
			_ = c.SetReadBuffer(socketBuffer)
			_ = c.SetWriteBuffer(socketBuffer)
			raw, err := c.SyscallConn()
			if err != nil {
				return err
			}
			return raw.Control(func(fd uintptr) {
				if sa, err := unix.Getsockname(int(fd)); err == nil {
					if n, ok := sa.(*unix.SockaddrNetlink); ok {
						t.port.Store(n.Pid)
					}
				}
			})
		}))
	if err != nil {
		return fmt.Errorf("opening nftables' netlink socket: %w", err)
	}
	return nil
}

// renew makes a new socket. A transaction that was refused may leave answers in the old one that would be taken for
// answers to something later.
func (t *table) renew() error {
	old := t.conn
	if err := t.open(); err != nil {
		t.conn = old // better than none
		return err
	}
	_ = old.CloseLasting() // it is of no use any more
	return nil
}

func (t *table) close() error { return t.conn.CloseLasting() }

// probeHold finds out how this kernel can hold packets, by chains of a table of its own that no packet meets.
func (t *table) probeHold() error {
	for _, h := range hold.Forms() {
		x := &nftables.Table{Name: tableName + "_trial", Family: nftables.TableFamilyINet}
		t.conn.AddTable(x)
		pr := nftables.ChainPriority(*nftables.ChainPriorityRaw)
		c := t.conn.AddChain(&nftables.Chain{Table: x, Name: "trial", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookPrerouting, Priority: &pr})
		nowhere := part{"", []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: ifname("none/")}}}
		t.conn.AddRule(&nftables.Rule{Table: x, Chain: c, Exprs: one(0, nowhere, queue(h)).exprs})
		t.conn.DelTable(x)
		err := t.conn.Flush()
		if err == nil {
			t.hold = h
			return nil
		}
		if err := t.renew(); err != nil {
			return err
		}
		if errors.Is(err, os.ErrPermission) {
			return fmt.Errorf("writing nftables: %w: this needs CAP_NET_ADMIN", err)
		}
	}
	t.hold = holdNot
	return nil
}

func (t *table) read() (state, error) {
	s := state{chains: map[string]chainState{}, sets: map[string]setState{}, counters: map[string]bool{}}
	fail := func(what string, err error) (state, error) {
		return state{}, fmt.Errorf("reading nftables table inet %s, %s: %w", tableName, what, err)
	}
	tables, err := t.conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail("tables", err)
	}
	i := slices.IndexFunc(tables, func(x *nftables.Table) bool { return x.Name == tableName })
	if i < 0 {
		return s, nil
	}
	s.there = tables[i].Flags == 0 // a dormant table does nothing: as good as none
	all, err := t.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail("chains", err)
	}
	for _, c := range all {
		if c.Table.Name != tableName {
			continue
		}
		rules, err := t.conn.GetRules(t.table, c)
		if err != nil {
			return fail("rules of "+c.Name, err)
		}
		cs := chainState{kind: chainKind(c)}
		for _, r := range rules {
			tag, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			cs.tags = append(cs.tags, tag)
		}
		s.chains[c.Name] = cs
	}
	objects, err := t.conn.GetNamedObjects(t.table)
	if err != nil {
		return fail("counters", err)
	}
	for _, o := range objects {
		if n, ok := o.(*nftables.NamedObj); ok && n.Type == nftables.ObjTypeCounter {
			s.counters[n.Name] = true
		}
	}
	sets, err := t.conn.GetSets(t.table)
	if err != nil {
		return fail("sets", err)
	}
	for _, set := range sets {
		if set.Anonymous { // it goes with its rule
			continue
		}
		sh, ok := shapeOf(set.Name)
		ss := setState{kind: setKind(set), elements: map[string]string{}}
		if ok && !sh.foreign {
			es, err := t.conn.GetSetElements(set)
			if err != nil {
				return fail("elements of "+set.Name, err)
			}
			for _, e := range es {
				key := string(e.Key)
				if sh.interval {
					key = intervalKey(e)
				}
				ss.elements[key] = string(e.Val)
			}
		}
		s.sets[set.Name] = ss
	}
	return s, nil
}

// chainKind puts a chain's nature in nft's words.
func chainKind(c *nftables.Chain) string {
	if c.Hooknum == nil {
		return "regular"
	}
	x := chain{kind: c.Type, hook: fmt.Sprint(*c.Hooknum), drop: c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop}
	for name, n := range map[string]*nftables.ChainHook{"prerouting": nftables.ChainHookPrerouting,
		"forward": nftables.ChainHookForward, "input": nftables.ChainHookInput,
		"output": nftables.ChainHookOutput, "postrouting": nftables.ChainHookPostrouting} {
		if *n == *c.Hooknum {
			x.hook = name
		}
	}
	if c.Priority != nil {
		x.priority = int32(*c.Priority)
	}
	return x.describe()
}

func setKind(s *nftables.Set) string {
	sh := shape{key: s.KeyType, interval: s.Interval, timeout: s.HasTimeout}
	if s.IsMap {
		sh.val = s.DataType
	}
	return sh.describe()
}

// write sends the steps, in as few transactions as the sizes allow.
func (t *table) write(ops []op) (int, error) {
	w := writer{t: t}
	for len(ops) > 0 {
		n := 1
		if v := ops[0].verb; v == setElement || v == delElement {
			for n < len(ops) && n < elementsPerMsg && ops[n].verb == v && ops[n].name == ops[0].name {
				n++
			}
		}
		if err := w.step(ops[:n]); err != nil {
			return w.sent, err
		}
		ops = ops[n:]
	}
	return w.sent, w.flush()
}

type writer struct {
	t        *table
	sent     int // messages the kernel took
	pending  int // messages of the open transaction
	elements int // in the open transaction
}

func (w *writer) flush() error {
	if w.pending == 0 {
		return nil
	}
	if err := w.t.conn.Flush(); err != nil {
		return fmt.Errorf("writing nftables table inet %s: %w", tableName, err)
	}
	w.sent += w.pending
	w.pending, w.elements = 0, 0
	return nil
}

// step is one step, or some of one kind with elements of one set.
func (w *writer) step(ops []op) error {
	c, x, o := w.t.conn, w.t.table, ops[0]
	switch o.verb {
	case rebuild:
		c.AddTable(x) // so that deleting it cannot fail
		c.DelTable(x)
		c.AddTable(x)
		w.pending += 3
	case addCounter:
		c.AddObj(&nftables.NamedObj{Table: x, Name: o.name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
		w.pending++
	case addSet:
		sh, _ := shapeOf(o.name)
		w.pending++
		return c.AddSet(sh.set(x), nil)
	case addChain:
		c.AddChain(w.chain(o.name))
		w.pending++
	case fillChain:
		ch := w.chain(o.name)
		c.FlushChain(ch)
		w.pending++
		w.rules(ch)
	case delChain:
		ch := &nftables.Chain{Table: x, Name: o.name}
		c.FlushChain(ch)
		c.DelChain(ch)
		w.pending += 2
	case delSet:
		c.DelSet(&nftables.Set{Table: x, Name: o.name})
		w.pending++
	case fillSet:
		sh, _ := shapeOf(o.name)
		set := sh.set(x)
		c.FlushSet(set)
		w.pending++
		var es []nftables.SetElement
		for _, k := range o.whole {
			es = append(es, nftables.SetElement{Key: []byte(k[1:]), IntervalEnd: k[0] == 'e'})
		}
		slices.SortFunc(es, compareEnds)
		for part := range slices.Chunk(es, elementsPerMsg) {
			if err := c.SetAddElements(set, part); err != nil {
				return err
			}
			w.pending++
		}
	case setElement, delElement:
		return w.some(ops)
	}
	return nil
}

func (w *writer) some(ops []op) error {
	c := w.t.conn
	sh, _ := shapeOf(ops[0].name)
	set := sh.set(w.t.table)
	if w.elements+len(ops) > elementsPerBatch {
		if err := w.flush(); err != nil {
			return err
		}
	}
	var gone, added []nftables.SetElement
	for _, o := range ops {
		if o.verb == delElement || o.was { // a value is changed by taking the element away
			gone = append(gone, nftables.SetElement{Key: []byte(o.key)})
		}
		if o.verb == setElement {
			added = append(added, nftables.SetElement{Key: []byte(o.key), Val: []byte(o.val)})
		}
	}
	for _, p := range []struct {
		es []nftables.SetElement
		do func(*nftables.Set, []nftables.SetElement) error
	}{{gone, c.SetDeleteElements}, {added, c.SetAddElements}} {
		if len(p.es) == 0 {
			continue
		}
		if err := p.do(set, p.es); err != nil {
			return err
		}
		w.pending++
		w.elements += len(p.es)
	}
	return nil
}

func (w *writer) find(name string) chain {
	all := chains(w.t.hold)
	return all[slices.IndexFunc(all, func(c chain) bool { return c.name == name })]
}

func (w *writer) chain(name string) *nftables.Chain {
	x := w.find(name)
	c := &nftables.Chain{Table: w.t.table, Name: name}
	if x.hook != "" {
		policy, priority := nftables.ChainPolicyAccept, nftables.ChainPriority(x.priority)
		if x.drop {
			policy = nftables.ChainPolicyDrop
		}
		c.Type, c.Hooknum, c.Priority, c.Policy = x.kind, x.hooknum, &priority, &policy
	}
	return c
}

func (w *writer) rules(c *nftables.Chain) {
	for _, r := range w.find(c.Name).rules {
		w.t.conn.AddRule(&nftables.Rule{Table: w.t.table, Chain: c, Exprs: r.exprs, UserData: userdata.AppendString(nil,
			userdata.TypeComment, r.tag())})
		w.pending++
	}
}

// compareEnds orders the ends of ranges by address. Where one range ends and the next begins, the end comes first: the
// other way round they overlap for the kernel.
func compareEnds(a, b nftables.SetElement) int {
	if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
		return c
	}
	if a.IntervalEnd {
		return -1
	}
	return 1
}
