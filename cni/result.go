package cni

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// result is what an ADD prints: prevResult's interfaces, addresses and routes, and ours after them.
func result(c *config, ifname, netns string, r *skeinv1.CNIAddResponse) (*current.Result, error) {
	out := &current.Result{CNIVersion: current.ImplementedSpecVersion, DNS: c.dns()}
	if c.prev != nil {
		out.Interfaces, out.IPs, out.Routes = c.prev.Interfaces, c.prev.IPs, c.prev.Routes
	}
	host := &current.Interface{Name: r.GetHostInterface(), Mac: r.GetHostMac()}
	pod := &current.Interface{Name: ifname, Mac: r.GetMac(), Sandbox: netns}
	// older versions have no such key
	if ok, err := version.GreaterThanOrEqualTo(c.CNIVersion, "1.1.0"); err == nil && ok {
		host.Mtu, pod.Mtu = int(r.GetMtu()), int(r.GetMtu())
	}
	out.Interfaces = append(out.Interfaces, host, pod)
	index := len(out.Interfaces) - 1
	for _, family := range []struct {
		address, gateway string
		everywhere       netip.Prefix
	}{
		{r.GetIpv4(), r.GetGateway4(), netip.PrefixFrom(netip.IPv4Unspecified(), 0)},
		{r.GetIpv6(), r.GetGateway6(), netip.PrefixFrom(netip.IPv6Unspecified(), 0)},
	} {
		if family.address == "" {
			continue
		}
		a, err := netip.ParseAddr(family.address)
		if err != nil {
			return nil, fmt.Errorf("the agent's answer: %w", err)
		}
		gw, err := netip.ParseAddr(family.gateway)
		if err != nil {
			return nil, fmt.Errorf("the agent's answer: gateway of %s: %w", a, err)
		}
		out.IPs = append(out.IPs, &current.IPConfig{Interface: current.Int(index),
			Address: ipNet(netip.PrefixFrom(a, a.BitLen())), Gateway: gw.AsSlice()})
		out.Routes = append(out.Routes, &types.Route{Dst: ipNet(family.everywhere), GW: gw.AsSlice()})
	}
	return out, nil
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// expected reads from prevResult what CHECK looks for: the addresses of the container's interface.
func expected(c *config, ifname, netns string) ([]string, *types.Error) {
	if c.prev == nil {
		return nil, complaint(CodeConfig, "CHECK needs prevResult", "the runtime must pass the result of the ADD")
	}
	listed := false
	var ips []string
	for i, link := range c.prev.Interfaces {
		if link.Name != ifname || link.Sandbox == "" {
			continue
		}
		if link.Sandbox != netns {
			return nil, complaint(CodeConfig, fmt.Sprintf("prevResult has %s in %s, CNI_NETNS is %s", ifname, link.Sandbox,
				netns), "pass the parameters of the ADD")
		}
		listed = true
		for _, ip := range c.prev.IPs {
			if ip.Interface != nil && *ip.Interface == i {
				ips = append(ips, ip.Address.IP.String())
			}
		}
	}
	if !listed {
		return nil, complaint(CodeConfig, fmt.Sprintf("prevResult does not list an interface %s of the container", ifname),
			"the runtime must pass the result of the ADD")
	}
	return ips, nil
}
