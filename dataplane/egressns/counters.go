package egressns

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/fou"
)

// Counters are what a namespace has counted since its table was made, at the last start or before.
type Counters struct {
	Slots   map[int]SlotCounters
	Dropped Dropped
	Tunnels fou.Stats // since this process opened them
	// Conntrack is how many connections the namespace tracks, ConntrackMax how many it may.
	Conntrack, ConntrackMax uint32
}

// SlotCounters are a slot's: sent by its clients, and received for them. Bytes are of the packets as they are without tunnel.
type SlotCounters struct {
	SentPackets, SentBytes, ReceivedPackets, ReceivedBytes uint64
}

// Dropped are packets by what was wrong with them.
type Dropped struct {
	Strangers   uint64 // from no client, from a client's tunnel with another source inside, or an answer to nothing
	Invalid     uint64 // conntrack calls it invalid
	Lease       uint64 // its slot's lease is not ours, or has run out
	Destination uint64 // to where the egress does not lead
	Nested      uint64 // a tunnel inside the tunnel
}

// Read reads all counters.
func (n *NS) Read() (Counters, error) {
	fail := func(err error) (Counters, error) {
		return Counters{}, fmt.Errorf("counters of egress %s: %w", n.o.Egress, err)
	}
	out := Counters{Slots: map[int]SlotCounters{}}
	// A socket for once: that of Apply may be in use.
	c, err := nftables.New(nftables.WithNetNSFd(int(n.ns.Fd())))
	if err != nil {
		return fail(err)
	}
	t := &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
	objects, err := c.GetNamedObjects(t)
	if err != nil {
		return fail(err)
	}
	to := map[string]*uint64{countStrangers: &out.Dropped.Strangers, countInvalid: &out.Dropped.Invalid, countLease: &out.Dropped.Lease,
		countDestination: &out.Dropped.Destination, countNested: &out.Dropped.Nested}
	for _, o := range objects {
		x, ok := o.(*nftables.NamedObj)
		if !ok {
			continue
		}
		if k, ok := x.Obj.(*expr.Counter); ok && to[x.Name] != nil {
			*to[x.Name] = k.Packets
		}
	}
	for _, name := range []string{SetSent, SetReceived} {
		sh, _ := shapeOf(name)
		es, err := c.GetSetElements(sh.set(t))
		if err != nil {
			return fail(err)
		}
		for _, e := range es {
			slot, ok := toNumber(string(e.Key))
			if !ok || e.Counter == nil {
				continue
			}
			s := out.Slots[int(slot)]
			if name == SetSent {
				s.SentPackets, s.SentBytes = e.Counter.Packets, e.Counter.Bytes
			} else {
				s.ReceivedPackets, s.ReceivedBytes = e.Counter.Packets, e.Counter.Bytes
			}
			out.Slots[int(slot)] = s
		}
	}
	n.driving.Lock()
	out.Tunnels, err = n.driver.Stats()
	n.driving.Unlock()
	if err != nil {
		return fail(err)
	}
	if out.Conntrack, out.ConntrackMax, err = conntrack(int(n.ns.Fd())); err != nil {
		return fail(err)
	}
	return out, nil
}

// conntrack asks how many connections a namespace tracks, and how many it may.
func conntrack(ns int) (have, most uint32, err error) {
	const (
		subsystem, getStats     = 1, 5 // NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_GET_STATS
		attrEntries, attrMaxima = 1, 2 // CTA_STATS_GLOBAL_ENTRIES, CTA_STATS_GLOBAL_MAX_ENTRIES
	)
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: ns})
	if err != nil {
		return 0, 0, fmt.Errorf("opening the connection table's netlink socket: %w", err)
	}
	defer c.Close()
	ms, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: subsystem<<8 | getStats, Flags: netlink.Request},
		Data:   []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, 0},
	})
	if err != nil {
		return 0, 0, fmt.Errorf("reading the size of the connection table: %w", err)
	}
	for _, m := range ms {
		if len(m.Data) < 4 {
			continue
		}
		ad, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			continue
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			switch ad.Type() {
			case attrEntries:
				have = ad.Uint32()
			case attrMaxima:
				most = ad.Uint32()
			}
		}
	}
	return have, most, nil
}
