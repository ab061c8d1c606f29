package egressns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// Counters are a namespace's counts since its table was made, which an earlier run may have done.
type Counters struct {
	Slots   map[int]SlotCounters
	Dropped Dropped
	Tunnels fou.Stats // since this process opened them
	// Conntrack is the number of tracked connections, ConntrackMax the limit.
	Conntrack, ConntrackMax uint32
}

// SlotCounters count a slot's packets: sent by its clients, and received for them. Bytes are those of the packets
// inside the tunnel.
type SlotCounters struct {
	SentPackets, SentBytes, ReceivedPackets, ReceivedBytes uint64
}

// Dropped counts dropped packets by reason.
type Dropped struct {
	Strangers   uint64 // from no client, with another source than the tunnel's client, or an answer without a connection
	Invalid     uint64 // conntrack calls it invalid
	Lease       uint64 // its slot has no lease here, or the lease has ended
	Destination uint64 // to a destination outside the egress
	Nested      uint64 // a tunnel inside the tunnel
}

// Read reads all counters.
func (n *NS) Read() (Counters, error) {
	fail := func(err error) (Counters, error) {
		return Counters{}, fmt.Errorf("counters of egress %s: %w", n.o.Egress, err)
	}
	out := Counters{Slots: map[int]SlotCounters{}}
	// A socket of its own, since that of Apply may be in use.
	c, err := nlcount.NewNft(nftables.WithNetNSFd(int(n.ns.Fd())))
	if err != nil {
		return fail(err)
	}
	t := &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}
	objects, err := c.GetNamedObjects(t)
	if err != nil {
		return fail(err)
	}
	to := map[string]*uint64{countStrangers: &out.Dropped.Strangers, countInvalid: &out.Dropped.Invalid,
		countLease:       &out.Dropped.Lease,
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
		es, err := c.GetSetElements(setOf(name))
		if err != nil {
			return fail(err)
		}
		for _, e := range es {
			slot, ok := toSlot(string(e.Key))
			if !ok || e.Counter == nil {
				continue
			}
			s := out.Slots[slot]
			if name == SetSent {
				s.SentPackets, s.SentBytes = e.Counter.Packets, e.Counter.Bytes
			} else {
				s.ReceivedPackets, s.ReceivedBytes = e.Counter.Packets, e.Counter.Bytes
			}
			out.Slots[slot] = s
		}
	}
	n.driving.Lock()
	out.Tunnels, err = n.driver.Stats()
	n.driving.Unlock()
	if err != nil {
		return fail(err)
	}
	if out.Conntrack, out.ConntrackMax, err = tracked(n.ns); err != nil {
		return fail(err)
	}
	return out, nil
}

// tracked reads how many connections a namespace tracks, and the limit. Both are 0 while conntrack is not loaded.
func tracked(ns *os.File) (have, most uint32, err error) {
	err = inside(ns, func() error {
		for name, to := range map[string]*uint32{"count": &have, "max": &most} {
			b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_" + name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			var n uint64
			if err == nil {
				n, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
			}
			if err != nil {
				return fmt.Errorf("reading the size of the connection table: %w", err)
			}
			*to = uint32(n)
		}
		return nil
	})
	return have, most, err
}

// Flows returns the number of flows by slot, from the namespace's connection table. Ended TCP connections that are
// only remembered do not count.
func (n *NS) Flows() (map[int]int, error) {
	const timeWait, closed = 7, 8 // of linux/netfilter/nf_conntrack_tcp.h
	out := map[int]int{}
	t, err := conntrack.Open(int(n.ns.Fd()))
	if err == nil {
		defer t.Close()
		err = t.Dump(func(f *conntrack.Flow) error {
			ended := f.Original.Proto == unix.IPPROTO_TCP && (f.State == timeWait || f.State == closed)
			if slot, ok := toSlot(number(f.Mark)); ok && !ended {
				out[slot]++
			}
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("reading the connection table of egress %s: %w", n.o.Egress, err)
	}
	return out, nil
}
