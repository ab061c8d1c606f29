package egressns

import (
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

// listen compares the kernel's notifications about the namespace and the link's host end with the expectation.
func (n *NS) listen() error {
	n.listener.Log = n.log.With("egress", n.o.Egress)
	own, host := int(n.ns.Fd()), int(n.links.host.Fd())
	err := n.listener.Routing(own, rtnl.Links|rtnl.Addresses|rtnl.Routes|rtnl.Rules,
		rtnl.When(n.links.concerned, n.changed))
	if err == nil {
		err = n.listener.Routing(host, rtnl.Links|rtnl.Addresses, rtnl.When(n.links.endConcerned, n.changed))
	}
	if err == nil {
		err = n.listener.Tables(own, rtnl.When(func(m netlink.Message) bool {
			return nftable.Concerns(m, tableName, n.table.PortID(), n.leases.t.PortID())
		}, n.changed))
	}
	return err
}

// expectation is the wanted state for comparison with notifications. This process's own changes conform to it.
type expectation struct {
	mtu         int
	uplink, end int          // indices
	devices     map[int]bool // devices of the clients' routes
	addrs       map[netip.Addr]bool
	clients     map[clientWay]bool
	slots       map[slotRule]bool
	complete    bool
}

// expect sets the expectation before the plan is written.
func (l *links) expect(p plan) {
	e := expectation{mtu: p.mtu, addrs: map[netip.Addr]bool{}, clients: map[clientWay]bool{}, slots: p.slotRules(),
		complete: p.complete}
	for _, a := range p.addresses() {
		e.addrs[a] = true
	}
	for _, c := range p.clients {
		e.clients[clientWay{c.table(), c.addr}] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e.uplink, e.end, e.devices = l.expected.uplink, l.expected.end, l.expected.devices
	l.expected = e
}

// depend sets the links whose removal matters.
func (l *links) depend(s *linkState) {
	devices := map[int]bool{}
	for _, i := range s.clients {
		devices[i] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expected.uplink, l.expected.end, l.expected.devices = s.uplink.Attrs().Index, s.end.Attrs().Index, devices
}

// concerned reports whether a notification inside the namespace contradicts the expectation.
func (l *links) concerned(m netlink.Message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.expected
	switch i := rtnl.Index(m); {
	case rtnl.IsLink(m):
		if m.Header.Type == unix.RTM_DELLINK {
			return i != 0 && (i == e.uplink || e.devices[i])
		}
		return i != 0 && i == e.uplink && !e.asWanted(m)
	case rtnl.IsAddress(m):
		a := rtnl.Address(m, unix.IFA_ADDRESS)
		if i == 0 || i != e.uplink || !a.IsValid() || a.Is6() && a.IsLinkLocalUnicast() {
			return false
		}
		return e.against(e.addrs[a], m.Header.Type == unix.RTM_NEWADDR)
	case rtnl.IsRoute(m):
		switch table := rtnl.Table(m); {
		case clientTable(table):
			a := rtnl.Address(m, unix.RTA_DST)
			return e.against(e.clients[clientWay{table, a}], m.Header.Type == unix.RTM_NEWROUTE)
		case table == unix.RT_TABLE_MAIN:
			return m.Header.Type == unix.RTM_DELROUTE // we delete none
		}
	case m.Header.Type == unix.RTM_DELRULE:
		table := rtnl.Table(m)
		return table == dataplane.GatewayTable || len(m.Data) > 0 &&
			e.slots[slotRule{int(m.Data[0]), table - dataplane.GatewaySlotTable}]
	}
	return false
}

// against reports whether something unwanted appeared, or something wanted disappeared.
func (e *expectation) against(wanted, came bool) bool {
	return wanted != came && (e.complete || wanted)
}

// asWanted reports whether a link is up and has the wanted MTU.
func (e *expectation) asWanted(m netlink.Message) bool {
	flags, _ := rtnl.LinkFlags(m)
	mtu, ok := rtnl.Number(m, unix.IFLA_MTU)
	return flags&unix.IFF_UP != 0 && ok && mtu == e.mtu
}

// endConcerned is the same for the host's end.
func (l *links) endConcerned(m netlink.Message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.expected
	if i := rtnl.Index(m); i == 0 || i != e.end {
		return false
	}
	switch m.Header.Type {
	case unix.RTM_NEWLINK:
		return !e.asWanted(m)
	case unix.RTM_DELLINK, unix.RTM_DELADDR:
		return true
	}
	return false
}
