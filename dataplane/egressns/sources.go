package egressns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// change is what a new source address means for who sends already.
type change struct {
	first  []op         // they go into one transaction, with the end of the slots' tickets
	rest   []op         // and these after it
	slots  []int        // whose source is another now
	former []netip.Addr // what their connections leave with
}

// sourcesIn separates the steps that change what packets of a slot leave with. own are the namespace's local addresses,
// which are nobody's lease.
func sourcesIn(ops []op, have state, own ...netip.Addr) (c change) {
	slot := func(key string) {
		if n, ok := toSlot(key); ok && n != nobody && !slices.Contains(c.slots, n) {
			c.slots = append(c.slots, n)
		}
	}
	address := func(key string) {
		if a, ok := netip.AddrFromSlice([]byte(key)); ok && !slices.Contains(own, a) && !slices.Contains(c.former, a) {
			c.former = append(c.former, a)
		}
	}
	for _, o := range ops {
		old, was := have.sets[o.name].elements[o.key]
		switch {
		case o.name == MapSource4 || o.name == MapSource6:
			c.first = append(c.first, o)
			if was {
				slot(o.key)
				address(old)
			}
		case o.name == MapAddress4 || o.name == MapAddress6:
			if was {
				slot(old)
				address(o.key)
			}
			// it stays until no connection has the address any more: a start after a crash finishes that
			if o.verb == delElement {
				c.rest = append(c.rest, o)
			} else {
				c.first = append(c.first, o)
			}
		default:
			c.rest = append(c.rest, o)
		}
	}
	return c
}

// formerIn are the addresses that slots leave with in have and no more in w. It is for a table that is made anew, of
// which no step tells what changes.
func formerIn(w, have state, own ...netip.Addr) (former []netip.Addr) {
	add := func(key string) {
		if a, ok := netip.AddrFromSlice([]byte(key)); ok && !slices.Contains(own, a) && !slices.Contains(former, a) {
			former = append(former, a)
		}
	}
	for _, name := range []string{MapSource4, MapSource6} {
		for slot, a := range have.sets[name].elements {
			if w.sets[name].elements[slot] != a {
				add(a)
			}
		}
	}
	for _, name := range []string{MapAddress4, MapAddress6} {
		for a, slot := range have.sets[name].elements {
			if w.sets[name].elements[a] != slot {
				add(a)
			}
		}
	}
	return former
}

// change makes the first part of a change, and ends the leases of the slots, in one transaction. What was begun for
// them before grants nothing any more.
func (l *leases) change(c change) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ops []op
	for _, s := range c.slots {
		delete(l.begun, s)
		if _, ok := l.granted[s]; ok {
			ops = append(ops, op{verb: delElement, name: MapGranted, key: slotKey(s)})
		}
	}
	sent, err := l.t.write(append(ops, c.first...))
	if err != nil {
		return sent, errors.Join(fmt.Errorf("changing the source addresses of slots: %w", err), l.t.renew(), l.reread())
	}
	for _, s := range c.slots {
		delete(l.granted, s)
	}
	return sent, nil
}

// forgetConnections ends those that leave with addresses which their slots have no more. The kernel would go on
// translating to them, whatever the map says by now.
func forgetConnections(ns *os.File, former []netip.Addr) error {
	if len(former) == 0 {
		return nil
	}
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("opening conntrack's netlink socket: %w", err)
	}
	defer h.Close()
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		err := error(netlink.ErrDumpInterrupted)
		for try := 0; try < 10 && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
			_, err = nlcount.One(h).ConntrackDeleteFilters(netlink.ConntrackTable, family, translatedTo(former))
		}
		if err != nil {
			return fmt.Errorf("ending connections that leave with addresses their slots have no more: %w", err)
		}
	}
	return nil
}

// translatedTo matches connections whose answers come to one of the addresses.
type translatedTo []netip.Addr

// MatchConntrackFlow is netlink's interface.
func (t translatedTo) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	a, ok := netip.AddrFromSlice(f.Reverse.DstIP)
	return ok && slices.Contains(t, a.Unmap())
}

var _ netlink.CustomConntrackFilter = translatedTo(nil)
