package nft

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
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

// setTranslations puts chains and sets there that translations need; none need none.
func (s *State) setTranslations(ts []dataplane.Translation, inside []netip.Prefix) {
	if len(ts) == 0 {
		return
	}
	s.Translations = ts
	four, six := ranges(inside)
	s.Sets[dataplane.SetInsideIPv4], s.Sets[dataplane.SetInsideIPv6] = Set{Kind: kindIPv4, Ranges: four},
		Set{Kind: kindIPv6, Ranges: six}
	links := []Link{Link(s.Link), Link(s.Numbers.HopLink), Link(s.Numbers.PlainLink)}
	slices.Sort(links)
	s.Sets[dataplane.SetTunnels] = Set{Kind: kindLinks, Links: links}
	s.Chains[dataplane.ChainTranslateIn] = Chain{Kind: kindTranslateIn, Rules: rulesOf(translateRules(ts, true))}
	s.Chains[dataplane.ChainTranslateOut] = Chain{Kind: kindTranslateOut, Rules: rulesOf(translateRules(ts, false))}
}

// translateRules are the rules of one of the two chains.
func translateRules(ts []dataplane.Translation, in bool) []rule {
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
func untranslated(in bool) []rule {
	key, name, end := expr.MetaKeyIIFNAME, "iifname", source
	word := "saddr"
	if !in {
		key, name, end, word = expr.MetaKeyOIFNAME, "oifname", destination, "daddr"
	}
	inside := func(f int, set string) rule {
		return rule{fmt.Sprintf("%s %s @%s accept", protocol(f), word, set),
			append(end(f), &expr.Lookup{SourceRegister: reg, SetName: set}, accept)}
	}
	return []rule{
		{fmt.Sprintf("%s != @%s accept", name, dataplane.SetTunnels), []expr.Any{&expr.Meta{Key: key, Register: reg},
			&expr.Lookup{SourceRegister: reg, SetName: dataplane.SetTunnels, Invert: true}, accept}},
		inside(4, dataplane.SetInsideIPv4), inside(6, dataplane.SetInsideIPv6),
	}
}

// translationRules give addresses of one prefix their places in another: first in the heads of packets that ICMP's
// errors are about, then in the packet's own.
func translationRules(from, to netip.Prefix, in bool) (out []rule) {
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
		out = append(out, rule{text,
			slices.Concat(family, []expr.Any{
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{icmp}},
				load(transport, 0, 1, reg),
				&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{types.mask}, Xor: []byte{0}},
				&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{types.is}},
			}, matches(transport, icmpHeader+about), []expr.Any{write})})
	}
	write := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: reg, Base: header, Offset: own, Len: size,
		CsumType: expr.CsumTypeInet, CsumOffset: ipSum, CsumFlags: unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR}
	if f == 6 {
		// IPv6 has no checksum of its own, but the library sends the flag with one only. The kernel changes it before
		// it writes the address (nft_payload_set_eval), so one within the address leaves nothing behind.
		write.CsumOffset = own
	}
	return append(out, rule{fmt.Sprintf("%s %s %s set %s accept", protocol(f), word, from, to),
		slices.Concat(family, matches(header, own), []expr.Any{write, accept})})
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

// translateText names a rule of translations, whatever prefixes it is for; "" if it is none.
func translateText(exprs []expr.Any, have string) string {
	var from, to netip.Prefix
	bits := 0
	for _, e := range exprs {
		switch e := e.(type) {
		case *expr.Bitwise:
			a, ok := netip.AddrFromSlice(e.Xor)
			if !ok {
				continue
			}
			if a.IsUnspecified() && !from.IsValid() {
				for bits = 0; bits < 8*len(e.Mask) && e.Mask[bits/8]&(0x80>>(bits%8)) != 0; bits++ {
				}
			} else {
				to = netip.PrefixFrom(a, bits)
			}
		case *expr.Cmp:
			if a, ok := netip.AddrFromSlice(e.Data); ok {
				from = netip.PrefixFrom(a, bits)
			}
		}
	}
	for _, in := range []bool{true, false} {
		rules := untranslated(in)
		if from.IsValid() && to.IsValid() && from.Addr().BitLen() == to.Addr().BitLen() {
			rules = append(rules, translationRules(from, to, in)...)
		}
		for _, r := range rules {
			if dump(r.exprs) == have {
				return r.text
			}
		}
	}
	return ""
}
