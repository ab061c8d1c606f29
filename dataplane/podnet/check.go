package podnet

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

// ErrDiffers says that the kernel's state differs from the attachment.
var ErrDiffers = errors.New("is not as it was made")

// Check compares an attachment with the kernel. The error is ErrDiffers and lists all differences.
func Check(a Attachment) error {
	if err := a.validate(); err != nil {
		return fmt.Errorf("%s: %w", a.who(), err)
	}
	wrong, err := check(a)
	if err != nil {
		return fmt.Errorf("checking %s: %w", a.who(), err)
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%s %w: %s", a.who(), ErrDiffers, strings.Join(wrong, "; "))
	}
	return nil
}

// view is the kernel's state of both ends.
type view struct {
	host, pod             link
	hasHost, hasPod       bool
	hostAddrs, podAddrs   []netip.Prefix
	podRoutes, hostRoutes []route // of the main table in the pod, of the table of pods on the host
	loUp                  bool
	hostForwards          bool // IPv6
}

func check(a Attachment) (wrong []string, err error) {
	v := view{}
	host, err := dial(nil)
	if err != nil {
		return nil, err
	}
	defer host.close()
	if v.host, v.hasHost, err = host.link(getLink(HostLink(a.Key))); err != nil {
		return nil, err
	}
	if v.hasHost {
		if v.hostRoutes, err = host.routes(tableOr(a.Table), v.host.index); err != nil {
			return nil, err
		}
		if v.hostAddrs, err = host.addresses(v.host.index); err != nil {
			return nil, err
		}
	}
	v.hostForwards = v.hasHost && a.IPv6.IsValid() && forwardsIPv6(v.host.name)
	ns, err := openNetNS(a.NetNS)
	if errors.Is(err, ErrNoNetNS) {
		return append(differences(a, v), err.Error()), nil
	}
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	pod, err := dial(ns)
	if err != nil {
		return nil, err
	}
	defer pod.close()
	if err := v.readPod(pod, a.Interface); err != nil {
		return nil, err
	}
	return differences(a, v), nil
}

func (v *view) readPod(pod *conn, ifname string) (err error) {
	if v.pod, v.hasPod, err = pod.link(getLink(ifname)); err != nil || !v.hasPod {
		return err
	}
	lo, _, err := pod.link(getLink("lo"))
	if err != nil {
		return err
	}
	v.loUp = lo.up
	if v.podAddrs, err = pod.addresses(v.pod.index); err != nil {
		return err
	}
	v.podRoutes, err = pod.routes(unix.RT_TABLE_MAIN, v.pod.index)
	return err
}

// addresses reads the addresses of one link.
func (c *conn) addresses(index int) ([]netip.Prefix, error) {
	ms, err := c.dump(dumpAddresses(index))
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, m := range ms {
		if a, ok := decodeAddress(m); ok && a.index == index { // old kernels return those of every link
			out = append(out, a.prefix)
		}
	}
	return out, nil
}

// differences lists all differences, the host's side first.
func differences(a Attachment, v view) []string {
	var out []string
	say := func(bad bool, format string, args ...any) bool {
		if bad {
			out = append(out, fmt.Sprintf(format, args...))
		}
		return bad
	}
	name := HostLink(a.Key)
	want := []netip.Addr{a.IPv4}
	lacking := v.hasHost && !v.host.ipv6 || v.hasPod && !v.pod.ipv6
	if !a.IPv4.IsValid() || !lacking { // otherwise Add made only IPv4
		want = append(want, a.IPv6)
	}
	want = slices.DeleteFunc(want, func(a netip.Addr) bool { return !a.IsValid() })
	if !say(!v.hasHost, "link %s is not on the host", name) {
		say(!v.host.up, "link %s is down", name)
		say(v.host.mtu != a.MTU, "MTU of link %s is %d, not %d", name, v.host.mtu, a.MTU)
		say(a.IPv4.IsValid() && !v.host.forwarding4, "link %s does not forward IPv4", name)
		say(a.IPv6.IsValid() && slices.Contains(want, a.IPv6) && !v.hostForwards, "link %s does not forward IPv6", name)
		for _, addr := range want {
			g := gatewayOf(addr)
			say(!slices.ContainsFunc(v.hostAddrs, func(p netip.Prefix) bool { return p.Addr() == g }), "link %s has no "+
				"address %s", name, g)
		}
	}
	for _, addr := range want {
		there := func(r route) bool { return r.toPod() && r.dst.Addr() == addr && v.hasHost && r.index == v.host.index }
		say(!slices.ContainsFunc(v.hostRoutes, there), "the host has no route to %s through %s in table %d", addr, name,
			tableOr(a.Table))
	}
	if !v.hasPod {
		return append(out, fmt.Sprintf("there is no interface %s in the pod", a.Interface))
	}
	say(v.hasHost && (v.pod.peer != v.host.index || v.host.peer != v.pod.index), "interface %s in the pod is not the "+
		"other end of link %s", a.Interface, name)
	say(!v.pod.up, "interface %s in the pod is down", a.Interface)
	say(!v.loUp, "interface lo in the pod is down")
	say(v.pod.mtu != a.MTU, "MTU of interface %s in the pod is %d, not %d", a.Interface, v.pod.mtu, a.MTU)
	for _, addr := range want {
		g := gatewayOf(addr)
		say(!slices.Contains(v.podAddrs, netip.PrefixFrom(addr, addr.BitLen())), "interface %s in the pod lacks the "+
			"address %s", a.Interface, addr)
		say(!slices.ContainsFunc(v.podRoutes, func(r route) bool {
			return r.kind == unix.RTN_UNICAST && r.dst.Bits() == 0 && r.gateway == g
		}), "the pod has no default route via %s", g)
		say(addr.Is4() && !slices.ContainsFunc(v.podRoutes, func(r route) bool {
			return r.kind == unix.RTN_UNICAST && r.dst == netip.PrefixFrom(g, g.BitLen())
		}), "the pod has no route to %s", g)
	}
	return out
}

func gatewayOf(a netip.Addr) netip.Addr { return dataplane.Pick(a, gateway4, gateway6) }

func forwardsIPv6(link string) bool {
	if v, err := readSetting("all", "forwarding"); err == nil && v != "0" {
		return true
	}
	v, err := readSetting(link, "force_forwarding")
	return err == nil && v != "0"
}
