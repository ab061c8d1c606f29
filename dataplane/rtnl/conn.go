package rtnl

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// Conn is a pair of rtnetlink sockets in one network namespace.
type Conn struct {
	h *netlink.Handle
	// routes lists routes: it checks requests strictly, which the library's other requests do not pass. The kernel itself
	// then sends only the table asked for.
	routes *netlink.Handle
}

// Open opens sockets in the calling thread's network namespace.
func Open() (*Conn, error) { return OpenAt(netns.None()) }

// OpenAt opens sockets in a network namespace; netns.None is the calling thread's.
func OpenAt(ns netns.NsHandle) (*Conn, error) {
	c := &Conn{}
	for _, h := range []**netlink.Handle{&c.h, &c.routes} {
		var err error
		if ns.IsOpen() {
			*h, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
		} else {
			*h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		}
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("opening an rtnetlink socket: %w", err)
		}
	}
	_ = c.routes.SetStrictCheck(true) // kernels before Linux 4.20 have it not, and send all tables
	return c, nil
}

// Close closes the sockets.
func (c *Conn) Close() {
	for _, h := range []*netlink.Handle{c.h, c.routes} {
		if h != nil {
			h.Close()
		}
	}
}

// One counts the request that the caller makes with what it returns.
func (c *Conn) One() *netlink.Handle { return nlcount.One(c.h) }

// Link reads a link by its name; there is false, without an error, when there is none.
func (c *Conn) Link(name string) (l netlink.Link, there bool, err error) {
	l, err = c.One().LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("reading link %s: %w", name, err)
	}
	return l, true, nil
}

// Routes reads one table of an address family (unix.AF_INET or AF_INET6). A table that does not exist has none, nor has
// a family that the kernel lacks.
func (c *Conn) Routes(family, table int) ([]netlink.Route, error) {
	list, err := nlcount.One(c.routes).RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
	if errors.Is(err, unix.ENOENT) || Lacks(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s routes of table %d: %w", FamilyName(family), table, err)
	}
	return slices.DeleteFunc(list, func(k netlink.Route) bool { return k.Table != table }), nil
}

// Rules reads the policy rules of an address family that have a protocol. A family that the kernel lacks has none.
func (c *Conn) Rules(family int, protocol uint8) ([]netlink.Rule, error) {
	list, err := c.One().RuleListFiltered(family, &netlink.Rule{Protocol: protocol}, netlink.RT_FILTER_PROTOCOL)
	if Lacks(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading %s rules: %w", FamilyName(family), err)
	}
	return slices.DeleteFunc(list, func(k netlink.Rule) bool { return k.Protocol != protocol }), nil
}

// Lacks reports whether an error says that the kernel has not the address family asked for.
func Lacks(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP)
}

// Ignore is the error, or nil where it is one of those that do no harm.
func Ignore(err error, harmless ...error) error {
	if slices.ContainsFunc(harmless, func(h error) bool { return errors.Is(err, h) }) {
		return nil
	}
	return err
}
