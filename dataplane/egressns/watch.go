package egressns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nft"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Notification groups of rtnetlink, as RTMGRP bits.
const (
	ownGroups = 1<<(unix.RTNLGRP_LINK-1) |
		1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1) |
		1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1) |
		1<<(unix.RTNLGRP_IPV4_RULE-1) | 1<<(unix.RTNLGRP_IPV6_RULE-1)
	hostGroups = 1<<(unix.RTNLGRP_LINK-1) | 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1)
)

// watch receives the kernel's notifications of the namespace, and of the link's end on the host.
type watch struct {
	conns  []*netlink.Conn
	closed atomic.Bool // what receiving fails with then differs, and says nothing
	wg     sync.WaitGroup
}

func openWatch(n *NS) (*watch, error) {
	const buffer = 2 << 20 // bytes; what overflows is made good by reading everything
	w := &watch{}
	dial := func(family int, ns *os.File, groups uint32, group uint32) (*netlink.Conn, error) {
		c, err := netlink.Dial(family, &netlink.Config{NetNS: int(ns.Fd()), Groups: groups})
		if err != nil {
			return nil, fmt.Errorf("listening to the kernel's notifications: %w", err)
		}
		_ = c.SetReadBuffer(buffer)
		w.conns = append(w.conns, c)
		if group != 0 {
			if err := c.JoinGroup(group); err != nil {
				return nil, fmt.Errorf("listening to nftables' notifications: %w", err)
			}
		}
		return c, nil
	}
	rt, err := dial(unix.NETLINK_ROUTE, n.ns, ownGroups, 0)
	if err != nil {
		return w, errors.Join(err, w.close())
	}
	host, err := dial(unix.NETLINK_ROUTE, n.links.host, hostGroups, 0)
	if err != nil {
		return w, errors.Join(err, w.close())
	}
	nf, err := dial(unix.NETLINK_NETFILTER, n.ns, 0, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return w, errors.Join(err, w.close())
	}
	w.run(rt, n, n.links.concerned)
	w.run(host, n, n.links.endConcerned)
	w.run(nf, n, func(m netlink.Message) bool {
		if m.Header.PID == n.table.port.Load() || m.Header.PID == n.leases.t.port.Load() {
			return false
		}
		f, table, ok := nft.ForeignTable(m.Data)
		return ok && f == unix.NFPROTO_INET && table == tableName
	})
	return w, nil
}

func (w *watch) run(c *netlink.Conn, n *NS, concerns func(netlink.Message) bool) {
	w.wg.Go(func() {
		for {
			ms, err := c.Receive()
			switch {
			case errors.Is(err, unix.ENOBUFS): // some were lost
				n.changed()
				continue
			case err != nil && w.closed.Load():
				return
			case err != nil:
				n.log.Warn("no more notifications of an egress's network namespace: foreign changes are repaired late", "egress",
					n.o.Egress, "error", err)
				n.changed()
				return
			}
			nlcount.Heard(len(ms))
			for _, m := range ms {
				if concerns(m) {
					n.changed()
					break
				}
			}
		}
	})
}

func (w *watch) close() (err error) {
	w.closed.Store(true)
	for _, c := range w.conns {
		err = errors.Join(err, c.Close())
	}
	w.wg.Wait()
	return err
}

// expectation is what notifications are compared with. Those of our own changes are in accordance with it.
type expectation struct {
	mtu         int
	uplink, end int          // indices
	devices     map[int]bool // that routes lead to
	addrs       map[netip.Addr]bool
	clients     map[clientWay]bool
	slots       map[slotRule]bool
	complete    bool
}

// expect is told what is wanted from now on, before it is written.
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

// depend is told on which links all that depends.
func (l *links) depend(s *linkState) {
	devices := map[int]bool{}
	for _, i := range s.clients {
		devices[i] = true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expected.uplink, l.expected.end, l.expected.devices = s.uplink.Attrs().Index, s.end.Attrs().Index, devices
}

// concerned says that a notification is about something of ours inside, and against what is expected.
func (l *links) concerned(m netlink.Message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.expected
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		i := indexAt(m, unix.SizeofIfInfomsg)
		if m.Header.Type == unix.RTM_DELLINK {
			return i != 0 && (i == e.uplink || e.devices[i])
		}
		return i != 0 && i == e.uplink && !e.asWanted(m)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		i := indexAt(m, unix.SizeofIfAddrmsg)
		a := addressIn(m, unix.SizeofIfAddrmsg, unix.IFA_ADDRESS)
		if i == 0 || i != e.uplink || !a.IsValid() || a.Is6() && a.IsLinkLocalUnicast() {
			return false
		}
		return e.against(e.addrs[a], m.Header.Type == unix.RTM_NEWADDR)
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		switch table := tableOf(m); {
		case clientTable(table):
			a := addressIn(m, unix.SizeofRtMsg, unix.RTA_DST)
			return e.against(e.clients[clientWay{table, a}], m.Header.Type == unix.RTM_NEWROUTE)
		case table == unix.RT_TABLE_MAIN:
			return m.Header.Type == unix.RTM_DELROUTE // we delete none
		}
	case unix.RTM_DELRULE:
		table := tableOf(m)
		return table == dataplane.GatewayTable || len(m.Data) > 0 &&
			e.slots[slotRule{int(m.Data[0]), table - dataplane.GatewaySlotTable}]
	}
	return false
}

// against says that something came that is not wanted, or went that is.
func (e *expectation) against(wanted, came bool) bool {
	return wanted != came && (e.complete || wanted)
}

// asWanted says that a link is up and has the MTU.
func (e *expectation) asWanted(m netlink.Message) bool {
	mtu := attribute(m, unix.SizeofIfInfomsg, unix.IFLA_MTU)
	return binary.NativeEndian.Uint32(m.Data[8:])&unix.IFF_UP != 0 && len(mtu) == 4 &&
		int(binary.NativeEndian.Uint32(mtu)) == e.mtu
}

// endConcerned is the same for the host's end.
func (l *links) endConcerned(m netlink.Message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &l.expected
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		i := indexAt(m, unix.SizeofIfInfomsg)
		return i != 0 && i == e.end && (m.Header.Type == unix.RTM_DELLINK || !e.asWanted(m))
	case unix.RTM_DELADDR:
		i := indexAt(m, unix.SizeofIfAddrmsg)
		return i != 0 && i == e.end
	}
	return false
}

// indexAt reads the index of ifinfomsg and ifaddrmsg, which have it at the same place; 0 when the message is too short.
func indexAt(m netlink.Message, size int) int {
	if len(m.Data) < size {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
}

// attribute is the first of its type behind a header of this size; nil when there is none, or the bytes are no
// attributes.
func attribute(m netlink.Message, size int, kind uint16) (found []byte) {
	if len(m.Data) < size {
		return nil
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[size:])
	if err != nil {
		return nil
	}
	for ad.Next() {
		if ad.Type() == kind {
			return ad.Bytes()
		}
	}
	return nil
}

func addressIn(m netlink.Message, size int, kind uint16) netip.Addr {
	a, _ := netip.AddrFromSlice(attribute(m, size, kind))
	return a
}

// tableOf reads the table of a route or a rule, which have it at the same place; none of ours is above 255.
func tableOf(m netlink.Message) int {
	if len(m.Data) < unix.SizeofRtMsg {
		return 0
	}
	return int(m.Data[4])
}
