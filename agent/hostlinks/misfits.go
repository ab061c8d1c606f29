package hostlinks

import (
	"fmt"
	"net/netip"
	"slices"
)

// Misfit is a link of another CNI whose packets do not fit into the tunnel.
type Misfit struct {
	Link       string
	Have, Want int // its MTU, and the largest that fits
	Why        string
}

// Bytes that an encapsulation adds to what it carries, over IPv4; over IPv6 it is 20 more.
var encapsulated = map[string]int{
	"vxlan": 50, "geneve": 50, "gre": 24, "ip6gre": 44, "gretap": 38, "ipip": 20, "sit": 20, "ip6tnl": 40,
}

// Misfits judges the links of another CNI. Two kinds of its packets ride in the tunnel: those of pods whose addresses
// lie in the pod ranges, and those of an encapsulation between overlay addresses. Where the encapsulation's packets
// go is not told by all links (those that take it from each packet's route, as Cilium's and OVN's); they are let pass.
func Misfits(links []Link, tunnel string, mtu int, overlays, ranges []netip.Prefix) (out []Misfit) {
	inside := func(all []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, l := range links {
		if l.Name == tunnel {
			continue
		}
		extra, encapsulates := encapsulated[l.Kind]
		if l.outer.six && l.Kind != "ip6tnl" && l.Kind != "ip6gre" {
			extra += 20
		}
		rides := l.outer.link == tunnel || l.outer.from.IsValid() && inside(overlays, l.outer.from)
		led := slices.ContainsFunc(l.Addrs, func(p netip.Prefix) bool { return inside(ranges, p.Addr()) })
		switch {
		case encapsulates && rides && l.MTU > mtu-extra:
			out = append(out, Misfit{l.Name, l.MTU, mtu - extra,
				fmt.Sprintf("it sends %s packets through %s, which adds %d bytes and has an MTU of %d", l.Kind,
					tunnel, extra, mtu)})
		case !encapsulates && l.Pods && led && l.MTU > mtu:
			out = append(out, Misfit{l.Name, l.MTU, mtu,
				fmt.Sprintf("its pods' packets to other hosts go through %s, which has an MTU of %d", tunnel, mtu)})
		}
	}
	return out
}
