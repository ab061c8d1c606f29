package egressclient

import (
	"fmt"

	"github.com/mdlayher/netlink"

	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// Watch calls changed, from any goroutine, whenever something of ours in the namespace may have changed, until Close:
// then Apply is to be called again. Our own writes are not told apart: an Apply that finds nothing to do is cheap.
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
	changed() // what changed until now was not told
	return nil
}

// concerns says whether a notification may be about something of ours.
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

// watched is what of a spec says which notifications concern it.
type watched struct {
	uplink string
	host   bool
}
