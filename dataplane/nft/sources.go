package nft

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/nftable"
)

// The chain of sources drops what comes in under another's name, before conntrack and marks (docs/decisions/0037).
// WireGuard has checked what comes by the tunnel, and guards what comes out of it by way of other nodes
// (dataplane.Hops). By any other link
//
//   - nothing comes from an overlay address;
//   - what comes from an address of a pool came by the link that leads back there: a pod's own, or, for what is not the
//     mesh's to lead, whichever the host's routes name;
//   - a pod sends from addresses that lead back to it, and from link-local ones.
//
// The way back is the kernel's own routing, so that a pod costs no element, and one is bound to its addresses from the
// moment on that it has a route. Gateways' namespaces have rules of their own for what they send.

// addSources puts the chain of sources and its sets there.
func addSources(t *nftable.Table, s dataplane.Spec, n dataplane.Numbers) {
	t.Chains = append(t.Chains, nftable.Chain{Name: dataplane.ChainSources, Type: nftables.ChainTypeFilter,
		Hook: nftables.ChainHookPrerouting, Priority: ofSources,
		Rules: sourceRules(n, s.Link.Name, s.ControlPort, s.Hops.Self.IsValid(), s.Plain)})
	var overlays []netip.Prefix
	for _, a := range s.Link.Addresses {
		overlays = append(overlays, a.Masked())
	}
	pool4, pool6 := nftable.Ranges(s.Pods.Pools)
	else4, else6 := nftable.Ranges(s.Pods.Elsewhere)
	t.Sets = slices.Concat(t.Sets, addresses(dataplane.SetOverlayIPv4, dataplane.SetOverlayIPv6, overlays),
		rangeSets(dataplane.SetPoolsIPv4, dataplane.SetPoolsIPv6, nftable.Without(pool4, else4),
			nftable.Without(pool6, else6)),
		[]nftable.Set{links(dataplane.SetGateways, s.Pods.Gateways...)})
}

// withoutSources is a table for a kernel that cannot have the chain.
func withoutSources(t nftable.Table) nftable.Table {
	t.Chains = slices.DeleteFunc(slices.Clone(t.Chains), func(c nftable.Chain) bool {
		return c.Name == dataplane.ChainSources
	})
	t.Sets = slices.DeleteFunc(slices.Clone(t.Sets), func(s nftable.Set) bool {
		return slices.Contains([]string{dataplane.SetOverlayIPv4, dataplane.SetOverlayIPv6, dataplane.SetPoolsIPv4,
			dataplane.SetPoolsIPv6, dataplane.SetGateways}, s.Name)
	})
	return t
}

// sourceRules are the rules of the chain for a tunnel's link and the control net's port; 0: there is none. Where there
// are hops, their link's packets pass as well: with kernel WireGuard they come by it, and guards have checked them.
// plain: this host carries plain peers, whose sources WireGuard has checked as it has the tunnel's; they are no nodes,
// so the control net is not theirs.
func sourceRules(n dataplane.Numbers, link string, control int, hops, plain bool) []nftable.Rule {
	out := []nftable.Rule{rule(`iifname "lo" accept`, append(cameBy("lo"), accept))}
	if control != 0 {
		if plain {
			for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				out = append(out, plainControlRule(n.PlainLink, 4, proto, control), plainControlRule(n.PlainLink, 6,
					proto, control))
			}
		}
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			out = append(out, controlRule(4, proto, control), controlRule(6, proto, control))
		}
	}
	links := []string{link}
	if hops {
		links = append(links, n.HopLink)
	}
	for _, l := range links {
		if l != "" {
			out = append(out, rule(fmt.Sprintf("iifname %q accept", l), append(cameBy(l), accept)))
		}
	}
	if plain {
		out = append(out, rule(fmt.Sprintf("iifname %q accept", n.PlainLink), append(cameBy(n.PlainLink), accept)))
	}
	const missing = "fib saddr . iif oif missing"
	overlay := func(f int, set string) nftable.Rule {
		return rule(fmt.Sprintf("%s saddr @%s counter drop", protocol(f), set),
			append(source(f), &expr.Lookup{SourceRegister: reg, SetName: set}, &expr.Counter{}, drop))
	}
	pool := func(f int, set string) nftable.Rule {
		return rule(fmt.Sprintf("%s saddr @%s %s counter drop", protocol(f), set, missing),
			slices.Concat(source(f), []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: set}}, noWayBack(),
				[]expr.Any{&expr.Counter{}, drop}))
	}
	return append(out,
		overlay(4, dataplane.SetOverlayIPv4), overlay(6, dataplane.SetOverlayIPv6),
		rule("iifname @"+dataplane.SetGateways+" accept",
			[]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
				&expr.Lookup{SourceRegister: reg, SetName: dataplane.SetGateways}, accept}),
		rule("ip6 saddr fe80::/10 accept", append(source(6),
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 16,
				Mask: slices.Concat([]byte{0xff, 0xc0}, make([]byte, 14)), Xor: make([]byte, 16)},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: slices.Concat([]byte{0xfe, 0x80}, make([]byte, 14))},
			accept)),
		rule("ip6 saddr :: accept", append(source(6),
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: make([]byte, 16)}, accept)),
		pool(4, dataplane.SetPoolsIPv4), pool(6, dataplane.SetPoolsIPv6),
		rule(`iifname "`+dataplane.PodLinkPrefix+`" and 12 digits `+missing+" counter drop",
			slices.Concat(podLink(), noWayBack(), []expr.Any{&expr.Counter{}, drop})),
	)
}

// rule is one in nft's words and in the kernel's form.
func rule(text string, exprs []expr.Any) nftable.Rule { return nftable.Rule{Text: text, Exprs: exprs} }

var (
	accept = &expr.Verdict{Kind: expr.VerdictAccept}
	drop   = &expr.Verdict{Kind: expr.VerdictDrop}
)

func protocol(family int) string {
	if family == 6 {
		return "ip6"
	}
	return "ip"
}

// controlRule keeps pods and whoever else is no node from the control net of this host and of others.
func controlRule(family int, proto byte, port int) nftable.Rule {
	set := map[int]string{4: dataplane.SetOverlayIPv4, 6: dataplane.SetOverlayIPv6}[family]
	exprs := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
		load(transport, udpDestination, 2, reg), // TCP's is there as well
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
	}
	exprs = slices.Concat(exprs, destination(family), []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: set}},
		source(family), []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: set, Invert: true},
			&expr.Counter{}, drop})
	name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[proto]
	return rule(fmt.Sprintf("%s dport %d %s daddr @%s %s saddr != @%s counter drop", name, port, protocol(family), set,
		protocol(family), set), exprs)
}

// plainControlRule keeps plain peers, which have addresses of the overlay, from the control net.
func plainControlRule(link string, family int, proto byte, port int) nftable.Rule {
	set := map[int]string{4: dataplane.SetOverlayIPv4, 6: dataplane.SetOverlayIPv6}[family]
	exprs := slices.Concat(cameBy(link), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
		load(transport, udpDestination, 2, reg),
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, uint16(port))},
	}, destination(family), []expr.Any{&expr.Lookup{SourceRegister: reg, SetName: set}, &expr.Counter{}, drop})
	name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[proto]
	return rule(fmt.Sprintf("iifname %q %s dport %d %s daddr @%s counter drop", link, name, port,
		protocol(family), set), exprs)
}

// cameBy matches packets that came in by a link.
func cameBy(link string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: linkName(link)}}
}

// linkName is a name as the kernel compares it.
func linkName(link string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, link)
	return b
}

// podLink matches the host's ends of pods' links by their names: 14 characters, of which the first two are the same for
// all (podnet.HostLink). Gateways' have such names, too.
func podLink() []expr.Any {
	const digits = 12
	mask, want, more := make([]byte, unix.IFNAMSIZ), linkName(dataplane.PodLinkPrefix), make([]byte, unix.IFNAMSIZ)
	end := len(dataplane.PodLinkPrefix) + digits
	for i := range mask {
		if i < len(dataplane.PodLinkPrefix) || i >= end {
			mask[i] = 0xff
		}
	}
	more[end-1] = 0xff
	bits := func(mask []byte) expr.Any {
		return &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: unix.IFNAMSIZ, Mask: mask,
			Xor: make([]byte, unix.IFNAMSIZ)}
	}
	name := &expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg}
	return []expr.Any{name, bits(mask), &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: want},
		name, bits(more), &expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: make([]byte, unix.IFNAMSIZ)}}
}

// noWayBack matches packets to whose source the kernel would not send by the link that they came in by.
func noWayBack() []expr.Any {
	return []expr.Any{&expr.Fib{Register: reg, ResultOIF: true, FlagSADDR: true, FlagIIF: true, FlagPRESENT: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{0}}}
}

func source(family int) []expr.Any      { return address(family, ipSource, 8) }
func destination(family int) []expr.Any { return address(family, ipDestination, 24) }

// address loads one of a packet's addresses, of one family.
func address(family int, offset4, offset6 uint32) []expr.Any {
	proto, offset, length := byte(unix.NFPROTO_IPV4), offset4, uint32(4)
	if family == 6 {
		proto, offset, length = unix.NFPROTO_IPV6, offset6, 16
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{proto}},
		load(header, offset, length, reg),
	}
}

// trim is a link's name as people write it.
func trim(key string) []byte { return bytes.TrimRight([]byte(key), "\x00") }
