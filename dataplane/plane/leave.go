package plane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Leave removes what an agent has left under former numbers and does not use under its present ones, those of the
// options. Precondition: the data plane works under the present numbers, and podnet.Move has moved the pods, so that
// packets are routed throughout. Missing objects are no error.
func Leave(ctx context.Context, o Options, former dataplane.Numbers) error {
	o = o.filled()
	return o.aside(ctx, func() error { return leave(o, former.Filled()) })
}

func leave(o Options, former dataplane.Numbers) error {
	c, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer c.Close()
	l := leaving{c: c, former: former, now: o.Numbers, links: map[int]netlink.Link{}}
	links, err := c.One().LinkList()
	if err != nil {
		return fmt.Errorf("reading links: %w", err)
	}
	for _, link := range links {
		l.links[link.Attrs().Index] = link
	}
	// First the tables that mark packets, then the rules that send packets to the routing tables, then the routes.
	errs := []error{l.nftTables()}
	for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
		errs = append(errs, l.family(f))
	}
	return errors.Join(append(errs, l.ownLinks())...)
}

type leaving struct {
	c           *rtnl.Conn
	former, now dataplane.Numbers
	links       map[int]netlink.Link // by index
}

func (l leaving) nftTables() error {
	c, err := nlcount.NewNft()
	if err != nil {
		return nil // a host without nftables has no table
	}
	all, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Errorf("reading nftables' tables: %w", err)
	}
	var errs []error
	for _, t := range all {
		if !slices.Contains(l.former.NftTables(), t.Name) || slices.Contains(l.now.NftTables(), t.Name) {
			continue
		}
		c.DelTable(t)
		if err := c.Flush(); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("deleting nftables table inet %s: %w", t.Name, err))
		}
	}
	return errors.Join(errs...)
}

// family removes rules and routes of one address family.
func (l leaving) family(f int) error {
	rules, err := l.c.Rules(f, dataplane.RouteProtocol)
	if err != nil {
		return err
	}
	ours, others := map[int][]netlink.Route{}, false
	for _, table := range l.former.Tables() {
		if slices.Contains(l.now.Tables(), table) {
			continue
		}
		routes, err := l.c.Routes(f, table)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Protocol != dataplane.RouteProtocol {
				continue
			}
			if l.isOurs(r) {
				ours[table] = append(ours[table], r)
			} else if table == l.former.PodTable() {
				others = true // Coil's pods have the same rule, and need it
			}
		}
	}
	var errs []error
	for _, r := range rules {
		pods := r.Priority == l.former.PodRule() && r.Table == l.former.PodTable()
		if !l.former.OwnsRule(r.Priority, r.Table, unix.RT_TABLE_MAIN) ||
			l.now.OwnsRule(r.Priority, r.Table, unix.RT_TABLE_MAIN) || pods && others {
			continue
		}
		if err := rtnl.Ignore(l.c.One().RuleDel(&r), unix.ENOENT); err != nil {
			errs = append(errs, fmt.Errorf("deleting rule %s: %w", r, err))
		}
	}
	for _, routes := range ours {
		for _, r := range routes {
			if err := rtnl.Ignore(l.c.One().RouteDel(&r), unix.ESRCH); err != nil {
				errs = append(errs, fmt.Errorf("deleting route %s of table %d: %w", r, r.Table, err))
			}
		}
	}
	return errors.Join(errs...)
}

// isOurs distinguishes skein's routes from those that Coil has made in the tables of pods with the same protocol:
// Coil's lead to its own pods, whose links do not have skein's alias.
func (l leaving) isOurs(r netlink.Route) bool {
	if r.Table != l.former.PodTable() && r.Table != l.former.ExportTable() || r.Type == unix.RTN_UNREACHABLE ||
		r.Type == unix.RTN_THROW {
		return true
	}
	link, there := l.links[r.LinkIndex]
	if !there {
		return false
	}
	_, pod := podnet.ParseAlias(link.Attrs().Alias)
	name := link.Attrs().Name
	return pod || name == l.former.Link || name == l.now.Link
}

// ownLinks removes the tunnel's links; the link of plain peers ends with its process.
func (l leaving) ownLinks() error {
	var errs []error
	if name := l.former.Link; !slices.Contains(l.now.Links(), name) {
		_, err := wireguard.DeleteLink(name)
		errs = append(errs, err)
	}
	for _, link := range l.links {
		name := link.Attrs().Name
		if name != l.former.HopLink || slices.Contains(l.now.Links(), name) || link.Type() != "sit" {
			continue
		}
		if err := rtnl.Ignore(l.c.One().LinkDel(link), unix.ENODEV); err != nil {
			errs = append(errs, fmt.Errorf("deleting link %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
