package plainwg

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// setUpLink brings the link up and makes the kernel forward what comes by it.
func setUpLink(name string, mtu int) error {
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetMTU(l, mtu)
	}
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("setting up link %s: %w", name, err)
	}
	// WireGuard has checked what comes; a peer that comes here before others know is not to be dropped.
	err = errors.Join(rtnl.WriteSetting(unix.AF_INET, name, "forwarding", 1),
		rtnl.WriteSetting(unix.AF_INET, name, "rp_filter", 0))
	if err != nil {
		return fmt.Errorf("%w: the agent needs a writable /proc/sys to carry plain peers", err)
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		return nil // a host without IPv6
	}
	return podnet.ForwardIPv6(name)
}

// routes leads these prefixes, and no others, to the link: in the main table, so that on a carrier that does not have
// the peer's session the mark that leads into the tunnel comes first.
func (c *Carrier) routes(want []netip.Prefix) error {
	l, err := netlink.LinkByName(c.cfg.Link)
	if err != nil {
		return fmt.Errorf("link %s: %w", c.cfg.Link, err)
	}
	have, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{LinkIndex: l.Attrs().Index,
		Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
	if err != nil {
		return fmt.Errorf("reading routes of %s: %w", c.cfg.Link, err)
	}
	var errs []error
	there := map[netip.Prefix]bool{}
	for _, r := range have {
		if r.Dst == nil || r.Protocol != dataplane.RouteProtocol {
			continue
		}
		p := rtnl.Prefix(r.Dst)
		if there[p] = slices.Contains(want, p); !there[p] {
			if err := rtnl.Ignore(netlink.RouteDel(&r), unix.ESRCH); err != nil {
				errs = append(errs, fmt.Errorf("removing the route %s dev %s: %w", p, c.cfg.Link, err))
			}
		}
	}
	for _, p := range want {
		if there[p] {
			continue
		}
		r := &netlink.Route{LinkIndex: l.Attrs().Index, Protocol: dataplane.RouteProtocol, Scope: netlink.SCOPE_LINK,
			Dst: rtnl.Net(p)}
		for _, s := range c.cfg.Source {
			if s.Is4() == p.Addr().Is4() {
				r.Src = s.AsSlice()
			}
		}
		if err := netlink.RouteReplace(r); err != nil {
			if p.Addr().Is6() && errors.Is(err, unix.EPERM) { // IPv6 is turned off on the link
				continue
			}
			errs = append(errs, fmt.Errorf("route %s dev %s: %w", p, c.cfg.Link, err))
		}
	}
	return errors.Join(errs...)
}
