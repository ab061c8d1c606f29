package route

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/rtnl"
)

func toAddr(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: rtnl.Net(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD // nobody else can have it, and it shall work at once
	} else {
		a.Broadcast = net.IPv4zero.To4() // there is none in a tunnel
	}
	return a
}

func toRule(r Rule, n dataplane.Numbers) *netlink.Rule {
	k := netlink.NewRule()
	if r.Pods {
		k.Family, k.Priority, k.Table, k.Protocol = r.Family.AF(), n.PodRule(), n.PodTable(), dataplane.RouteProtocol
		return k
	}
	mask := r.Mask
	k.Family, k.Priority, k.Table, k.Protocol = r.Family.AF(), n.RulePriority, n.RouteTable, dataplane.RouteProtocol
	k.Mark, k.Mask = r.Mark, &mask
	return k
}

// fromRule keeps what a rule of ours has, and whatever else it has as text.
func fromRule(f Family, k netlink.Rule, n dataplane.Numbers) Rule {
	r := Rule{Family: f, Mark: k.Mark, Pods: k.Priority == n.PodRule()}
	if k.Mask != nil {
		r.Mask = *k.Mask
	}
	plain := toRule(r, n)
	plain.Mask, k.Mask = nil, nil
	if a, b := fmt.Sprintf("%+v", *plain), fmt.Sprintf("%+v", k); a != b {
		r.Other = k.String()
	}
	return r
}

func toRoute(r Route, link int, n dataplane.Numbers) *netlink.Route {
	k := &netlink.Route{Family: r.Family.AF(), Dst: rtnl.Anywhere(r.Family.AF()), Table: r.Table.table(n),
		Protocol: dataplane.RouteProtocol, Type: unix.RTN_UNICAST}
	if r.Dst.IsValid() {
		k.Dst, k.MTU = rtnl.Net(r.Dst), r.MTU
	}
	if r.Throw {
		k.Type, k.Priority = unix.RTN_THROW, fallbackMetric
		return k
	}
	if r.Unreachable {
		k.Type, k.Priority = unix.RTN_UNREACHABLE, fallbackMetric
		if r.Table == Exported {
			k.Priority = 0 // the kernel's own choice
		}
		return k
	}
	k.LinkIndex = link
	if r.Family == IPv4 {
		k.Scope = netlink.SCOPE_LINK
	}
	return k
}

func fromRoute(f Family, k netlink.Route, link int) Route {
	dst, ok := destination(k)
	isDefault := !ok || dst.Bits() == 0 && dst.Addr().IsUnspecified()
	plain := len(k.Gw) == 0 && len(k.MultiPath) == 0 && k.Src == nil && k.Tos == 0
	switch {
	case plain && isDefault && k.Type == unix.RTN_UNREACHABLE && k.Priority == fallbackMetric:
		return Route{Table: ToTunnel, Family: f, Unreachable: true}
	case plain && k.Type == unix.RTN_UNICAST && k.LinkIndex == link && link != 0 && k.Priority < fallbackMetric:
		if isDefault {
			return Route{Table: ToTunnel, Family: f}
		}
		if k.MTU > 0 {
			return Route{Table: ToTunnel, Family: f, Dst: dst, MTU: k.MTU}
		}
	}
	return Route{Table: ToTunnel, Family: f, Other: fmt.Sprintf("type %d %s metric %d", k.Type, k, k.Priority)}
}

// toHost is the host route of a pod, as podnet makes it.
func toHost(a netip.Addr, link int, n dataplane.Numbers) *netlink.Route {
	return &netlink.Route{Family: rtnl.Family(a), Dst: rtnl.Host(a), LinkIndex: link, Table: n.PodTable(),
		Protocol: dataplane.RouteProtocol, Scope: netlink.SCOPE_UNIVERSE, Type: unix.RTN_UNICAST}
}

// fromBlock recognises a block's or a pool's route in ToPods or Exported; all others there are not ours.
func fromBlock(f Family, k netlink.Route, link int, in Way) (r Route, ok bool) {
	dst, ok := destination(k)
	if ok && in == ToPods && k.Type == unix.RTN_UNICAST && k.Protocol == dataplane.RouteProtocol && k.LinkIndex == link &&
		link != 0 && len(k.Gw) == 0 {
		return Route{Table: in, Family: f, Dst: dst, MTU: k.MTU}, true
	}
	if ok && in == ToPods && k.Type == unix.RTN_THROW && k.Protocol == dataplane.RouteProtocol &&
		k.Priority == fallbackMetric {
		return Route{Table: in, Family: f, Dst: dst, Throw: true}, true
	}
	if !ok || k.Type != unix.RTN_UNREACHABLE || k.Protocol != dataplane.RouteProtocol {
		return Route{}, false
	}
	switch in {
	case ToPods:
		ok = k.Priority == fallbackMetric
	case Exported:
		ok = k.Priority == rtnl.Metric(f.AF())
	}
	return Route{Table: in, Family: f, Dst: dst, Unreachable: true}, ok
}

// fromHost recognises the way to a single address, whoever made it.
func fromHost(k netlink.Route) (a netip.Addr, ok bool) {
	dst, ok := destination(k)
	return dst.Addr(), ok && dst.IsSingleIP() && k.Type == unix.RTN_UNICAST
}

func destination(k netlink.Route) (netip.Prefix, bool) {
	dst := rtnl.Prefix(k.Dst)
	return dst, dst.IsValid()
}
