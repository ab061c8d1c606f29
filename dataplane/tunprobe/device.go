package tunprobe

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// openDevice makes the TUN device in a namespace, up, with routes for the sources.
func openDevice(path string, sources []netip.Addr) (*os.File, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, fmt.Errorf("opening the network namespace %s: %w", path, err)
	}
	defer ns.Close()
	f, err := openTUN(ns)
	if err != nil {
		return nil, fmt.Errorf("making the TUN device %s in the network namespace %s: %w", Link, path, err)
	}
	if err := addRoutes(ns, sources); err != nil {
		f.Close()
		return nil, fmt.Errorf("leading answers to %s in the network namespace %s: %w", Link, path, err)
	}
	return f, nil
}

func openTUN(ns netns.NsHandle) (*os.File, error) {
	type result struct {
		fd  int
		err error
	}
	done := make(chan result, 1)
	go func() { // the thread is not unlocked: it ends with the goroutine
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- result{err: err}
			return
		}
		fd, err := tun()
		done <- result{fd, err}
	}()
	r := <-done
	if r.err != nil {
		return nil, r.err
	}
	return os.NewFile(uintptr(r.fd), "/dev/net/tun"), nil
}

func tun() (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	req, err := unix.NewIfreq(Link)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		unix.Close(fd)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: another process probes here", err)
		}
		return 0, err
	}
	return fd, nil
}

func addRoutes(ns netns.NsHandle, sources []netip.Addr) error {
	c, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer c.Close()
	l, err := c.One().LinkByName(Link)
	if err != nil {
		return err
	}
	if err := c.One().LinkSetUp(l); err != nil {
		return err
	}
	for _, a := range sources {
		for _, table := range []int{unix.RT_TABLE_MAIN, dataplane.GatewayTable} {
			r := &netlink.Route{LinkIndex: l.Attrs().Index, Table: table, Protocol: routeProtocol, Dst: rtnl.Host(a)}
			if a.Is4() {
				r.Scope = netlink.SCOPE_LINK
			}
			if err := c.One().RouteReplace(r); err != nil {
				return fmt.Errorf("route to %s in table %d: %w", a, table, err)
			}
		}
	}
	return nil
}
