package egressclient

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// A flow stays with the slot that it began by. The connection table notes the slot of the tunnel that a flow's last
// packet left by, under dataplane.FlowMask of the connection's mark. When the client's slot becomes another, flows of
// the former are recalled: their packets get the note as their own mark, and policy rules lead them into the former
// slot's tunnel. An answer that comes out of another slot's tunnel than its flow's is dropped.
const (
	chainNote     = "skein_note"     // postrouting: notes the slot
	chainRecall   = "skein_recall"   // output: of what this namespace sends
	chainAnswers  = "skein_answers"  // prerouting: answers, and flows that this namespace passes on
	chainOuterIn  = "skein_outer_in" // prerouting, before conntrack: tunnels' own packets need no entry
	chainOuterOut = "skein_outer_out"

	reg = 1 // the register that rules work in
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

// flowChains are the chains about flows.
func (f Filter) flowChains() []nftable.Chain {
	mangle, raw := nftables.ChainPriorityMangle, nftables.ChainPriorityRaw
	note := chain(chainNote, nftables.ChainTypeFilter, nftables.ChainHookPostrouting, mangle)
	recall := chain(chainRecall, nftables.ChainTypeRoute, nftables.ChainHookOutput, mangle)
	answers := chain(chainAnswers, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, mangle)
	in := chain(chainOuterIn, nftables.ChainTypeFilter, nftables.ChainHookPrerouting, raw)
	out := chain(chainOuterOut, nftables.ChainTypeFilter, nftables.ChainHookOutput, raw)
	add := func(to *nftable.Chain, parts ...[]expr.Any) {
		to.Rules = append(to.Rules, nftable.Rule{Exprs: slices.Concat(parts...)})
	}
	for _, w := range f.Ways {
		m := dataplane.FlowMark(w.Slot)
		add(&note, device(expr.MetaKeyOIFNAME, w.Link), noted(expr.CmpOpNeq, m), setNote(m))
		for i, slot := range w.Spread { // each takes its part of what those before it left
			add(&recall, device(expr.MetaKeyOIFNAME, w.Link), noted(expr.CmpOpEq, 0), oneIn(len(w.Spread)-i),
				setMark(dataplane.FlowMark(slot)), []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}})
		}
		add(&answers, device(expr.MetaKeyIIFNAME, w.Link), noted(expr.CmpOpNeq, 0), noted(expr.CmpOpNeq, m),
			[]expr.Any{&expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop}})
	}
	for _, slot := range f.Flows {
		m := dataplane.FlowMark(slot)
		add(&recall, noted(expr.CmpOpEq, m), setMark(m))
		if !f.Host { // what a host passes on is not led by its own egresses
			add(&answers, noTunnel(), noted(expr.CmpOpEq, m), setMark(m))
		}
	}
	if !f.Host { // a host's may be looked at by others' rules
		add(&in, outer(unix.NFPROTO_IPV4, 12, 4, setEnds4))
		add(&in, outer(unix.NFPROTO_IPV6, 8, 16, setEnds6))
		add(&out, outer(unix.NFPROTO_IPV4, 16, 4, setEnds4))
		add(&out, outer(unix.NFPROTO_IPV6, 24, 16, setEnds6))
	}
	return []nftable.Chain{note, recall, answers, in, out}
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

func device(key expr.MetaKey, name string) []expr.Any {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return []expr.Any{&expr.Meta{Key: key, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: b}}
}

// oneIn matches one packet in n, by chance.
func oneIn(n int) []expr.Any {
	const random = 1 // NFT_NG_RANDOM
	return []expr.Any{&expr.Numgen{Register: reg, Modulus: uint32(n), Type: random},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: native(0)}}
}

// noTunnel matches what did not come out of a tunnel.
func noTunnel() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg,
		Data: []byte("fou")}}
}

// noted compares what a packet's connection has noted. A packet without a connection does not match.
func noted(op expr.CmpOp, mark uint32) []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, masked(dataplane.FlowMask, 0),
		&expr.Cmp{Op: op, Register: reg, Data: native(mark)}}
}

func masked(mask, xor uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: native(mask), Xor: native(xor)}
}

const otherBits = ^uint32(dataplane.FlowMask)

func setNote(mark uint32) []expr.Any {
	return []expr.Any{&expr.Ct{Key: expr.CtKeyMARK, Register: reg}, masked(otherBits, mark),
		&expr.Ct{Key: expr.CtKeyMARK, Register: reg, SourceRegister: true}}
}

func setMark(mark uint32) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyMARK, Register: reg}, masked(otherBits, mark),
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg, SourceRegister: true}}
}

// outer matches a tunnel's own packet by an address at an offset of its header, and has no connection made of it.
func outer(proto byte, offset, length uint32, set string) []expr.Any {
	return slices.Concat(toFoU(), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: reg, SetName: set},
		&expr.Notrack{},
	})
}

// Flows are the slots that flows to some destinations go by, in order, from the namespace's connection table.
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
			if ok && !found[slot] && slices.ContainsFunc(to, func(p netip.Prefix) bool { return p.Contains(f.Original.Dst) }) {
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
