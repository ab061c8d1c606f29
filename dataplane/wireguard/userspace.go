package wireguard

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/hop"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// tunBatch is how many packets the kernel gives us at a time, as one that we cut up. The link's limit on that
// is set to the same. wireguard-go keeps a buffer of 64 KiB for each, where its own choice is 128.
const tunBatch = 64

type userspaceDevice struct {
	name  string
	tun   *quietTUN
	dev   *device.Device
	up    bool
	text  bytes.Buffer
	count *counters // nil: the library has them elsewhere
	first *hurrier

	hop      *hop.Device
	hops     dataplane.Hops // that hop has
	hopNotes []string
}

func openUserspace(c OpenConfig) (Device, int, error) {
	created := 0
	_, kind, err := linkKind(c.Link)
	if err != nil {
		return nil, 0, err
	}
	switch kind {
	case "":
	case "wireguard": // a former run used the kernel's
		if _, err := DeleteLink(c.Link); err != nil {
			return nil, 0, err
		}
		created++
	case "tuntap":
	default:
		return nil, 0, foreignLink(c.Link, kind)
	}
	t, hops, err := openTUN(c.Link, c.MTU)
	if err != nil {
		return nil, created, err
	}
	if err := setUp(c.Link); err != nil {
		t.Close()
		return nil, created + 1, err
	}
	log := c.Log
	bind := newMeshBind()
	d := device.NewDevice(t, bind, &device.Logger{
		Verbosef: device.DiscardLogf,
		Errorf:   func(f string, a ...any) { log.Debug("wireguard-go", "message", fmt.Sprintf(f, a...)) },
	})
	// The agent's prober decides endpoints; a peer must not pull its own away from under it. See keepEndpoints.
	d.DisableSomeRoamingForBrokenMobileSemantics()
	count, err := newCounters(d)
	if err != nil {
		log.Warn("reading WireGuard's counters costs more than it should", "error", err)
	}
	return &userspaceDevice{name: c.Link, tun: t, dev: d, count: count, first: newHurrier(d, bind, &t.handled), hop: hops},
		created + 1, nil
}

func openTUN(name string, mtu int) (*quietTUN, *hop.Device, error) {
	fd, err := rtnl.TUN(name, unix.IFF_VNET_HDR)
	switch {
	case errors.Is(err, unix.EBUSY):
		return nil, nil, fmt.Errorf("TUN link %s: %w: another process holds it, stop that agent first", name, err)
	case errors.Is(err, unix.EPERM):
		return nil, nil, fmt.Errorf("TUN link %s: %w: run as root or with CAP_NET_ADMIN", name, err)
	case err != nil:
		return nil, nil, fmt.Errorf("creating TUN link %s: %w", name, err)
	}
	t, _, err := tun.CreateUnmonitoredTUNFromFD(fd)
	if err != nil {
		unix.Close(fd)
		return nil, nil, fmt.Errorf("opening TUN link %s: %w", name, err)
	}
	hops := hop.NewDevice(t)
	return newQuietTUN(hops, mtu), hops, nil
}

// setUp limits what the link gives us at a time, and keeps IPv6 from giving it an address of its own and
// soliciting routers in the tunnel, as kernel WireGuard does. Without IPv6 the latter fails, and need not succeed.
func setUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetGSOMaxSegs(l, tunBatch)
	}
	if err != nil {
		return fmt.Errorf("setting up TUN link %s: %w", name, err)
	}
	const genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE
	_ = netlink.LinkSetIP6AddrGenMode(l, genModeNone)
	return nil
}

// quietTUN is a TUN device whose MTU and state we tell, instead of wireguard-go watching the link:
// its watchers open sockets in whatever network namespace their thread happens to be.
type quietTUN struct {
	tun.Device
	mtu    atomic.Int32
	events chan tun.Event
	closed atomic.Bool

	// handled is held from when packets were read until the next are asked for: while wireguard-go handles them.
	handled  sync.Mutex
	handling bool // of the reader, wireguard-go's only one
}

func newQuietTUN(t tun.Device, mtu int) *quietTUN {
	q := &quietTUN{Device: t, events: make(chan tun.Event, 1)}
	q.mtu.Store(int32(mtu))
	return q
}

func (t *quietTUN) Read(packets [][]byte, sizes []int, offset int) (int, error) {
	if t.handling {
		t.handling = false
		t.handled.Unlock()
	}
	n, err := t.Device.Read(packets, sizes, offset)
	if err == nil {
		t.handled.Lock()
		t.handling = true
	}
	return n, err
}

// BatchSize is the most packets that are read at a time.
func (t *quietTUN) BatchSize() int { return tunBatch }

func (t *quietTUN) MTU() (int, error)        { return int(t.mtu.Load()), nil }
func (t *quietTUN) Events() <-chan tun.Event { return t.events }

func (t *quietTUN) Close() error {
	if t.closed.CompareAndSwap(false, true) {
		close(t.events)
	}
	return t.Device.Close()
}

func (d *userspaceDevice) Driver() string        { return Userspace }
func (d *userspaceDevice) Done() <-chan struct{} { return d.dev.Wait() }

func (d *userspaceDevice) SetMTU(bytes int) {
	if int(d.tun.mtu.Swap(int32(bytes))) == bytes || d.gone() {
		return
	}
	select {
	case d.tun.events <- tun.EventMTUUpdate:
	default: // an update is pending and will read the new value
	}
}

// SetHops puts another table in use; packets on their way have the one or the other.
func (d *userspaceDevice) SetHops(h dataplane.Hops) []string {
	if !d.HasHops(h) {
		var t *hop.Table
		t, d.hopNotes = hop.NewTable(h)
		d.hop.Set(t)
		d.hops = h
	}
	return d.hopNotes
}

func (d *userspaceDevice) HasHops(h dataplane.Hops) bool { return d.hops.Equal(h) }
func (d *userspaceDevice) HopCounts() hop.Counts         { return d.hop.Counts() }

func (d *userspaceDevice) gone() bool {
	select {
	case <-d.dev.Wait():
		return true
	default:
		return d.tun.closed.Load()
	}
}

func (d *userspaceDevice) Read() (State, []dataplane.PeerStatus, error) { return d.read(true) }

// Status reads no state: the device is inside this process, and nobody else changes it.
func (d *userspaceDevice) Status() (*State, []dataplane.PeerStatus, error) {
	if d.count == nil {
		_, peers, err := d.read(false)
		return nil, peers, err
	}
	if d.gone() {
		return nil, nil, ErrGone
	}
	return nil, d.count.read(), nil
}

func (d *userspaceDevice) read(withState bool) (State, []dataplane.PeerStatus, error) {
	if d.gone() {
		return State{}, nil, ErrGone
	}
	d.text.Reset()
	if err := d.dev.IpcGetOperation(&d.text); err != nil {
		return State{}, nil, fmt.Errorf("reading WireGuard device %s: %w", d.name, err)
	}
	defer clear(d.text.Bytes()) // there are keys in it
	return decode(d.text.Bytes(), withState)
}

func (d *userspaceDevice) Write(batch []Op) error {
	if d.gone() {
		return ErrGone
	}
	port := 0
	for _, op := range batch {
		if op.Port != nil {
			port = *op.Port
		}
	}
	d.first.changes(batch)
	d.keepEndpoints(batch)
	err := d.dev.IpcSet(encode(batch))
	d.keepEndpoints(batch)
	if err == nil && !d.up {
		if err = d.dev.Up(); err == nil {
			d.up = true
		}
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return portInUse(port, syscall.EADDRINUSE)
	}
	if err != nil {
		return fmt.Errorf("configuring WireGuard device %s: %w", d.name, err)
	}
	d.first.changed(batch)
	return nil
}

// keepEndpoints switches roaming off for each peer that has an endpoint, when a batch sets that of one which is there
// already. wireguard-go looks only once, when the peer is added, and a peer that has no endpoint then would roam for
// ever: a last packet by its relay took it back there from the direct path. Called before and after the write, it
// leaves a moment to roam only to a peer that had no endpoint at all.
func (d *userspaceDevice) keepEndpoints(batch []Op) {
	for _, op := range batch {
		if p := op.Peer; p != nil && p.Action == Update && p.Endpoint.IsValid() {
			d.dev.DisableSomeRoamingForBrokenMobileSemantics()
			return
		}
	}
}

func (d *userspaceDevice) Close() error {
	d.first.close()
	d.dev.Close()
	return nil
}
