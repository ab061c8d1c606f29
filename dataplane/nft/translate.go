package nft

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// A translation (dataplane.Translation) is two chains. What comes by the tunnel for the other addresses gets the real
// ones before conntrack and the routing decision; what leaves by the tunnel from the real ones gets the others behind
// everything else. Neither keeps any state: an address has the same host part on both sides, conntrack and firewalls
// see the real ones alone, and flows go on that began before. Fragments that the kernel has not put together are
// translated one by one.
//
// The errors of ICMP have the head of the packet that they are about in them. Its addresses are translated as well,
// so that the sender of that packet knows it. In IPv4 the checksum of the head inside makes up for the change, and
// the error's own stays right; in IPv6 the error's is changed. The checksum of TCP or UDP inside is left: nobody
// looks at it.

// addTranslations puts chains and sets there that translations need; none need none.
func addTranslations(t *nftable.Table, s dataplane.Spec, n dataplane.Numbers) {
	if len(s.Translations) == 0 {
		return
	}
	t.Chains = append(t.Chains,
		nftable.Chain{Name: dataplane.ChainTranslateIn, Type: nftables.ChainTypeFilter, Hook: nftables.ChainHookPrerouting,
			Priority: ofTranslateIn, Rules: translateRules(s.Translations, true)},
		nftable.Chain{Name: dataplane.ChainTranslateOut, Type: nftables.ChainTypeFilter,
			Hook: nftables.ChainHookPostrouting, Priority: ofTranslateOut, Rules: translateRules(s.Translations, false)})
	t.Sets = slices.Concat(t.Sets, addresses(dataplane.SetInsideIPv4, dataplane.SetInsideIPv6, s.Inside),
		[]nftable.Set{links(dataplane.SetTunnels, s.Link.Name, n.HopLink, n.PlainLink)})
}

// translateRules are the rules of one of the two chains.
func translateRules(ts []dataplane.Translation, in bool) []nftable.Rule {
	out := untranslated(in)
	for _, t := range ts {
		from, to := t.Prefix, t.As
		if in {
			from, to = t.As, t.Prefix
		}
		out = append(out, translationRules(from, to, in)...)
	}
	return out
}

// untranslated let pass what comes by other links, or from nodes of the own site, or goes there.
func untranslated(in bool) []nftable.Rule {
	key, name, end := expr.MetaKeyIIFNAME, "iifname", source
	word := "saddr"
	if !in {
		key, name, end, word = expr.MetaKeyOIFNAME, "oifname", destination, "daddr"
	}
	inside := func(f int, set string) nftable.Rule {
		return rule(fmt.Sprintf("%s %s @%s accept", protocol(f), word, set),
			append(end(f), &expr.Lookup{SourceRegister: reg, SetName: set}, accept))
	}
	return []nftable.Rule{
		rule(fmt.Sprintf("%s != @%s accept", name, dataplane.SetTunnels), []expr.Any{&expr.Meta{Key: key, Register: reg},
			&expr.Lookup{SourceRegister: reg, SetName: dataplane.SetTunnels, Invert: true}, accept}),
		inside(4, dataplane.SetInsideIPv4), inside(6, dataplane.SetInsideIPv6),
	}
}

// translationRules give addresses of one prefix their places in another: first in the heads of packets that ICMP's
// errors are about, then in the packet's own.
func translationRules(from, to netip.Prefix, in bool) (out []nftable.Rule) {
	const ipSum, icmpHeader, icmpSum = 10, 8, 2
	f, icmp, offsets := 6, byte(unix.IPPROTO_ICMPV6), [2]uint32{8, 24} // of source and destination
	if from.Addr().Is4() {
		f, icmp, offsets = 4, unix.IPPROTO_ICMP, [2]uint32{ipSource, ipDestination}
	}
	// The packet's own: in, its destination. What an error is about went the other way.
	own, about, word, aboutWord := offsets[1], offsets[0], "daddr", "saddr"
	if !in {
		own, about, word, aboutWord = offsets[0], offsets[1], "saddr", "daddr"
	}
	size := uint32(len(from.Addr().AsSlice()))
	network := mask(from)
	host := bytes.Clone(network)
	for i := range host {
		host[i] = ^host[i]
	}
	matches := func(base expr.PayloadBase, offset uint32) []expr.Any {
		return []expr.Any{load(base, offset, size, reg),
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: size, Mask: network, Xor: make([]byte, size)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: from.Masked().Addr().AsSlice()},
			load(base, offset, size, reg),
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: size, Mask: host, Xor: to.Masked().Addr().AsSlice()},
		}
	}
	family := []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{map[int]byte{4: unix.NFPROTO_IPV4, 6: unix.NFPROTO_IPV6}[f]}}}
	for _, types := range icmpErrors(f) {
		write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg, Base: transport,
			Offset: icmpHeader + about, Len: size, CsumType: expr.CsumTypeInet, CsumOffset: icmpHeader + ipSum}
		if f == 6 {
			write.CsumOffset = icmpSum
		}
		text := fmt.Sprintf("icmp%s type & %#02x == %#02x inside %s %s set %s", []string{4: "", 6: "v6"}[f],
			types.mask, types.is, aboutWord, from, to)
		out = append(out, rule(text,
			slices.Concat(family, []expr.Any{
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{icmp}},
				load(transport, 0, 1, reg),
				&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{types.mask}, Xor: []byte{0}},
				&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{types.is}},
			}, matches(transport, icmpHeader+about), []expr.Any{write})))
	}
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg, Base: header, Offset: own, Len: size,
		CsumType: expr.CsumTypeInet, CsumOffset: ipSum, CsumFlags: unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR}
	if f == 6 {
		// IPv6 has no checksum of its own, but the library sends the flag with one only. The kernel changes it before
		// it writes the address (nft_payload_set_eval), so one within the address leaves nothing behind.
		write.CsumOffset = own
	}
	return append(out, rule(fmt.Sprintf("%s %s %s set %s accept", protocol(f), word, from, to),
		slices.Concat(family, matches(header, own), []expr.Any{write, accept})))
}

// icmpErrors are the types of messages that have a packet in them and go to its sender: those that have a value under
// a mask.
func icmpErrors(family int) []struct{ mask, is byte } {
	if family == 6 {
		return []struct{ mask, is byte }{{0x80, 0}} // RFC 4443: all below 128
	}
	// RFC 792: destination unreachable (3), time exceeded (11), parameter problem.
	return []struct{ mask, is byte }{{0xf7, 3}, {0xff, 12}}
}

// mask has the bits of a prefix's network set.
func mask(p netip.Prefix) []byte {
	out := make([]byte, len(p.Addr().AsSlice()))
	for i := range p.Bits() {
		out[i/8] |= 0x80 >> (i % 8)
	}
	return out
}
