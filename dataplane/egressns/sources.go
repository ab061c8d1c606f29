package egressns

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// change is the effect of new source addresses on slots that already send.
type change struct {
	first  []nftable.Op // part of the transaction that ends the slots' tickets
	rest   []nftable.Op // steps after it
	slots  []int        // slots whose source changes
	former []netip.Addr // former source addresses of their connections
}

// sourcesIn separates the steps that change slots' source addresses. Argument own are the namespace's local
// addresses, which need no lease.
func sourcesIn(ops []nftable.Op, have nftable.State, own ...netip.Addr) (c change) {
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
		source := o.Name == MapSource4 || o.Name == MapSource6
		back := o.Name == MapAddress4 || o.Name == MapAddress6
		for _, e := range o.Elements {
			old, was := have.Sets[o.Name].Elements[e.Key]
			switch {
			case was && source:
				slot(e.Key)
				address(old)
			case was && back:
				slot(old)
				address(e.Key)
			}
		}
		// The reverse map keeps the address until no connection has it, so that a start after a crash can finish.
		if source || back && o.Verb != nftable.DelElements {
			c.first = append(c.first, o)
		} else {
			c.rest = append(c.rest, o)
		}
	}
	return c
}

// formerIn returns the slots' source addresses that are in have and no longer in w. It is for a table that is made
// anew, whose steps do not show what changes.
func formerIn(w nftable.Table, have nftable.State, own ...netip.Addr) (former []netip.Addr) {
	add := func(key string) {
		if a, ok := netip.AddrFromSlice([]byte(key)); ok && !slices.Contains(own, a) && !slices.Contains(former, a) {
			former = append(former, a)
		}
	}
	for _, name := range []string{MapSource4, MapSource6} {
		for slot, a := range have.Sets[name].Elements {
			if w.Set(name).Elements[slot] != a {
				add(a)
			}
		}
	}
	for _, name := range []string{MapAddress4, MapAddress6} {
		for a, slot := range have.Sets[name].Elements {
			if w.Set(name).Elements[a] != slot {
				add(a)
			}
		}
	}
	return former
}

// change executes the first part of a change and ends the slots' leases, in one transaction. Tickets begun before
// grant nothing any more.
func (l *leases) change(c change) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var ops []nftable.Op
	for _, s := range c.slots {
		delete(l.begun, s)
		if _, ok := l.granted[s]; ok {
			ops = append(ops, elementOp(nftable.DelElements, MapGranted, nftable.Element{Key: slotKey(s)}))
		}
	}
	sent, err := l.t.write(append(ops, c.first...))
	if err != nil {
		return sent, errors.Join(fmt.Errorf("changing the source addresses of slots: %w", err), l.t.Renew(), l.reread())
	}
	for _, s := range c.slots {
		delete(l.granted, s)
	}
	return sent, nil
}

// elementOp is a step for one element.
func elementOp(v nftable.Verb, set string, e nftable.Element) nftable.Op {
	return nftable.Op{Verb: v, Name: set, Set: *nftable.Table{Sets: sets()}.Set(set), Elements: []nftable.Element{e}}
}

// forgetConnections ends connections with former addresses of slots, since the kernel would continue to translate to
// them, whatever the map says.
func forgetConnections(ns *os.File, former []netip.Addr) error {
	if len(former) == 0 {
		return nil
	}
	t, err := conntrack.Open(int(ns.Fd()))
	if err != nil {
		return err
	}
	defer t.Close()
	var gone []conntrack.Key
	err = t.Dump(func(f *conntrack.Flow) error {
		if slices.Contains(former, f.Reply.Dst) {
			gone = append(gone, conntrack.Key{Tuple: f.Original, Zone: f.Zone, ID: f.ID})
		}
		return nil
	})
	if err == nil {
		var refused map[int]unix.Errno
		refused, err = t.Delete(gone)
		for _, errno := range refused {
			if errno != unix.ENOENT { // else it has ended meanwhile
				err = errors.Join(err, errno)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("ending connections whose source addresses their slots no longer have: %w", err)
	}
	return nil
}
