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

func toRule(r Rule) *netlink.Rule {
	k := netlink.NewRule()
	mask := r.Mask
	k.Family, k.Priority, k.Mark, k.Mask, k.Table, k.Protocol = r.Family.af(), dataplane.RulePriority, r.Mark, &mask, dataplane.RouteTable, dataplane.RouteProtocol
	return k
}

// fromRule keeps what a rule of ours has, and whatever else it has as text.
func fromRule(f Family, k netlink.Rule) Rule {
	r := Rule{Family: f, Mark: k.Mark}
	if k.Mask != nil {
		r.Mask = *k.Mask
	}
	plain := toRule(r)
	plain.Mask, k.Mask = nil, nil
	if a, b := fmt.Sprintf("%+v", *plain), fmt.Sprintf("%+v", k); a != b {
		r.Other = k.String()
	}
	return r
}

func toRoute(r Route, link int) *netlink.Route {
	k := &netlink.Route{Family: r.Family.af(), Dst: r.Family.anywhere(), Table: dataplane.RouteTable, Protocol: dataplane.RouteProtocol, Type: unix.RTN_UNICAST}
	if r.Unreachable {
		k.Type, k.Priority = unix.RTN_UNREACHABLE, fallbackMetric
		return k
	}
	if r.Dst.IsValid() {
		k.Dst, k.MTU = &net.IPNet{IP: r.Dst.Addr().AsSlice(), Mask: net.CIDRMask(r.Dst.Bits(), r.Dst.Addr().BitLen())}, r.MTU
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
		return Route{Family: f, Unreachable: true}
	case plain && k.Type == unix.RTN_UNICAST && k.LinkIndex == link && link != 0 && k.Priority < fallbackMetric:
		if isDefault {
			return Route{Family: f}
		}
		if dst, ok := netip.AddrFromSlice(k.Dst.IP); ok && k.MTU > 0 {
			return Route{Family: f, Dst: netip.PrefixFrom(dst.Unmap(), ones), MTU: k.MTU}
		}
	}
	return Route{Family: f, Other: fmt.Sprintf("type %d %s metric %d", k.Type, k, k.Priority)}
}
