package agent

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/events"
)

// misfit is a link of another CNI whose packets do not fit into the tunnel.
type misfit struct {
	link       string
	have, want int // its MTU, and the largest that fits
	why        string
}

// Bytes that an encapsulation adds to what it carries, over IPv4; over IPv6 it is 20 more.
var encapsulated = map[string]int{
	"vxlan": 50, "geneve": 50, "gre": 24, "ip6gre": 44, "gretap": 38, "ipip": 20, "sit": 20, "ip6tnl": 40,
}

// misfits judges the links of another CNI. Two kinds of its packets ride in the tunnel: those of pods whose addresses
// lie in the pod ranges, and those of an encapsulation between overlay addresses. Where the encapsulation's packets
// go is not told by all links (those that take it from each packet's route, as Cilium's and OVN's); they are let pass.
func misfits(links []hostLink, tunnel string, mtu int, overlays, ranges []netip.Prefix) (out []misfit) {
	inside := func(all []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, l := range links {
		if l.name == tunnel {
			continue
		}
		extra, encapsulates := encapsulated[l.kind]
		if l.outer.six && l.kind != "ip6tnl" && l.kind != "ip6gre" {
			extra += 20
		}
		rides := l.outer.link == tunnel || l.outer.from.IsValid() && inside(overlays, l.outer.from)
		led := slices.ContainsFunc(l.addrs, func(p netip.Prefix) bool { return inside(ranges, p.Addr()) })
		switch {
		case encapsulates && rides && l.mtu > mtu-extra:
			out = append(out, misfit{l.name, l.mtu, mtu - extra,
				fmt.Sprintf("it sends %s packets through %s, which adds %d bytes and has an MTU of %d", l.kind,
					tunnel, extra, mtu)})
		case !encapsulates && l.pods && led && l.mtu > mtu:
			out = append(out, misfit{l.name, l.mtu, mtu,
				fmt.Sprintf("its pods' packets to other hosts go through %s, which has an MTU of %d", tunnel, mtu)})
		}
	}
	return out
}

func podRanges(st *events.State) (out []netip.Prefix) {
	for _, text := range st.Settings().GetPodRanges() {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

const subjectOtherCNI = "another CNI's link "

// noteOtherCNI tells of links of another CNI that do not fit.
func (a *Agent) noteOtherCNI() {
	st := a.replica.State()
	now := map[string]bool{}
	links := a.links.get()
	for _, m := range misfits(links, a.cfg.Dataplane.Link, a.linkMTU(), projection.Overlays(st.Cluster()), podRanges(st)) {
		now[m.link] = true
		a.report(subjectOtherCNI+m.link, warning, fmt.Sprintf("its MTU is %d, and %d is the largest that fits: %s",
			m.have, m.want, m.why),
			fmt.Sprintf("set the MTU of that CNI to %d; until then large packets are lost where no answer about their size "+
				"comes back", m.want))
	}
	for name := range a.loop.misfits {
		if !now[name] {
			a.report(subjectOtherCNI+name, "", "", "")
		}
	}
	a.loop.misfits = now
}
