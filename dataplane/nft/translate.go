package nft

import (
	"bytes"
	"fmt"
	"net"
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
	key, name, end, word := expr.MetaKeyIIFNAME, "iifname", nftable.IP.Source, "saddr"
	if !in {
		key, name, end, word = expr.MetaKeyOIFNAME, "oifname", nftable.IP.Destination, "daddr"
	}
	inside := func(f nftable.IP, set string) nftable.Rule {
		return rule(fmt.Sprintf("%s %s @%s accept", f.Word, word, set), append(end(f), nftable.In(set), nftable.Accept))
	}
	return []nftable.Rule{
		rule(fmt.Sprintf("%s != @%s accept", name, dataplane.SetTunnels),
			[]expr.Any{nftable.Meta(key), nftable.NotIn(dataplane.SetTunnels), nftable.Accept}),
		inside(nftable.IPv4, dataplane.SetInsideIPv4), inside(nftable.IPv6, dataplane.SetInsideIPv6),
	}
}

// translationRules give addresses of one prefix their places in another: first in the heads of packets that ICMP's
// errors are about, then in the packet's own.
func translationRules(from, to netip.Prefix, in bool) (out []nftable.Rule) {
	const ipSum, icmpHeader, icmpSum = 10, 8, 2
	f, v6 := nftable.IPv4, ""
	if from.Addr().Is6() {
		f, v6 = nftable.IPv6, "v6"
	}
	// The packet's own: in, its destination. What an error is about went the other way.
	own, about, word, aboutWord := f.Dst, f.Src, "daddr", "saddr"
	if !in {
		own, about, word, aboutWord = f.Src, f.Dst, "saddr", "daddr"
	}
	network := net.CIDRMask(from.Bits(), from.Addr().BitLen())
	host := bytes.Clone(network)
	for i := range host {
		host[i] = ^host[i]
	}
	matches := func(base expr.PayloadBase, offset uint32) []expr.Any {
		load := nftable.Load(base, offset, f.Len, nftable.Reg)
		return []expr.Any{load, nftable.Masked(network, nil), nftable.Equal(from.Masked().Addr().AsSlice()...),
			load, nftable.Masked(host, to.Masked().Addr().AsSlice())}
	}
	write := func(base expr.PayloadBase, offset, sum, flags uint32) expr.Any {
		return &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: nftable.Reg, Base: base, Offset: offset,
			Len: f.Len, CsumType: expr.CsumTypeInet, CsumOffset: sum, CsumFlags: flags}
	}
	// IPv6 has no checksum of its own, but the library sends the flag with one only. The kernel changes it before it
	// writes the address (nft_payload_set_eval), so one within the address leaves nothing behind.
	sum, aboutSum := own, uint32(icmpSum)
	if v6 == "" {
		sum, aboutSum = ipSum, icmpHeader+ipSum
	}
	for _, types := range icmpErrors(f) {
		text := fmt.Sprintf("icmp%s type & %#02x == %#02x inside %s %s set %s", v6, types.mask, types.is, aboutWord, from,
			to)
		out = append(out, rule(text, slices.Concat(f.Only(), nftable.L4(f.ICMP), []expr.Any{nftable.LoadL4(0, 1),
			nftable.Masked([]byte{types.mask}, nil), nftable.Equal(types.is)}, matches(transport, icmpHeader+about),
			[]expr.Any{write(transport, icmpHeader+about, aboutSum, 0)})))
	}
	return append(out, rule(fmt.Sprintf("%s %s %s set %s accept", f.Word, word, from, to),
		slices.Concat(f.Only(), matches(header, own),
			[]expr.Any{write(header, own, sum, unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR), nftable.Accept})))
}

// icmpErrors are the types of messages that have a packet in them and go to its sender: those that have a value under
// a mask.
func icmpErrors(f nftable.IP) []struct{ mask, is byte } {
	if f.Proto == unix.NFPROTO_IPV6 {
		return []struct{ mask, is byte }{{0x80, 0}} // RFC 4443: all below 128
	}
	// RFC 792: destination unreachable (3), time exceeded (11), parameter problem.
	return []struct{ mask, is byte }{{0xf7, 3}, {0xff, 12}}
}
