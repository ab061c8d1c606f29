package fou

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// ErrNoKernelFoU says that this kernel cannot do FoU.
var ErrNoKernelFoU = errors.New("this kernel has no FoU tunnels")

// Options say where a driver runs, and which.
type Options struct {
	NetNS  string // path of the network namespace's file; "": the calling thread's
	Driver string // Auto, Kernel or Userspace; "" is Auto
	Log    *slog.Logger
}

// Open opens a driver. Auto is the kernel's where a trial with it succeeds, else the TUN driver. Nothing is changed
// yet. With Kernel, the error is ErrNoKernelFoU where the trial fails.
func Open(o Options) (Driver, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	ns, err := rtnl.Namespace(o.NetNS)
	if err != nil {
		return nil, err
	}
	var d Driver
	switch o.Driver {
	case "", Auto:
		if why := TryKernel(); why == nil {
			d, err = openKernel(ns)
		} else {
			o.Log.Debug("FoU runs over TUN devices", "because", why)
			d, err = openUserspace(ns, o.Log)
		}
	case Kernel:
		if err = TryKernel(); err == nil {
			d, err = openKernel(ns)
		}
	case Userspace:
		d, err = openUserspace(ns, o.Log)
	default:
		err = fmt.Errorf("FoU driver %q: allowed are %s, %s and %s", o.Driver, Auto, Kernel, Userspace)
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return d, nil
}

// kernelRuns is set once the trial has succeeded: a kernel does not unlearn it, and a trial costs milliseconds.
var kernelRuns atomic.Bool

// TryKernel makes listeners and tunnels with FoU in a network namespace made for it, which goes again. The error is
// ErrNoKernelFoU with the step that failed.
func TryKernel() error {
	if kernelRuns.Load() {
		return nil
	}
	err := loadFoU()
	if err == nil {
		result := make(chan error, 1)
		go func() { // the thread, and the namespace with it, ends with the goroutine
			runtime.LockOSThread()
			result <- tryKernel()
		}()
		err = <-result
	}
	if err != nil {
		return fmt.Errorf("%w: %w: load the modules fou, fou6, ipip and ip6_tunnel", ErrNoKernelFoU, err)
	}
	kernelRuns.Store(true)
	return nil
}

func tryKernel() error {
	ns, err := netns.New()
	if err != nil {
		return fmt.Errorf("making a network namespace to try it in: %w", err)
	}
	k, err := openKernel(ns)
	if err != nil {
		ns.Close()
		return err
	}
	defer k.Close()
	spec := Spec{IPv4: true, Tunnels: []Tunnel{{Local: trial4.Prev(), Remote: trial4, MTU: minMTU6}}, Any: true}
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err == nil {
		spec.IPv6 = true
		spec.Tunnels = append(spec.Tunnels, Tunnel{Local: trial6.Prev(), Remote: trial6, MTU: minMTU6})
	}
	_, err = k.Reconcile(spec)
	return err
}

// modprobed is whether this process has asked for the modules: asking again, for each namespace, would not help.
var modprobed sync.Once

// loadFoU loads the modules that no kernel loads by itself, if there is no FoU yet.
func loadFoU() error {
	c, err := dialFoU(0) // the family's number is the same in every namespace
	if err == nil {
		return c.Close()
	}
	modprobed.Do(func() {
		const patience = 10 * time.Second
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = exec.CommandContext(ctx, "modprobe", "-a", "ipip", "ip6_tunnel", "fou", "fou6").Run()
	})
	if c, err = dialFoU(0); err != nil {
		return err
	}
	return c.Close()
}

// readDevices reads our devices.
func readDevices(c *rtnl.Conn) ([]device, error) {
	links, err := c.One().LinkList()
	for tries := 0; errors.Is(err, netlink.ErrDumpInterrupted) && tries < 10; tries++ {
		links, err = c.One().LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("reading links: %w", err)
	}
	var out []device
	for _, l := range links {
		if ours(l.Attrs().Name) {
			out = append(out, fromLink(l))
		}
	}
	return out, nil
}

// remove deletes a device; one that is gone already is fine.
func remove(c *rtnl.Conn, d device) error {
	err := c.One().LinkDel(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.Name, Index: d.Index}})
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", d.Name, err)
	}
	return nil
}

// set gives a device its MTU and sets it up.
func set(c *rtnl.Conn, d device) error {
	l := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: d.Name, Index: d.Index}}
	if d.MTU != 0 {
		if err := c.One().LinkSetMTU(l, d.MTU); err != nil {
			return fmt.Errorf("setting the MTU of %s to %d bytes: %w", d.Name, d.MTU, err)
		}
	}
	if err := c.One().LinkSetUp(l); err != nil {
		return fmt.Errorf("setting %s up: %w", d.Name, err)
	}
	return nil
}
