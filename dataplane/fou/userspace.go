package fou

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/mmsg"
)

// userspace is the TUN driver.
type userspace struct {
	ns      netns.NsHandle
	handle  *netlink.Handle
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
	tunnels map[netip.Addr]way // by remote
	any     [2]*tunDevice
	sockets [2]*sockets
	ports   [2][]*mmsg.Writer // that flows are spread over
}

// way is one tunnel.
type way struct {
	Tunnel
	device *tunDevice
}

func openUserspace(ns netns.NsHandle, log *slog.Logger) (*userspace, error) {
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening netlink in the network namespace: %w", err)
	}
	u := &userspace{ns: ns, handle: h, log: log, seed: rand.Uint32(), devices: map[string]*tunDevice{}}
	u.table.Store(&table{})
	return u, nil
}

// Name implements Driver.
func (u *userspace) Name() string { return Userspace }

// Link implements Driver. It goes by the last Spec.
func (u *userspace) Link(remote netip.Addr) string {
	if u.gateway.Load() {
		return anyNames[family(remote.Unmap())]
	}
	return dataplane.FoULink(remote)
}

// Stats implements Driver.
func (u *userspace) Stats() (Stats, error) {
	return Stats{RxPackets: u.rxPackets.Load(), RxBytes: u.rxBytes.Load(), TxPackets: u.txPackets.Load(), TxBytes: u.txBytes.Load(),
		DroppedStranger: u.stranger.Load(), DroppedMalformed: u.malformed.Load(), DroppedTx: u.unsent.Load()}, nil
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
	u.handle.Close()
	return u.ns.Close()
}

// Reconcile implements Driver. After an error what could be done is done. Tunnels count as changes too.
func (u *userspace) Reconcile(s Spec) (writes int, err error) {
	if err := s.check(); err != nil {
		return 0, err
	}
	u.gateway.Store(s.Gateway)
	have, err := readDevices(u.handle)
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
		if !want || u.sockets[i] != nil && (!auto[i] || len(u.sockets[i].auto) == autoPorts) {
			continue
		}
		opened := u.sockets[i]
		err := inside(u.ns, func() (err error) {
			if opened == nil {
				opened, err = listen(i)
				if errors.Is(err, unix.EADDRINUSE) && removeListeners(u.ns) == nil {
					opened, err = listen(i)
				}
			}
			if err == nil && auto[i] {
				err = opened.spread()
			}
			return err
		})
		if opened != nil && u.sockets[i] == nil {
			u.sockets[i] = opened
			u.workers.Go(func() { u.receive(opened) })
			writes++
		}
		errs = append(errs, err)
	}
	return writes, errors.Join(errs...)
}

// closeSockets closes those of a family that is not wanted.
func (u *userspace) closeSockets(s Spec) (writes int) {
	for i, want := range []bool{s.IPv4, s.IPv6} {
		if !want && u.sockets[i] != nil {
			u.sockets[i].close()
			u.sockets[i] = nil
			writes++
		}
	}
	return writes
}

// makeDevices makes what is missing and takes what is there, and returns the removals that are left to do.
func (u *userspace) makeDevices(s Spec, have []device) (writes int, removals []op, err error) {
	want := wanted(s, Userspace)
	todo := map[string]op{}
	for _, o := range diff(want, have) {
		if o.action == actionRemove {
			removals = append(removals, o)
			continue
		}
		todo[o.Name] = o
	}
	remotes := map[string]netip.Addr{}
	for _, t := range s.Tunnels {
		remotes[dataplane.FoULink(t.Remote)] = t.Remote
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
			err = set(u.handle, o.device)
		default:
			if held != nil {
				held.file.Close()
				delete(u.devices, d.Name)
			}
			if o.action == actionReplace {
				err = remove(u.handle, o.device)
			}
			if err == nil {
				err = u.take(d, remotes[d.Name])
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

// take opens a device. start reads it.
func (u *userspace) take(d device, remote netip.Addr) error {
	var t *tunDevice
	err := inside(u.ns, func() (err error) {
		t, err = openTUN(u.handle, d)
		return err
	})
	if err != nil {
		return err
	}
	t.remote = remote
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
	return remove(u.handle, d)
}

// newTable makes the table of a Spec.
func (u *userspace) newTable(s Spec) *table {
	t := &table{gateway: s.Gateway, tunnels: make(map[netip.Addr]way, len(s.Tunnels))}
	for i, on := range []bool{s.IPv4, s.IPv6} {
		if on && u.sockets[i] != nil {
			t.sockets[i], t.ports[i] = u.sockets[i], u.sockets[i].ports
		}
	}
	for i, name := range anyNames {
		if s.Any || s.Gateway {
			t.any[i] = u.devices[name]
		}
	}
	for _, one := range s.Tunnels {
		w := way{Tunnel: one, device: u.devices[dataplane.FoULink(one.Remote)]}
		if s.Gateway {
			w.device = t.any[family(one.Remote)]
		}
		if w.device != nil {
			t.tunnels[one.Remote] = w
		}
	}
	return t
}

// changes counts the tunnels that differ in something that the kernel does not know.
func changes(a, b *table) (n int) {
	for remote, w := range b.tunnels {
		old, there := a.tunnels[remote]
		if there && (old.Local != w.Local || old.SourcePortAuto != w.SourcePortAuto || b.gateway && old.MTU != w.MTU) || !there && b.gateway {
			n++
		}
	}
	for remote := range a.tunnels {
		if _, there := b.tunnels[remote]; !there && a.gateway {
			n++
		}
	}
	return n
}
