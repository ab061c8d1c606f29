package egressclient

import (
	"fmt"

	"github.com/mdlayher/netlink"

	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Watch calls changed, from any goroutine, whenever this package's objects may have changed, until Close; the caller
// should then call Apply. Its own writes are reported, too: an Apply without changes is cheap.
func (c *Client) Watch(changed func()) error {
	c.listener.Log = c.opts.Log
	groups := uint32(rtnl.Links | rtnl.Addresses | rtnl.Routes | rtnl.Rules)
	err := c.listener.Routing(int(c.ns), groups, rtnl.When(c.concerns, changed))
	if err == nil {
		err = c.listener.Tables(int(c.ns), rtnl.When(func(m netlink.Message) bool {
			return nftable.Concerns(m, c.filter.table)
		}, changed))
	}
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", c.opts.NetNS, err)
	}
	changed() // for changes before the subscription
	return nil
}

// concerns reports whether a notification may concern this package's objects.
func (c *Client) concerns(m netlink.Message) bool {
	n := c.opts.Numbers
	switch {
	case rtnl.IsLink(m):
		name := rtnl.LinkName(m)
		return name == c.watched.Load().uplink || tunnelName(name)
	case rtnl.IsAddress(m):
		return c.watched.Load().host
	case rtnl.IsRoute(m):
		table := rtnl.Table(m)
		return table == n.ClientNarrowTable() || table == n.ClientWideTable() || flowTable(table)
	case rtnl.IsRule(m):
		p := rtnl.Priority(m)
		return p >= n.FirstRule && p <= n.LastRule()
	}
	return false
}

// watched is the part of a spec that decides which notifications concern it.
type watched struct {
	uplink string
	host   bool
}
