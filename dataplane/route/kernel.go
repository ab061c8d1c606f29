package route

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

func (f Family) af() int {
	if f == IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func (f Family) anywhere() *net.IPNet {
	if f == IPv6 {
		return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
}

func toAddr(p netip.Prefix) *netlink.Addr {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
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
		k.Family, k.Priority, k.Table, k.Protocol = r.Family.af(), n.PodRule(), n.PodTable(), dataplane.RouteProtocol
		return k
	}
	mask := r.Mask
	k.Family, k.Priority, k.Mark, k.Mask, k.Table, k.Protocol = r.Family.af(), n.RulePriority, r.Mark, &mask, n.RouteTable,
		dataplane.RouteProtocol
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
	k := &netlink.Route{Family: r.Family.af(), Dst: r.Family.anywhere(), Table: r.Table.table(n),
		Protocol: dataplane.RouteProtocol, Type: unix.RTN_UNICAST}
	if r.Dst.IsValid() {
		k.Dst, k.MTU = &net.IPNet{IP: r.Dst.Addr().AsSlice(), Mask: net.CIDRMask(r.Dst.Bits(), r.Dst.Addr().BitLen())}, r.MTU
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
	ones := -1
	if k.Dst != nil {
		ones, _ = k.Dst.Mask.Size()
	}
	isDefault := k.Dst == nil || ones == 0 && k.Dst.IP.IsUnspecified()
	plain := len(k.Gw) == 0 && len(k.MultiPath) == 0 && k.Src == nil && k.Tos == 0
	switch {
	case plain && isDefault && k.Type == unix.RTN_UNREACHABLE && k.Priority == fallbackMetric:
		return Route{Table: ToTunnel, Family: f, Unreachable: true}
	case plain && k.Type == unix.RTN_UNICAST && k.LinkIndex == link && link != 0 && k.Priority < fallbackMetric:
		if isDefault {
			return Route{Table: ToTunnel, Family: f}
		}
		if dst, ok := netip.AddrFromSlice(k.Dst.IP); ok && k.MTU > 0 {
			return Route{Table: ToTunnel, Family: f, Dst: netip.PrefixFrom(dst.Unmap(), ones), MTU: k.MTU}
		}
	}
	return Route{Table: ToTunnel, Family: f, Other: fmt.Sprintf("type %d %s metric %d", k.Type, k, k.Priority)}
}

// toHost is the host route of a pod, as podnet makes it.
func toHost(a netip.Addr, link int, n dataplane.Numbers) *netlink.Route {
	return &netlink.Route{Family: familyOf(a).af(), Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(),
		a.BitLen())}, LinkIndex: link,
		Table: n.PodTable(), Protocol: dataplane.RouteProtocol, Scope: netlink.SCOPE_UNIVERSE, Type: unix.RTN_UNICAST}
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
	const metric6 = 1024 // what the kernel makes of no metric
	switch in {
	case ToPods:
		ok = k.Priority == fallbackMetric
	case Exported:
		ok = f == IPv4 && k.Priority == 0 || f == IPv6 && k.Priority == metric6
	}
	return Route{Table: in, Family: f, Dst: dst, Unreachable: true}, ok
}

// fromHost recognises the way to a single address, whoever made it.
func fromHost(k netlink.Route) (a netip.Addr, ok bool) {
	dst, ok := destination(k)
	return dst.Addr(), ok && dst.IsSingleIP() && k.Type == unix.RTN_UNICAST
}

func destination(k netlink.Route) (netip.Prefix, bool) {
	if k.Dst == nil {
		return netip.Prefix{}, false
	}
	dst, ok := netip.AddrFromSlice(k.Dst.IP)
	ones, _ := k.Dst.Mask.Size()
	return netip.PrefixFrom(dst.Unmap(), ones), ok
}
