package route

import (
	"net/netip"
	"slices"

	"github.com/skeinmesh/skein/dataplane"
)

// What leads to this host's pods: a rule for each family, and for each block an unreachable route in the table of pods,
// behind the host routes of its pods, and one in the table of exported ones. The latter is unreachable too: BIRD takes
// it as it takes any other kind, and a daemon that copies it to another table does no harm by that. Other hosts' blocks
// lead into our link. Behind all of them each pool's subnet is unreachable, but for the parts that are not the mesh's
// to lead.
//
// Coil has the same rule and tables with the same protocol, and runs beside us while a cluster migrates. So what is
// only ours are the routes of blocks, which Coil makes of another kind; the rule is taken away only together with them,
// and only when no pod is left; and the host route of a pod is never taken away: it goes with its link.

// wantPods adds what leads to pods to a wanted state.
func (s *State) wantPods(p dataplane.Pods, h Host) {
	refuse := func(p netip.Prefix, tables ...Way) {
		if f := dataplane.FamilyOf(p.Addr()); f == IPv4 || h.IPv6 {
			for _, t := range tables {
				s.Routes = append(s.Routes, Route{Table: t, Family: f, Dst: p.Masked(), Unreachable: true})
			}
		}
	}
	for _, a := range p.Exported {
		refuse(netip.PrefixFrom(a, a.BitLen()), Exported)
	}
	s.wantForward(p, h)
	if len(p.Blocks)+len(p.Routes)+len(p.Remote)+len(p.Refused)+len(p.Pools) == 0 {
		return
	}
	s.Rules = append(s.Rules, Rule{Family: IPv4, Pods: true})
	if h.IPv6 {
		s.Rules = append(s.Rules, Rule{Family: IPv6, Pods: true})
	}
	for _, b := range p.Blocks {
		refuse(b, ToPods, Exported)
	}
	for _, b := range p.Refused {
		refuse(b, ToPods)
	}
	for _, n := range p.Remote {
		if f := dataplane.FamilyOf(n.Prefix.Addr()); f == IPv4 || h.IPv6 && h.IPv6OnLink {
			s.Routes = append(s.Routes, Route{Table: ToPods, Family: f, Dst: n.Prefix.Masked(), MTU: n.MTU})
		}
	}
	for _, r := range p.Routes {
		if r.Addr.Is4() || h.IPv6 {
			s.Hosts = append(s.Hosts, r)
		}
	}
	s.wantPools(p, h)
}

// wantPools adds what catches packets for addresses of pools that nobody has. It comes last: what leads to those that
// somebody has is there before.
func (s *State) wantPools(p dataplane.Pods, h Host) {
	taken := map[netip.Prefix]bool{} // a block may be a whole subnet
	for _, r := range s.Routes {
		if r.Table == ToPods && r.behind() {
			taken[r.Dst] = true
		}
	}
	add := func(dst netip.Prefix, r Route) {
		r.Table, r.Family, r.Dst = ToPods, dataplane.FamilyOf(dst.Addr()), dst.Masked()
		if (r.Family == IPv4 || h.IPv6) && !taken[r.Dst] {
			taken[r.Dst] = true
			s.Routes = append(s.Routes, r)
			s.Last++
		}
	}
	for _, e := range p.Elsewhere {
		add(e, Route{Throw: true})
	}
	for _, n := range p.Pools {
		add(n, Route{Unreachable: true})
	}
}

// wantForward is what the link needs that leads to pods of this host, or to a gateway's clients, or whose packets this
// host passes on. Another host forwards nothing. Where the kernel has no switch for IPv6 on a single link, that of the
// whole host is podnet's to set when pods with IPv6 come, and ours for the rest.
func (s *State) wantForward(p dataplane.Pods, h Host) {
	if len(p.Blocks)+len(p.Routes) == 0 && !p.Forward {
		return
	}
	if h.HasForward4 {
		s.Forward4 = 1
	}
	if (p.Has6() && h.HasForward6 || p.Forward) && h.IPv6OnLink && !h.ForwardAll6 {
		s.Forward6 = 1
	}
}

// missing are the wanted ways to pods that the kernel has not.
func missing(want, actual State) []dataplane.PodRoute {
	var out []dataplane.PodRoute
	for _, r := range want.Hosts {
		if !hasHost(actual.Hosts, r.Addr) {
			out = append(out, r)
		}
	}
	return out
}

// hasHost searches ways that are sorted by address.
func hasHost(hosts []dataplane.PodRoute, a netip.Addr) bool {
	_, ok := slices.BinarySearchFunc(hosts, a, func(r dataplane.PodRoute, a netip.Addr) int { return r.Addr.Compare(a) })
	return ok
}

func compareHosts(a, b dataplane.PodRoute) int { return a.Addr.Compare(b.Addr) }

// diffHosts puts back what is missing where the pod's link is there.
func diffHosts(want, actual State) []Op {
	var ops []Op
	for _, r := range missing(want, actual) {
		if slices.Contains(actual.Ready, r) {
			ops = append(ops, Op{Verb: AddHost, Host: r})
		}
	}
	return ops
}

// keepsRule says that a rule to the table of pods stays although it is not wanted: it is not surely ours, or pods need
// it.
func keepsRule(r Rule, actual State) bool {
	if !r.Pods {
		return false
	}
	ours := actual.HadPods || slices.ContainsFunc(actual.Routes, func(o Route) bool { return o.Table != ToTunnel })
	needed := slices.ContainsFunc(actual.Hosts, func(h dataplane.PodRoute) bool {
		return dataplane.FamilyOf(h.Addr) == r.Family
	})
	return !ours || needed
}

// announcedFirst is the order of removal: a block is no longer announced before it is no longer refused.
func announcedFirst(routes []Route) []Route {
	out := slices.Clone(routes)
	slices.SortStableFunc(out, func(a, b Route) int {
		return dataplane.Bit(b.Table == Exported) - dataplane.Bit(a.Table == Exported)
	})
	return out
}

// noteEnd reads the kernel again when the Spec has no pods any more: podnet took host routes away that are remembered.
func (r *Reconciler) noteEnd(p dataplane.Pods) {
	if len(p.Blocks)+len(p.Routes) > 0 {
		r.hadPods = true
	} else if r.hadPods {
		r.cache = nil
	}
}

// hasPodRule says that a rule to the table of pods is left.
func (s State) hasPodRule() bool {
	return slices.ContainsFunc(s.Rules, func(r Rule) bool { return r.Pods })
}
