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
	Egress string // namespace/name, for messages; determines, with Owner, the name of the link on the host
	Owner  string // dataplane.Numbers.Owner of the agent
	Driver string // of the tunnels: auto, kernel or userspace
	Log    *slog.Logger
	// Changed is called, from any goroutine, when another program has changed something of this namespace; Apply
	// repairs it. It may be nil.
	Changed func()
}

// NS is the network namespace of one egress on a gateway node. Apply and Close must be called from one goroutine; the
// other methods may be called concurrently with them.
type NS struct {
	o      Options
	log    *slog.Logger
	ns     *os.File
	driver fou.Driver
	table  *table
	links  *links
	leases *leases

	listener rtnl.Listener

	dirty   atomic.Bool    // another program has changed something
	cache   *nftable.State // of the table
	tunnels fou.Spec       // as applied by the driver
	tunnel  bool           // tunnels is valid
	fails   int
	former  []netip.Addr // former addresses of slots, whose connections must still be ended

	driving sync.Mutex // serialises use of the driver
}

// Open makes the namespace with its link to the calling thread's namespace, or adopts them; forwarding of an earlier
// run continues. A new namespace forwards nothing before Apply and Grant.
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
	// The table comes before anything that forwards. An existing table keeps its elements.
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

// Close ends the work in this process. The namespace stays, and forwards until its leases end.
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

// Holds reports whether this kernel can hold packets; if not, Hold fails with ErrNoQueue.
func (n *NS) Holds() bool { return n.table.hold != holdNot }

// Begin starts the kernel's countdown for a slot and returns its ticket: once granted, it lets the slot's packets
// pass until the countdown ends. Call it before asking the leader, so that a late answer grants a ticket that has
// ended.
func (n *NS) Begin(slot int, lease time.Duration) (Ticket, error) {
	t, err := n.leases.begin(slot, lease)
	return t, n.lost(err)
}

// Grant lets the slot's packets pass while the ticket runs. A ticket older than the granted one changes nothing. The
// error is ErrTicket if Begin did not make the ticket for this slot, or it was dropped.
func (n *NS) Grant(slot int, t Ticket) error { return n.lost(n.leases.grant(slot, t)) }

// Drop stops the slot's packets at once, and invalidates all its tickets.
func (n *NS) Drop(slot int) error { return n.lost(n.leases.drop(slot)) }

// Hold gives the slot's packets of both directions to HoldQueue before conntrack, or stops that. Packets already
// queued stay there. Without a reader of the queue no packet is held.
func (n *NS) Hold(slot int, on bool) error { return n.lost(n.leases.holdSlot(slot, on)) }

// lost requests a reconciliation after an error, since the table may be missing.
func (n *NS) lost(err error) error {
	if err != nil && !errors.Is(err, ErrTicket) && !errors.Is(err, ErrNoQueue) {
		n.changed()
	}
	return err
}

// Forget makes the next Apply read the kernel again. It is safe for concurrent use.
func (n *NS) Forget() { n.dirty.Store(true) }

// changed makes the next Apply read the kernel again, and notifies Options.Changed.
func (n *NS) changed() {
	n.Forget()
	if n.o.Changed != nil {
		n.o.Changed()
	}
}

// Apply brings the namespace to the Spec. It returns the number of messages written, and notes about parts of the
// Spec that are impossible. The next Apply retries what failed.
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
	// A route is removed before its device, and added after the device and after the client may send.
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

// Limits of a Spec.
const (
	minMTU = 1280 + dataplane.FoUOverhead6 // the tunnel must carry IPv6's minimum
	maxMTU = 65535
)

// write executes the steps from have to w. A slot whose source address changes loses its lease, and all connections
// with the former address are ended, so that the next ticket is for the new address only.
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

// forgetFormer ends connections with former addresses of slots, and keeps the addresses until that has succeeded.
func (n *NS) forgetFormer() error {
	if err := forgetConnections(n.ns, n.former); err != nil {
		return err
	}
	n.former = nil
	return nil
}

// writeTable changes the table from have to w.
func (n *NS) writeTable(p plan, have nftable.State, w nftable.Table, fails *int) (int, error) {
	ops := nftable.Diff(w, have, p.complete)
	if fails != nil && *fails > 1 { // repeated failures: make the table anew
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
