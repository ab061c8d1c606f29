package egressns

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Options say which namespace to open.
type Options struct {
	File   string // where the namespace is mounted; its directory is made
	Egress string // namespace/name, for messages; the name of the link on the host follows from it, and from Owner
	Owner  string // dataplane.Numbers.Owner of the agent
	Driver string // of the tunnels: auto, kernel or userspace
	Log    *slog.Logger
	// Changed is called, from any goroutine, when somebody else has changed something of ours; Apply repairs it. It may be
	// nil.
	Changed func()
}

// NS is the network namespace of one egress on a gateway node. Apply and Close are for one goroutine; the others may be
// called at any time beside them.
type NS struct {
	o      Options
	log    *slog.Logger
	ns     *os.File
	driver fou.Driver
	table  *table
	links  *links
	leases *leases

	listener rtnl.Listener

	dirty   atomic.Bool    // somebody has changed something
	cache   *nftable.State // of the table
	tunnels fou.Spec       // as the driver has them
	tunnel  bool           // and it has
	fails   int
	former  []netip.Addr // of slots; connections that leave with them are still to be ended

	driving sync.Mutex // the driver is for one at a time
}

// Open makes the namespace with its link to the calling thread's own, or adopts them: what a former run let pass goes
// on. It forwards nothing before Apply and Grant.
func Open(o Options) (_ *NS, err error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	n := &NS{o: o, log: o.Log}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("network namespace of egress %s: %w", o.Egress, err), n.Close())
		}
	}()
	var made bool
	if n.ns, made, err = obtain(o.File); err != nil {
		return nil, err
	}
	if n.table, err = openTable(int(n.ns.Fd())); err != nil {
		return nil, err
	}
	if err = n.table.probeHold(); err != nil {
		return nil, err
	}
	if n.table.hold != hold.Native {
		n.log.Info("packets are held by another way than nftables' own queue", "egress", o.Egress, "way",
			string(n.table.hold))
	}
	// The table comes before anything that forwards. One that is there goes on with what it has.
	have, err := n.table.read()
	if err != nil {
		return nil, err
	}
	if _, err = n.writeTable(plan{}, have, with(want(plan{}, nil, n.table.hold), have, true), nil); err != nil {
		return nil, err
	}
	own, err := openTable(int(n.ns.Fd()))
	if err != nil {
		return nil, err
	}
	own.hold = n.table.hold
	if n.leases, err = openLeases(own); err != nil {
		return nil, errors.Join(err, own.Close())
	}
	if n.links, err = openLinks(o.File, o.Owner, o.Egress, n.ns); err != nil {
		return nil, err
	}
	if err = n.links.start(); err != nil {
		return nil, err
	}
	if n.driver, err = fou.Open(fou.Options{NetNS: o.File, Driver: o.Driver, Log: o.Log}); err != nil {
		return nil, err
	}
	if err = n.listen(); err != nil {
		return nil, err
	}
	n.log.Debug("egress's network namespace is open", "egress", o.Egress, "file", o.File, "new", made, "tunnels",
		n.driver.Name())
	return n, nil
}

// Close ends what this process does. The namespace stays, and goes on as long as its leases.
func (n *NS) Close() error {
	errs := []error{n.listener.Close()}
	if n.driver != nil {
		errs = append(errs, n.driver.Close())
	}
	if n.leases != nil {
		errs = append(errs, n.leases.close())
	}
	if n.links != nil {
		errs = append(errs, n.links.close())
	}
	if n.table != nil {
		errs = append(errs, n.table.Close())
	}
	if n.ns != nil {
		errs = append(errs, n.ns.Close())
	}
	return errors.Join(errs...)
}

// HostLink is the name of the link's end on the host.
func (n *NS) HostLink() string { return n.links.name }

// Driver is the name of the tunnels' driver: kernel or userspace.
func (n *NS) Driver() string { return n.driver.Name() }

// Path is the file that the namespace is mounted at.
func (n *NS) Path() string { return n.o.File }

// Holds says whether this kernel can hold packets; Hold fails with ErrNoQueue where not.
func (n *NS) Holds() bool { return n.table.hold != holdNot }

// Begin starts the kernel's countdown for a slot and names it: a Grant before it is over lets the slot's packets pass
// until then. It is called before the leader is asked, so that an answer that comes late grants what is over.
func (n *NS) Begin(slot int, lease time.Duration) (Ticket, error) {
	t, err := n.leases.begin(slot, lease)
	return t, n.lost(err)
}

// Grant lets the slot's packets pass as long as the ticket lives. An earlier ticket than the one that is granted
// changes nothing. The error is ErrTicket for one that Begin did not give for this slot, or that was dropped.
func (n *NS) Grant(slot int, t Ticket) error { return n.lost(n.leases.grant(slot, t)) }

// Drop stops the slot's packets at once, and makes all its tickets useless.
func (n *NS) Drop(slot int) error { return n.lost(n.leases.drop(slot)) }

// Hold hands the slot's packets of both directions to HoldQueue before conntrack sees them, or ends that. Those that
// are in the queue then stay there. A queue that nobody reads holds nothing.
func (n *NS) Hold(slot int, on bool) error { return n.lost(n.leases.holdSlot(slot, on)) }

// lost sees to it that the table is looked at after an error: it may not be there.
func (n *NS) lost(err error) error {
	if err != nil && !errors.Is(err, ErrTicket) && !errors.Is(err, ErrNoQueue) {
		n.changed()
	}
	return err
}

// Forget has the next Apply read the kernel again. It may be called from anywhere.
func (n *NS) Forget() { n.dirty.Store(true) }

// changed notes that the kernel has to be read again, and says so.
func (n *NS) changed() {
	n.Forget()
	if n.o.Changed != nil {
		n.o.Changed()
	}
}

// Apply makes the namespace what the Spec says. It returns how many messages that took, and notes about what in the
// Spec cannot be. What it fails at it tries again the next time.
func (n *NS) Apply(s dataplane.GatewaySpec) (writes int, notes []string, err error) {
	defer func() {
		if err != nil {
			n.cache, n.tunnel = nil, false
			n.links.forget()
		}
	}()
	if n.dirty.Swap(false) {
		n.cache, n.tunnel = nil, false
		n.links.forget()
	}
	if s.MTU < minMTU || s.MTU > maxMTU {
		return 0, nil, fmt.Errorf("egress %s: MTU %d: want %d to %d", s.Egress, s.MTU, minMTU, maxMTU)
	}
	p, notes := newPlan(s)
	if n.cache == nil {
		have, err := n.table.read()
		if err != nil {
			return 0, notes, err
		}
		n.cache = &have
	}
	p = p.keep(*n.cache)
	n.links.expect(p)
	n.links.writes = 0
	defer func() { writes += n.links.writes }()
	if err := n.links.uplink(p); err != nil {
		return writes, notes, err
	}
	// A way goes before its device, and comes after it and after the client may send.
	errs := []error{n.links.unroute(p, false)}
	if t := p.tunnels(); !n.tunnel || !sameTunnels(t, n.tunnels) {
		n.driving.Lock()
		w, err := n.driver.Reconcile(t)
		n.driving.Unlock()
		writes += w
		n.links.remade()
		if err != nil {
			errs = append(errs, fmt.Errorf("tunnels of egress %s: %w", s.Egress, err))
		}
		n.tunnels, n.tunnel = t, err == nil
	}
	table := want(p, n.driver.Link, n.table.hold) // the driver knows the devices by now
	if !s.Complete && len(s.Destinations) == 0 {  // not known yet
		table = with(table, *n.cache, false)
	}
	w, err := n.writeTable(p, *n.cache, table, &n.fails)
	writes += w
	if err != nil {
		return writes, notes, errors.Join(append(errs, err)...)
	}
	errs = append(errs, n.leases.know(p), n.links.route(p, n.driver.Link), n.links.unroute(p, true))
	return writes, notes, errors.Join(errs...)
}

func sameTunnels(a, b fou.Spec) bool {
	return a.IPv4 == b.IPv4 && a.IPv6 == b.IPv6 && a.Any == b.Any && a.Gateway == b.Gateway && a.Ports == b.Ports &&
		slices.Equal(a.Tunnels, b.Tunnels)
}

// Limits of what a Spec may say.
const (
	minMTU = 1280 + dataplane.FoUOverhead6 // a tunnel carries what IPv6 asks for
	maxMTU = 65535
)

// write makes the steps that lead from have to w. A slot whose source changes has no lease from then on, and no
// connection with the address that it had: the next ticket is one for the new address.
func (n *NS) write(p plan, ops []nftable.Op, have nftable.State, w nftable.Table, anew bool) (int, error) {
	if anew || n.leases == nil { // no ticket outlives a new table
		sent, err := n.table.write(ops)
		if err != nil {
			return sent, err
		}
		n.former = append(n.former, formerIn(w, have, p.local4, p.local6)...)
		return sent, n.forgetFormer()
	}
	c := sourcesIn(ops, have, p.local4, p.local6)
	if len(c.slots) == 0 {
		sent, err := n.table.write(ops)
		if err == nil {
			err = n.forgetFormer()
		}
		return sent, err
	}
	sent, err := n.leases.change(c)
	if err != nil {
		return sent, err
	}
	n.former = append(n.former, c.former...)
	if err := n.forgetFormer(); err != nil {
		return sent, err
	}
	more, err := n.table.write(c.rest)
	return sent + more, err
}

// forgetFormer ends connections with addresses that slots had, and remembers the addresses until that has succeeded.
func (n *NS) forgetFormer() error {
	if err := forgetConnections(n.ns, n.former); err != nil {
		return err
	}
	n.former = nil
	return nil
}

// writeTable makes the table what the plan wants, from what it is.
func (n *NS) writeTable(p plan, have nftable.State, w nftable.Table, fails *int) (int, error) {
	ops := nftable.Diff(w, have, p.complete)
	if fails != nil && *fails > 1 { // small steps do not help: start over
		ops = nftable.Diff(w, nftable.State{}, p.complete)
	}
	if len(ops) == 0 {
		return 0, n.forgetFormer()
	}
	next, err := have.Apply(ops)
	if err != nil {
		return 0, err
	}
	anew := ops[0].Verb == nftable.Rebuild
	sent, err := n.write(p, ops, have, w, anew)
	if err != nil {
		if fails != nil {
			*fails++
		}
		return sent, errors.Join(err, n.table.Renew())
	}
	if fails != nil {
		*fails = 0
	}
	if anew && n.leases != nil {
		n.leases.forget()
	}
	n.cache = &next
	return sent, nil
}
