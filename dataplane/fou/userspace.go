package fou

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/internal/mmsg"
)

// userspace is the TUN driver.
type userspace struct {
	ns      netns.NsHandle
	conn    *rtnl.Conn
	log     *slog.Logger
	seed    uint32 // of flows
	gateway atomic.Bool
	sockets [2]*sockets
	devices map[string]*tunDevice
	table   atomic.Pointer[table]
	workers sync.WaitGroup
	counters
}

type counters struct {
	rxPackets, rxBytes, txPackets, txBytes, stranger, malformed, unsent atomic.Uint64
}

// table is what the goroutines that handle packets go by. It is never changed, but replaced.
type table struct {
	gateway bool
	tunnels map[tunnelEnds]way
	any     [2]*tunDevice
	sockets [2]*sockets
	to      uint16            // port of the other ends
	writers [2]*mmsg.Writer   // from that port
	ports   [2][]*mmsg.Writer // that flows are spread over
}

// way is one tunnel.
type way struct {
	Tunnel
	device *tunDevice
}

func openUserspace(ns netns.NsHandle, log *slog.Logger) (*userspace, error) {
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		return nil, err
	}
	u := &userspace{ns: ns, conn: c, log: log, seed: rand.Uint32(), devices: map[string]*tunDevice{}}
	u.table.Store(&table{})
	return u, nil
}

// Name implements Driver.
func (u *userspace) Name() string { return Userspace }

// Link implements Driver. It goes by the last Spec.
func (u *userspace) Link(local, remote netip.Addr) string {
	if u.gateway.Load() {
		return dataplane.FoULink(local)
	}
	return dataplane.FoULink(remote)
}

// Stats implements Driver.
func (u *userspace) Stats() (Stats, error) {
	return Stats{RxPackets: u.rxPackets.Load(), RxBytes: u.rxBytes.Load(), TxPackets: u.txPackets.Load(),
		TxBytes: u.txBytes.Load(), DroppedStranger: u.stranger.Load(), DroppedMalformed: u.malformed.Load(),
		DroppedTx: u.unsent.Load()}, nil
}

// Close implements Driver.
func (u *userspace) Close() error {
	u.table.Store(&table{})
	for _, s := range u.sockets {
		if s != nil {
			s.close()
		}
	}
	for _, d := range u.devices {
		d.file.Close()
	}
	u.workers.Wait()
	u.conn.Close()
	return u.ns.Close()
}

// Reconcile implements Driver. After an error what could be done is done. Tunnels count as changes too.
func (u *userspace) Reconcile(s Spec) (writes int, err error) {
	if err := s.check(); err != nil {
		return 0, err
	}
	u.gateway.Store(s.Gateway)
	have, err := readDevices(u.conn)
	if err != nil {
		return 0, err
	}
	var errs []error
	n, err := u.openSockets(s)
	writes += n
	errs = append(errs, err)
	n, removals, err := u.makeDevices(s, have)
	writes += n
	errs = append(errs, err)
	before := u.table.Load()
	next := u.newTable(s)
	u.table.Store(next)
	if before.sockets != [2]*sockets{} { // else it is the first: what a former run did counts as done
		writes += changes(before, next)
	}
	u.start()
	for _, o := range removals { // only now nothing leads there any more
		if err := u.remove(o.device); err != nil {
			errs = append(errs, err)
			continue
		}
		writes++
	}
	writes += u.closeSockets(s)
	return writes, errors.Join(errs...)
}

// openSockets opens what a Spec needs and is not open yet.
func (u *userspace) openSockets(s Spec) (writes int, err error) {
	var auto [2]bool
	for _, t := range s.Tunnels {
		auto[family(t.Remote)] = auto[family(t.Remote)] || t.SourcePortAuto
	}
	var errs []error
	for i, want := range []bool{s.IPv4, s.IPv6} {
		if !want {
			continue
		}
		var opened []*portSocket
		err := rtnl.Inside(u.ns, func() (err error) {
			if u.sockets[i] == nil {
				if u.sockets[i], err = newSockets(i); err != nil {
					return err
				}
			}
			opened, err = u.openPorts(u.sockets[i], s.Ports.Taken())
			if err == nil && auto[i] {
				err = u.sockets[i].spread()
			}
			return err
		})
		for _, e := range opened {
			u.workers.Go(func() { u.receive(i, e.reader) })
			writes++
		}
		errs = append(errs, err)
	}
	return writes, errors.Join(errs...)
}

// openPorts opens those of a family that are not open; called inside the namespace.
func (u *userspace) openPorts(s *sockets, ports []uint16) (opened []*portSocket, err error) {
	for _, port := range ports {
		if s.taken[port] != nil {
			continue
		}
		e, err := s.listen(port)
		if errors.Is(err, unix.EADDRINUSE) && removeListeners(u.ns, ports) == nil {
			e, err = s.listen(port)
		}
		if err != nil {
			return opened, err
		}
		opened = append(opened, e)
	}
	return opened, nil
}

// closeSockets closes what a Spec does not need.
func (u *userspace) closeSockets(s Spec) (writes int) {
	for i, want := range []bool{s.IPv4, s.IPv6} {
		if u.sockets[i] == nil {
			continue
		}
		for port, e := range u.sockets[i].taken {
			if !want || !slices.Contains(s.Ports.Taken(), port) {
				e.conn.Close()
				delete(u.sockets[i].taken, port)
				writes++
			}
		}
		if !want {
			u.sockets[i].close()
			u.sockets[i] = nil
		}
	}
	return writes
}

// makeDevices makes what is missing and takes what is there, and returns the removals that are left to do.
func (u *userspace) makeDevices(s Spec, have []device) (writes int, removals []op, err error) {
	names := linkNames(s, Userspace, have)
	want := wanted(s, Userspace, names)
	todo := map[string]op{}
	for _, o := range diff(want, have) {
		if o.action == actionRemove {
			removals = append(removals, o)
			continue
		}
		todo[o.Name] = o
	}
	of := map[string]tunnelEnds{}
	for at, name := range names {
		if s.Gateway {
			at.remote = netip.Addr{}
		}
		of[name] = at
	}
	at := map[string]int{}
	for _, d := range have {
		at[d.Name] = d.Index
	}
	var errs []error
	for _, d := range want {
		o, differs := todo[d.Name]
		held := u.devices[d.Name]
		ready := held != nil && !held.gone.Load() && held.index == at[d.Name]
		switch {
		case ready && !differs:
			continue
		case ready && o.action == actionSet:
			err = set(u.conn, o.device)
		default:
			if held != nil {
				held.file.Close()
				delete(u.devices, d.Name)
			}
			if o.action == actionReplace {
				err = remove(u.conn, o.device)
			}
			if err == nil {
				err = u.open(d, of[d.Name])
			}
		}
		if err != nil {
			errs = append(errs, err)
		} else if differs {
			writes++
		}
		err = nil
	}
	return writes, removals, errors.Join(errs...)
}

// open opens a device. start reads it.
func (u *userspace) open(d device, of tunnelEnds) error {
	var t *tunDevice
	err := rtnl.Inside(u.ns, func() (err error) {
		t, err = openTUN(u.conn, d)
		return err
	})
	if err != nil {
		return err
	}
	t.ends = of
	if d.Name[len("fou")] == '6' {
		t.family = 1
	}
	u.devices[d.Name] = t
	return nil
}

// start reads devices that nobody reads yet; the table knows them.
func (u *userspace) start() {
	for _, d := range u.devices {
		if !d.started {
			d.started = true
			u.workers.Go(func() { u.transmit(d) })
		}
	}
}

func (u *userspace) remove(d device) error {
	if t := u.devices[d.Name]; t != nil {
		t.file.Close()
		delete(u.devices, d.Name)
	}
	return remove(u.conn, d)
}

// newTable makes the table of a Spec.
func (u *userspace) newTable(s Spec) *table {
	t := &table{gateway: s.Gateway, tunnels: make(map[tunnelEnds]way, len(s.Tunnels)), to: s.Ports.To()}
	for i, on := range []bool{s.IPv4, s.IPv6} {
		if !on || u.sockets[i] == nil {
			continue
		}
		if e := u.sockets[i].taken[t.to]; e != nil {
			t.sockets[i], t.writers[i], t.ports[i] = u.sockets[i], e.writer, u.sockets[i].ports
		}
	}
	for i, name := range anyNames {
		if s.Any {
			t.any[i] = u.devices[name]
		}
	}
	names := linkNames(s, Userspace, nil)
	for _, one := range s.Tunnels {
		at := tunnelEnds{one.Local, one.Remote}
		if d := u.devices[names[at]]; d != nil {
			t.tunnels[at] = way{Tunnel: one, device: d}
		}
	}
	return t
}

// changes counts the tunnels that differ in something that the kernel does not know.
func changes(a, b *table) (n int) {
	former := map[netip.Addr]bool{}
	for at := range a.tunnels {
		former[at.remote] = true
	}
	for at, w := range b.tunnels {
		old, there := a.tunnels[at]
		switch {
		case there && (a.to != b.to || old.SourcePortAuto != w.SourcePortAuto || b.gateway && old.MTU != w.MTU):
			n++
		case !there && (b.gateway || former[at.remote]): // a client's has another near end
			n++
		}
	}
	for at := range a.tunnels {
		if _, there := b.tunnels[at]; !there && a.gateway {
			n++
		}
	}
	return n
}
