package egressclient

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Options are the options of a Client.
type Options struct {
	NetNS string // path of the network namespace; empty: the calling thread's
	// numbers that this package uses there; the zero value: the defaults, as in every namespace except a host's own
	Numbers dataplane.Numbers
	Driver  string // of tunnels: auto | kernel | userspace
	Log     *slog.Logger
}

// ErrClosed is returned after Close.
var ErrClosed = errors.New("the egress client of this namespace is closed")

// Client manages one network namespace. Its methods are safe for concurrent use and run one after the other.
type Client struct {
	opts       Options
	ns         netns.NsHandle
	filter     filter
	openDriver func() (fou.Driver, error)
	listener   rtnl.Listener
	watched    atomic.Pointer[watched] // of the latest spec

	mu     sync.Mutex
	k      *kernel
	driver fou.Driver // nil: not needed yet, or it could not be opened
	closed bool
}

// Open enters a namespace. The first Apply adopts what an earlier process left there.
func Open(o Options) (*Client, error) {
	return open(o, func(ns string) (fou.Driver, error) {
		return fou.Open(fou.Options{NetNS: ns, Driver: o.Driver, Log: o.Log})
	})
}

func open(o Options, driver func(ns string) (fou.Driver, error)) (*Client, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Numbers = o.Numbers.Filled()
	ns, err := rtnl.Namespace(o.NetNS)
	if err != nil {
		return nil, err
	}
	c := &Client{opts: o, ns: ns, filter: filter{ns, o.Numbers.ClientNftTable}}
	c.watched.Store(&watched{})
	// The driver is opened later, possibly on a thread in another namespace or after the path was removed.
	c.openDriver = func() (fou.Driver, error) { return driver(fmt.Sprintf("/proc/self/fd/%d", int(ns))) }
	k, err := openKernel(ns, o.Numbers)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("entering the network namespace %s: %w", o.NetNS, err)
	}
	c.k = k
	return c, nil
}

// Close ends the work in this process; rules, routes and devices stay.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	c.closed = true
	err := c.listener.Close()
	if c.driver != nil {
		err = errors.Join(err, c.driver.Close())
	}
	c.k.close()
	return errors.Join(err, c.ns.Close())
}

// Driver is the tunnels' driver, kernel or userspace; empty while there are no tunnels.
func (c *Client) Driver() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.driver == nil {
		return ""
	}
	return c.driver.Name()
}

// Stats are the tunnels' counters.
func (c *Client) Stats() (fou.Stats, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.driver == nil {
		return fou.Stats{}, nil
	}
	return c.driver.Stats()
}

// Apply brings the namespace to the spec. It returns the number of changes, and notes about impossible parts. Even
// after an error no packet to the destinations leaves outside the tunnels, unless rules or routes themselves cannot
// be written.
func (c *Client) Apply(s dataplane.ClientSpec) (writes int, notes []string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, nil, ErrClosed
	}
	s = numbered(s, c.opts.Numbers)
	c.watched.Store(&watched{s.Uplink, s.Host})
	writes, notes, err = c.reconcile(s)
	if err != nil {
		err = fmt.Errorf("egresses of %s: %w", s.Name, err)
	}
	return writes, notes, err
}

// Remove removes this package's objects: rules first, so that packets take the normal route before their tunnel ends.
func (c *Client) Remove() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return ErrClosed
	}
	actual, err := c.k.read()
	if err != nil {
		return err
	}
	_, err = c.write(After(State{}, actual))
	if _, _, derr := c.devices(fou.Spec{}, false); derr != nil {
		return errors.Join(err, derr) // the filter stays, so that its protection remains
	}
	have, ferr := c.filter.read()
	if ferr == nil {
		_, ferr = c.filter.write(Filter{}, &have)
	}
	return errors.Join(err, ferr)
}

// Diff lists what Apply would change in rules, routes and devices, from a fresh read; it is empty if nothing differs.
func (c *Client) Diff(s dataplane.ClientSpec) ([]string, error) {
	s = numbered(s, c.opts.Numbers)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	v, err := c.view(s)
	if err != nil {
		return nil, err
	}
	want, _ := Want(s, v.own, func(netip.Addr) bool { return true })
	var out []string
	for _, t := range v.devices.Tunnels {
		if name := dataplane.FoULink(t.Remote); !v.links[name].up {
			out = append(out, "make device "+name)
		}
	}
	for _, o := range After(want, v.actual) {
		out = append(out, o.String())
	}
	if f := wantFilter(s); !v.filter.lets(c.filter, f) {
		out = append(out, fmt.Sprintf("let into tunnels (nft table inet %s): %s", c.filter.table, f))
	}
	return out, nil
}

// numbered sets the agent's numbers in a spec. In a host's own namespace flows get no marks if these would use bits
// of the numbers' mark mask; flows then move with their client.
func numbered(s dataplane.ClientSpec, n dataplane.Numbers) dataplane.ClientSpec {
	s.Numbers = n
	if s.Host && n.Filled().MarkMask&dataplane.FlowMask != 0 {
		s.Flows = nil
		s.Tunnels = slices.Clone(s.Tunnels)
		for i := range s.Tunnels {
			s.Tunnels[i].Slot = -1
		}
	}
	return s
}

// State is this package's state in the kernel.
func (c *Client) State() (State, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return State{}, ErrClosed
	}
	return c.k.read()
}

// view is the kernel's state and the derived devices, on which reconcile decides.
type view struct {
	actual  State
	own     []netip.Addr
	devices fou.Spec
	notes   []string
	links   map[string]link // of the tunnels, by name
	filter  filterState
}

func (c *Client) view(s dataplane.ClientSpec) (v view, err error) {
	if s.MTU == 0 {
		up, err := c.k.link(s.Uplink)
		if err != nil {
			return v, err
		}
		if !up.there {
			return v, fmt.Errorf(
				"there is no link %s, by which the tunnels' packets leave: create it, or name another", s.Uplink)
		}
		s.MTU = up.mtu
	}
	v.devices, v.notes = Devices(s, s.MTU)
	if s.Host {
		if v.own, err = c.k.own(s.Uplink, s.Addr4, s.Addr6); err != nil {
			return v, err
		}
	}
	c.k.flows = nil
	for _, f := range s.Flows {
		if f.Slot >= 0 && f.Slot < dataplane.ClientFlowSlots {
			c.k.flows = append(c.k.flows, f.Slot)
		}
	}
	if v.actual, err = c.k.read(); err != nil {
		return v, err
	}
	if v.filter, err = c.filter.read(); err != nil {
		return v, err
	}
	v.links, err = c.readLinks(v.devices)
	return v, err
}

func (c *Client) readLinks(d fou.Spec) (map[string]link, error) {
	links := map[string]link{}
	for _, t := range d.Tunnels {
		name := dataplane.FoULink(t.Remote)
		l, err := c.k.link(name)
		if err != nil {
			return nil, err
		}
		links[name] = l
	}
	return links, nil
}

// reconcile applies a spec in an order in which no packet bypasses the tunnels.
func (c *Client) reconcile(s dataplane.ClientSpec) (writes int, notes []string, err error) {
	v, err := c.view(s)
	if err != nil {
		return 0, nil, errors.Join(err, c.refuse(s))
	}
	// The filter comes before the port is open. Ends that are no longer wanted are removed last.
	let, err := c.filter.let(wantFilter(s).with(v.filter.Filter), &v.filter)
	if err != nil {
		return let, nil, errors.Join(err, c.refuse(s))
	}
	want, notes := Want(s, v.own, func(netip.Addr) bool { return true })
	first, err := c.write(Before(want, v.actual, func(name string) bool { return c.shakes(name, v) }))
	made, dnotes, derr := c.devices(v.devices, len(s.Flows) > 0)
	writes, notes = let+first+made, slices.Concat(notes, v.notes, dnotes)
	if writes > 0 || derr != nil {
		var rerr error
		if v.actual, rerr = c.k.read(); rerr == nil {
			v.links, rerr = c.readLinks(v.devices)
		}
		if rerr != nil {
			return writes, notes, errors.Join(err, derr, rerr)
		}
	}
	want, _ = Want(s, v.own, func(remote netip.Addr) bool { return v.links[dataplane.FoULink(remote)].up })
	flows, rest := early(After(want, v.actual))
	ways, werr := c.write(flows)
	// A flow is recalled before new flows change their slot, and until its routes no longer differ from theirs.
	both := wantFilter(s).with(v.filter.Filter)
	both.Flows = set(append(both.Flows, v.actual.flows()...))
	recalled, rerr := c.filter.write(both, &v.filter)
	last, lerr := c.write(rest)
	kept, ferr := c.filter.write(wantFilter(s), &v.filter)
	return writes + ways + recalled + last + kept, notes, errors.Join(err, derr, werr, rerr, lerr, ferr)
}

// refuse makes all destinations unreachable, as far as possible, after a failed read.
func (c *Client) refuse(s dataplane.ClientSpec) error {
	actual, err := c.k.read()
	if err != nil {
		return nil // the caller has reported an error already
	}
	want, _ := Want(s, nil, func(netip.Addr) bool { return true })
	_, err = c.write(Before(want, actual, func(string) bool { return false }))
	return err
}

// shakes reports whether the driver will create or recreate the tunnel's device, since it differs from its spec.
func (c *Client) shakes(name string, v view) bool {
	l := v.links[name]
	i := slices.IndexFunc(v.devices.Tunnels, func(t fou.Tunnel) bool { return dataplane.FoULink(t.Remote) == name })
	if i < 0 || !l.up {
		return true
	}
	if l.tunnel == nil { // a TUN device is never recreated, unless the driver changes
		return c.driver != nil && c.driver.Name() == fou.Kernel
	}
	return *l.tunnel != v.devices.Tunnels[i]
}

// devices makes the tunnels. Argument several: flows to one destination may use several tunnels.
func (c *Client) devices(d fou.Spec, several bool) (writes int, notes []string, err error) {
	if c.driver == nil {
		if left, err := c.k.hasTunnels(); len(d.Tunnels) == 0 && (err != nil || !left) {
			return 0, nil, err // nothing to make or remove
		}
		if c.driver, err = c.openDriver(); err != nil {
			c.driver = nil
			return 0, nil, fmt.Errorf("tunnels cannot be made: %w", err)
		}
	}
	writes, err = c.driver.Reconcile(d)
	if err != nil {
		return writes, nil, fmt.Errorf("making tunnels: %w", err)
	}
	if !d.IPv4 {
		return writes, notes, nil
	}
	n, err := c.letIn(dataplane.FoUAny4, d.Tunnels[0].Local)
	writes += n
	if err != nil {
		notes = append(notes, fmt.Sprintf("%v: replies from another address than the tunnel's are dropped", err))
	}
	for _, t := range d.Tunnels {
		if !several || t.Remote.Is6() {
			continue
		}
		n, err := c.letIn(dataplane.FoULink(t.Remote), t.Local)
		writes += n
		if err != nil {
			notes = append(notes, fmt.Sprintf("%v: replies to flows that began by another slot may be dropped", err))
		}
	}
	return writes, notes, nil
}

// write executes all operations, since one failure need not cause the next.
func (c *Client) write(ops []Op) (n int, err error) {
	var errs []error
	for _, o := range ops {
		if err := c.k.apply(o); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", o, err))
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}

// set sorts a list and removes duplicates.
func set[T cmp.Ordered](list []T) []T {
	slices.Sort(list)
	return slices.Compact(list)
}

// distinct sorts a list and removes duplicates and the given addresses.
func distinct(list, without []netip.Addr) []netip.Addr {
	list = slices.DeleteFunc(list, func(a netip.Addr) bool { return slices.Contains(without, a) })
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}
