package nftable

import (
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

	"github.com/skeinmesh/skein/internal/nlcount"
)

const (
	socketBuffer     = 8 << 20 // bytes; the default 208 KiB refuses large transactions
	elementsPerMsg   = 400     // an attribute is at most 64 KiB
	elementsPerBatch = 8000    // in one transaction
)

// Conn reads and writes tables in one network namespace. It belongs to one goroutine.
type Conn struct {
	ns   int
	nft  *nlcount.Nft
	port atomic.Uint32
}

// Open opens a netlink socket in a network namespace, given by its file descriptor; 0 is the calling thread's.
func Open(ns int) (*Conn, error) {
	c := &Conn{ns: ns}
	return c, c.open()
}

func (c *Conn) open() (err error) {
	options := []nftables.ConnOption{nftables.AsLasting(), nftables.WithSockOptions(func(k *netlink.Conn) error {
		// Without CAP_NET_ADMIN over the host's first namespace the kernel grants less; then so be it.
		_ = k.SetReadBuffer(socketBuffer)
		_ = k.SetWriteBuffer(socketBuffer)
		raw, err := k.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(func(fd uintptr) {
			if sa, err := unix.Getsockname(int(fd)); err == nil {
				if n, ok := sa.(*unix.SockaddrNetlink); ok {
					c.port.Store(n.Pid)
				}
			}
		})
	})}
	if c.ns != 0 {
		options = append(options, nftables.WithNetNSFd(c.ns))
	}
	if c.nft, err = nlcount.NewNft(options...); err != nil {
		return fmt.Errorf("opening nftables' netlink socket: %w", err)
	}
	return nil
}

// Nft is the socket, for requests that this package does not make.
func (c *Conn) Nft() *nlcount.Nft { return c.nft }

// PortID is the netlink address of the socket: notifications that carry it are of our own writes. Renew changes it. It
// may be read from anywhere.
func (c *Conn) PortID() uint32 { return c.port.Load() }

// Renew makes a new socket. A transaction that was refused may leave more answers in the old one than were read, and
// each would be taken for the answer to something later.
func (c *Conn) Renew() error {
	old := c.nft
	if err := c.open(); err != nil {
		c.nft = old // better than none
		return err
	}
	_ = old.CloseLasting() // it is of no use any more
	return nil
}

// Close closes the socket; tables stay.
func (c *Conn) Close() error { return c.nft.CloseLasting() }

// Delete deletes a table, and reports whether it was there.
func (c *Conn) Delete(name string) (there bool, err error) {
	if _, there, err = c.find(name); err != nil || !there {
		return false, err
	}
	c.nft.DelTable(Table{Name: name}.kernel())
	if err := c.nft.Flush(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return false, fmt.Errorf("deleting nftables table inet %s: %w", name, err)
	}
	return true, nil
}

func (c *Conn) find(name string) (*nftables.Table, bool, error) {
	tables, err := c.nft.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, false, fmt.Errorf("reading nftables' tables: %w", err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool {
		return t.Name == name && t.Family == nftables.TableFamilyINet
	})
	if i < 0 {
		return nil, false, nil
	}
	return tables[i], true, nil
}

// Read reads what the kernel has of a table.
func (c *Conn) Read(t Table) (State, error) {
	s := State{Chains: map[string]ChainState{}, Sets: map[string]SetState{}, Counters: map[string]bool{}}
	fail := func(what string, err error) (State, error) {
		return State{}, fmt.Errorf("reading nftables table inet %s, %s: %w", t.Name, what, err)
	}
	k, there, err := c.find(t.Name)
	if err != nil || !there {
		return s, err
	}
	s.There = k.Flags == 0 // a dormant table does nothing: as good as none
	chains, err := c.nft.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fail("chains", err)
	}
	for _, ch := range chains {
		if ch.Table.Name != t.Name {
			continue
		}
		rules, err := c.nft.GetRules(k, ch)
		if err != nil {
			return fail("rules of "+ch.Name, err)
		}
		cs := ChainState{Kind: fromChain(ch).kind()}
		for _, r := range rules {
			tag, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			cs.Rules = append(cs.Rules, tag)
		}
		s.Chains[ch.Name] = cs
	}
	if len(t.Counters) > 0 {
		objects, err := c.nft.GetNamedObjects(k)
		if err != nil {
			return fail("counters", err)
		}
		for _, o := range objects {
			if n, ok := o.(*nftables.NamedObj); ok && n.Type == nftables.ObjTypeCounter {
				s.Counters[n.Name] = true
			}
		}
	}
	sets, err := c.nft.GetSets(k)
	if err != nil {
		return fail("sets", err)
	}
	for _, k := range sets {
		if k.Anonymous { // it goes with its rule
			continue
		}
		have, want := fromSet(k), t.Set(k.Name)
		ss := SetState{Kind: have.Kind(), Elements: map[string]string{}}
		if want == nil || !want.External {
			es, err := c.nft.GetSetElements(k)
			if err != nil {
				return fail("elements of "+k.Name, err)
			}
			ss.read(have, es)
		}
		s.Sets[k.Name] = ss
	}
	return s, nil
}

// read takes elements from the kernel's form.
func (s *SetState) read(of Set, es []nftables.SetElement) {
	if of.ranged() {
		s.Ranges = fromElements(es)
		return
	}
	for _, e := range es {
		s.Elements[string(e.Key)+string(e.KeyEnd)] = string(e.Val)
	}
}

// Write sends the steps, in as few transactions as the sizes allow, and tells how many messages the kernel took.
func (c *Conn) Write(t Table, ops []Op) (int, error) {
	w := writer{c: c.nft, t: t}
	for len(ops) > 0 {
		n := 1
		for ops[0].Verb == AddChain && n < len(ops) && ops[n].Verb == AddChain { // rules go to chains that come later
			n++
		}
		if err := w.step(ops[:n]); err != nil {
			return w.sent, err
		}
		ops = ops[n:]
	}
	return w.sent, w.flush()
}

type writer struct {
	c        *nlcount.Nft
	t        Table
	sent     int // messages the kernel took
	pending  int // messages of the open transaction
	elements int // in the open transaction
}

func (w *writer) flush() error {
	if w.pending == 0 {
		return nil
	}
	if err := w.c.Flush(); err != nil {
		return fmt.Errorf("writing nftables table inet %s: %w", w.t.Name, err)
	}
	w.sent += w.pending
	w.pending, w.elements = 0, 0
	return nil
}

// step is one step, or several chains that are added.
func (w *writer) step(ops []Op) error {
	x, o := w.t.kernel(), ops[0]
	switch o.Verb {
	case Rebuild:
		return w.rebuild(o.All)
	case AddCounter:
		w.c.AddObj(&nftables.NamedObj{Table: x, Name: o.Name, Type: nftables.ObjTypeCounter, Obj: &expr.Counter{}})
		w.pending++
	case AddSet:
		if err := w.c.AddSet(w.set(o.Set), nil); err != nil {
			return err
		}
		w.pending++
		return w.change(o)
	case AddChain:
		for _, o := range ops {
			w.c.AddChain(o.Chain.kernel(x))
			w.pending++
		}
		for _, o := range ops {
			w.rules(o.Chain)
		}
	case SetRules:
		w.c.FlushChain(o.Chain.kernel(x))
		w.pending++
		w.rules(o.Chain)
	case DelElements, SetElements:
		return w.change(o)
	case DelChain:
		k := &nftables.Chain{Table: x, Name: o.Name}
		w.c.FlushChain(k)
		w.c.DelChain(k)
		w.pending += 2
	case DelSet:
		w.c.DelSet(&nftables.Set{Table: x, Name: o.Name})
		w.pending++
	}
	return nil
}

// rebuild makes everything anew: elements come last, so that what is there at the end of each transaction refuses what
// it does not know yet.
func (w *writer) rebuild(t Table) error {
	w.t = t
	x := t.kernel()
	w.c.AddTable(x) // so that deleting it cannot fail
	w.c.DelTable(x)
	w.c.AddTable(x)
	w.pending += 3
	var chains []Op
	for _, c := range t.Counters {
		if err := w.step([]Op{{Verb: AddCounter, Name: c}}); err != nil {
			return err
		}
	}
	for _, s := range t.Sets {
		if err := w.step([]Op{{Verb: AddSet, Name: s.Name, Set: s}}); err != nil {
			return err
		}
	}
	for _, c := range t.Chains {
		chains = append(chains, Op{Verb: AddChain, Name: c.Name, Chain: c})
	}
	if len(chains) > 0 {
		if err := w.step(chains); err != nil {
			return err
		}
	}
	for _, s := range t.Sets {
		o := Op{Verb: SetElements, Name: s.Name, Set: s, Elements: elementsOf(s), Ranges: s.Ranges}
		if err := w.change(o); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) rules(c Chain) {
	k := c.kernel(w.t.kernel())
	for _, r := range c.Rules {
		w.c.AddRule(&nftables.Rule{Table: k.Table, Chain: k, Exprs: r.Exprs,
			UserData: userdata.AppendString(nil, userdata.TypeComment, r.tag())})
		w.pending++
	}
}

// set is one in the kernel's form.
func (w *writer) set(s Set) *nftables.Set {
	if w.t.Set(s.Name) != nil {
		return w.t.Kernel(s.Name)
	}
	return Table{Name: w.t.Name, Sets: []Set{s}}.Kernel(s.Name)
}

// change writes elements.
func (w *writer) change(o Op) error {
	for part := range slices.Chunk(o.Ranges, elementsPerMsg) {
		if err := w.some(o, o.Verb == DelElements, len(part), toElements(part)); err != nil {
			return err
		}
	}
	for part := range slices.Chunk(o.Elements, elementsPerMsg) {
		var former, es []nftables.SetElement
		for _, e := range part {
			k := o.Set.element(e)
			if e.Was { // a value is changed by taking the element away
				former = append(former, nftables.SetElement{Key: k.Key, KeyEnd: k.KeyEnd})
			}
			if o.Verb == DelElements {
				k.Val = nil
			}
			es = append(es, k)
		}
		if err := w.some(o, true, len(former), former); err != nil {
			return err
		}
		if err := w.some(o, o.Verb == DelElements, len(es), es); err != nil {
			return err
		}
	}
	return nil
}

// element is one in the kernel's form.
func (s Set) element(e Element) nftables.SetElement {
	k := nftables.SetElement{Key: []byte(e.Key)}
	if s.Interval && s.Concat {
		k.Key, k.KeyEnd = k.Key[:len(k.Key)/2], k.Key[len(k.Key)/2:]
	}
	if e.Val != "" {
		k.Val = []byte(e.Val)
	}
	return k
}

func (w *writer) some(o Op, del bool, n int, es []nftables.SetElement) error {
	if n == 0 {
		return nil
	}
	if w.elements+n > elementsPerBatch {
		if err := w.flush(); err != nil {
			return err
		}
	}
	do := w.c.SetAddElements
	if del {
		do = w.c.SetDeleteElements
	}
	if err := do(w.set(o.Set), es); err != nil {
		return err
	}
	w.pending++
	w.elements += n
	return nil
}
