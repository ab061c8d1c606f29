package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// records measures how fast a node's record reaches all others: a host gets or loses an address, its
// agent finds that out and publishes, and every other agent tells when it took the new record in.
func (f *field) records(ctx context.Context) []Figure {
	const limit = 500 * time.Millisecond
	var spread, whole sample
	rounds := f.opts.runs(12, 3)
	f.note("records: %d changes on each of %d nodes", rounds, len(f.names))
	for round := range rounds {
		for i, node := range f.names {
			addr := netip.AddrFrom4([4]byte{10, 99, byte(i), byte(1 + round/2)})
			s, w, err := f.recordChange(ctx, node, addr, round%2 == 0)
			if err != nil {
				return []Figure{notMeasured("a record change seen by all 7 nodes", "≤ 500 ms at p99", err)}
			}
			spread.add(s, fmt.Sprintf("change %d of %s", round+1, node))
			whole.add(w, node)
		}
	}
	out := spread.figure("a record change seen by all 7 nodes", 99, limit,
		"an address comes to or leaves a host; from the record's own time to when the last of the 6 others took it in, as "+
			"their APIs tell")
	return []Figure{out, {Name: "  from the address's change itself", Got: whole.text(99), Load: loadAverage(),
		How: "the same with the agent's own part before: notice, wait for more changes, ask STUN, publish"}}
}

// recordChange gives a host an address or takes it, and returns how long its record was under way, and
// how long it all took.
func (f *field) recordChange(ctx context.Context, node string, addr netip.Addr,
	add bool) (spread, whole time.Duration, err error) {
	start := time.Now()
	if err := f.setAddress(node, addr, add); err != nil {
		return 0, 0, err
	}
	has := func(r *skeinv1.Record) bool {
		return slices.ContainsFunc(r.GetCandidates(), func(c *skeinv1.Candidate) bool {
			ap, err := netip.ParseAddrPort(c.GetAddress())
			return err == nil && ap.Addr() == addr
		})
	}
	var mu sync.Mutex
	var first, last time.Time
	errs := make([]error, len(f.names))
	var wg sync.WaitGroup
	for i, at := range f.names {
		wg.Go(func() {
			errs[i] = f.until(ctx, 20*time.Second, func() error {
				all, err := f.recordsOf(ctx, at)
				if err != nil {
					return err
				}
				h, ok := all[node]
				if !ok || has(h.record) != add {
					return fmt.Errorf("%s does not have the new record of %s", at, node)
				}
				mu.Lock()
				defer mu.Unlock()
				if written := time.Unix(0, h.record.GetTime()); first.IsZero() || written.Before(first) {
					first = written
				}
				if at != node && h.at.After(last) {
					last = h.at
				}
				return nil
			})
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return 0, 0, err
		}
	}
	return max(0, last.Sub(first)), last.Sub(start), nil
}

func (f *field) setAddress(node string, addr netip.Addr, add bool) error {
	info, err := f.lab.Node(node)
	if err != nil {
		return err
	}
	return fabric.In(info.Namespace, func() error {
		link, err := netlink.LinkByName(fabric.HostLink)
		if err != nil {
			return fmt.Errorf("node %s: %w", node, err)
		}
		a := &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}}
		if add {
			return netlink.AddrAdd(link, a)
		}
		return netlink.AddrDel(link, a)
	})
}
