package egressclient

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// A flow stays with the slot by which it began. Under dataplane.FlowMask, the connection's mark holds the slot of the
// tunnel that the flow's last packet left by. After the client's slot has changed, flows of the former slot are
// recalled: their packets get the connection's mark, and policy rules route these into the former slot's tunnel. An
// answer from the tunnel of another slot than its flow's is dropped.
const (
	chainNote     = "skein_note"     // postrouting: stores the slot in the connection
	chainRecall   = "skein_recall"   // output: packets that this namespace sends
	chainAnswers  = "skein_answers"  // prerouting: answers, and flows that this namespace forwards
	chainOuterIn  = "skein_outer_in" // prerouting, before conntrack: tunnels' own packets are not tracked
	chainOuterOut = "skein_outer_out"
)

// Way is a tunnel's device with the slot that it leads to.
type Way struct {
	Link   string
	Slot   int
	Spread []int // see dataplane.ClientTunnel
}

func (w Way) equal(o Way) bool {
	return w.Link == o.Link && w.Slot == o.Slot && slices.Equal(w.Spread, o.Spread)
}

func compareWays(a, b Way) int {
	return cmp.Or(cmp.Compare(a.Link, b.Link), cmp.Compare(a.Slot, b.Slot))
}

// flowChains are the chains for flows.
func (f Filter) flowChains() []nftable.Chain {
	mangle, raw := nftables.ChainPriorityMangle, nftables.ChainPriorityRaw
	notes := chain(chainNote, nftables.ChainTypeFilter, nftables.ChainHookPostrouting, mangle)
	recall := chain(chainRecall, nftables.ChainTypeRoute, nftables.ChainHookOutput, mangle)
	answers := chain(chainAnswers, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, mangle)
	in := chain(chainOuterIn, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, raw)
	out := chain(chainOuterOut, nftables.ChainTypeFilter, nftables.ChainHookOutput, raw)
	add := func(to *nftable.Chain, parts ...[]expr.Any) {
		to.Rules = append(to.Rules, nftable.Rule{Exprs: slices.Concat(parts...)})
	}
	for _, w := range f.Ways {
		m := dataplane.FlowMark(w.Slot)
		add(&notes, nftable.Link(expr.MetaKeyOIFNAME, w.Link), noted(nftable.Differ, m), setNote(m))
		for i, slot := range w.Spread { // each takes its share of what the earlier ones left
			add(&recall, nftable.Link(expr.MetaKeyOIFNAME, w.Link), noted(nftable.Equal, 0), oneIn(len(w.Spread)-i),
				setMark(dataplane.FlowMark(slot)), []expr.Any{nftable.Accept})
		}
		add(&answers, nftable.Link(expr.MetaKeyIIFNAME, w.Link), noted(nftable.Differ, 0), noted(nftable.Differ, m),
			nftable.CountedDrop())
	}
	for _, slot := range f.Flows {
		m := dataplane.FlowMark(slot)
		add(&recall, noted(nftable.Equal, m), setMark(m))
		if !f.Host { // packets that a host forwards do not use its own egresses
			add(&answers, noTunnel(), noted(nftable.Equal, m), setMark(m))
		}
	}
	if !f.Host { // not on a host, where rules of other programs may need these connections
		add(&in, outer(nftable.IPv4.Source(), setEnds4))
		add(&in, outer(nftable.IPv6.Source(), setEnds6))
		add(&out, outer(nftable.IPv4.Destination(), setEnds4))
		add(&out, outer(nftable.IPv6.Destination(), setEnds6))
	}
	return []nftable.Chain{notes, recall, answers, in, out}
}

// oneIn matches one packet in n at random.
func oneIn(n int) []expr.Any {
	const random = 1 // NFT_NG_RANDOM
	return []expr.Any{&expr.Numgen{Register: nftable.Reg, Modulus: uint32(n), Type: random},
		nftable.Equal(nftable.Native(0)...)}
}

// noTunnel matches packets that did not come out of a tunnel.
func noTunnel() []expr.Any {
	return []expr.Any{nftable.Meta(expr.MetaKeyIIFNAME), nftable.Differ([]byte("fou")...)}
}

var note = &expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg}

// noted compares the slot in the connection's mark. A packet without a connection does not match.
func noted(is func(...byte) expr.Any, mark uint32) []expr.Any {
	return []expr.Any{note, nftable.Masked(nftable.Native(dataplane.FlowMask), nil), is(nftable.Native(mark)...)}
}

// withFlow leaves the other bits of a mark unchanged.
func withFlow(mark uint32) expr.Any {
	return nftable.Masked(nftable.Native(^uint32(dataplane.FlowMask)), nftable.Native(mark))
}

func setNote(mark uint32) []expr.Any {
	return []expr.Any{note, withFlow(mark), &expr.Ct{Key: expr.CtKeyMARK, Register: nftable.Reg, SourceRegister: true}}
}

func setMark(mark uint32) []expr.Any {
	return []expr.Any{nftable.Meta(expr.MetaKeyMARK), withFlow(mark), nftable.SetMark()}
}

// outer matches a tunnel's own packet by one of its addresses, and exempts it from tracking.
func outer(address []expr.Any, set string) []expr.Any {
	return slices.Concat(toFoU(), address, []expr.Any{nftable.In(set), &expr.Notrack{}})
}

// Flows returns the slots with flows to the given destinations, in order, from the namespace's connection table.
func (c *Client) Flows(to []netip.Prefix) ([]int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	found := map[int]bool{}
	t, err := conntrack.Open(int(c.ns))
	if err == nil {
		defer t.Close()
		err = t.Dump(func(f *conntrack.Flow) error {
			slot, ok := dataplane.FlowSlot(f.Mark)
			leads := func(p netip.Prefix) bool { return p.Contains(f.Original.Dst) }
			if ok && !found[slot] && slices.ContainsFunc(to, leads) {
				found[slot] = true
			}
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("reading the connection table: %w", err)
	}
	return slices.Sorted(maps.Keys(found)), nil
}
