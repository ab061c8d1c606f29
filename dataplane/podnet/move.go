package podnet

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Move adds the routes of this package's pods in one table to another, and updates the table in their links' aliases;
// 0 is the default table. The routes in the first table stay. Repeating a move is not an error.
func Move(from, to int) error {
	if tableOr(from) == tableOr(to) {
		return nil
	}
	c, err := dial(nil)
	if err != nil {
		return err
	}
	defer c.close()
	links, err := c.links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		a, ours := ParseAlias(l.alias)
		if !ours || !a.of(from) {
			continue
		}
		a.Table = tableOr(to)
		for _, addr := range []netip.Addr{a.IPv4, a.IPv6} {
			if !addr.IsValid() || addr.Is6() && !l.ipv6 {
				continue
			}
			_, err := c.do(newHostRoute(addr, l.index, a.Table))
			errs = append(errs, rtnl.Ignore(err, unix.EEXIST))
		}
		_, err := c.do(describe(l.name, a.Alias()))
		errs = append(errs, rtnl.Ignore(err, unix.ENODEV))
	}
	return errors.Join(errs...)
}
