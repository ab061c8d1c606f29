package tunprobe

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// openDevice makes the TUN device in a namespace, up, with routes for the sources.
func openDevice(path string, sources []netip.Addr) (*os.File, error) {
	ns, err := rtnl.Namespace(path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	f, err := openTUN(ns)
	if err != nil {
		return nil, fmt.Errorf("making the TUN device %s in the network namespace %s: %w", Link, path, err)
	}
	if err := addRoutes(ns, sources); err != nil {
		f.Close()
		return nil, fmt.Errorf("adding routes for replies to %s in the network namespace %s: %w", Link, path, err)
	}
	return f, nil
}

func openTUN(ns netns.NsHandle) (f *os.File, err error) {
	err = rtnl.Inside(ns, func() error {
		fd, err := rtnl.TUN(Link, 0)
		switch {
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%w: another process holds it; stop that process", err)
		case err != nil:
			return err
		}
		f = os.NewFile(uintptr(fd), "/dev/net/tun")
		return nil
	})
	return f, err
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
			r := &netlink.Route{LinkIndex: l.Attrs().Index, Table: table, Protocol: dataplane.RouteProtocol,
				Dst: rtnl.Host(a)}
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
