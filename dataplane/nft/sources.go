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
// plain: this host carries plain peers, whose sources WireGuard has checked as it has the tunnel's; they are not nodes,
// so the control net is not theirs.
func sourceRules(n dataplane.Numbers, link string, control int, hops, plain bool) []nftable.Rule {
	out := []nftable.Rule{cameBy("lo")}
	protocols, families := []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP}, []nftable.IP{nftable.IPv4, nftable.IPv6}
	if control != 0 {
		if plain {
			for _, proto := range protocols {
				for _, f := range families {
					out = append(out, plainControlRule(n.PlainLink, f, proto, control))
				}
			}
		}
		for _, proto := range protocols {
			for _, f := range families {
				out = append(out, controlRule(f, proto, control))
			}
		}
	}
	if link != "" {
		out = append(out, cameBy(link))
	}
	if hops && n.HopLink != "" {
		out = append(out, cameBy(n.HopLink))
	}
	if plain {
		out = append(out, cameBy(n.PlainLink))
	}
	const missing = "fib saddr . iif oif missing"
	overlay := func(f nftable.IP) nftable.Rule {
		set := overlaySet(f)
		return rule(fmt.Sprintf("%s saddr @%s counter drop", f.Word, set),
			slices.Concat(f.Source(), []expr.Any{nftable.In(set)}, nftable.CountedDrop()))
	}
	pool := func(f nftable.IP, set string) nftable.Rule {
		return rule(fmt.Sprintf("%s saddr @%s %s counter drop", f.Word, set, missing),
			slices.Concat(f.Source(), []expr.Any{nftable.In(set)}, noWayBack(), nftable.CountedDrop()))
	}
	return append(out,
		overlay(nftable.IPv4), overlay(nftable.IPv6),
		rule("iifname @"+dataplane.SetGateways+" accept",
			[]expr.Any{nftable.Meta(expr.MetaKeyIIFNAME), nftable.In(dataplane.SetGateways), nftable.Accept}),
		rule("ip6 saddr fe80::/10 accept", append(nftable.IPv6.Source(),
			nftable.Masked(slices.Concat([]byte{0xff, 0xc0}, make([]byte, 14)), nil),
			nftable.Equal(slices.Concat([]byte{0xfe, 0x80}, make([]byte, 14))...), nftable.Accept)),
		rule("ip6 saddr :: accept", append(nftable.IPv6.Source(), nftable.Equal(make([]byte, 16)...), nftable.Accept)),
		pool(nftable.IPv4, dataplane.SetPoolsIPv4), pool(nftable.IPv6, dataplane.SetPoolsIPv6),
		rule(`iifname "`+dataplane.PodLinkPrefix+`" and 12 digits `+missing+" counter drop",
			slices.Concat(podLink(), noWayBack(), nftable.CountedDrop())),
	)
}

// rule is one in nft's words and in the kernel's form.
func rule(text string, exprs []expr.Any) nftable.Rule { return nftable.Rule{Text: text, Exprs: exprs} }

func overlaySet(f nftable.IP) string {
	if f.Proto == unix.NFPROTO_IPV6 {
		return dataplane.SetOverlayIPv6
	}
	return dataplane.SetOverlayIPv4
}

// controlRule keeps pods and whoever else is not a node from the control net of this host and of others.
func controlRule(f nftable.IP, proto byte, port int) nftable.Rule {
	set := overlaySet(f)
	text, exprs := toControl(f, proto, port)
	return rule(fmt.Sprintf("%s %s saddr != @%s counter drop", text, f.Word, set),
		slices.Concat(exprs, f.Source(), []expr.Any{nftable.NotIn(set)}, nftable.CountedDrop()))
}

// plainControlRule keeps plain peers, which have addresses of the overlay, from the control net.
func plainControlRule(link string, f nftable.IP, proto byte, port int) nftable.Rule {
	text, exprs := toControl(f, proto, port)
	return rule(fmt.Sprintf("iifname %q %s counter drop", link, text),
		slices.Concat(nftable.Link(expr.MetaKeyIIFNAME, link), exprs, nftable.CountedDrop()))
}

// toControl matches what is sent to the control net.
func toControl(f nftable.IP, proto byte, port int) (text string, exprs []expr.Any) {
	name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[proto]
	return fmt.Sprintf("%s dport %d %s daddr @%s", name, port, f.Word, overlaySet(f)),
		slices.Concat(nftable.L4(proto), []expr.Any{nftable.DestPort(), nftable.Equal(bigEndian(port)...)}, f.Destination(),
			[]expr.Any{nftable.In(overlaySet(f))})
}

// cameBy accepts packets that came in by a link.
func cameBy(link string) nftable.Rule {
	return rule(fmt.Sprintf("iifname %q accept", link),
		append(nftable.Link(expr.MetaKeyIIFNAME, link), nftable.Accept))
}

// podLink matches the host's ends of pods' links by their names: 14 characters, of which the first two are the same for
// all (podnet.HostLink). Gateways' have such names, too.
func podLink() []expr.Any {
	const digits = 12
	mask, more := make([]byte, unix.IFNAMSIZ), make([]byte, unix.IFNAMSIZ)
	end := len(dataplane.PodLinkPrefix) + digits
	for i := range mask {
		if i < len(dataplane.PodLinkPrefix) || i >= end {
			mask[i] = 0xff
		}
	}
	more[end-1] = 0xff
	name := nftable.Meta(expr.MetaKeyIIFNAME)
	return []expr.Any{name, nftable.Masked(mask, nil), nftable.Equal(nftable.LinkName(dataplane.PodLinkPrefix)...),
		name, nftable.Masked(more, nil), nftable.Differ(make([]byte, unix.IFNAMSIZ)...)}
}

// noWayBack matches packets to whose source the kernel would not send by the link that they came in by.
func noWayBack() []expr.Any {
	return []expr.Any{&expr.Fib{Register: nftable.Reg, ResultOIF: true, FlagSADDR: true, FlagIIF: true,
		FlagPRESENT: true}, nftable.Equal(0)}
}

// trim is a link's name as people write it.
func trim(key string) []byte { return bytes.TrimRight([]byte(key), "\x00") }
