package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// PodNS names the namespace of a pod on a host. No host's name has a dot, and no site's but a carrier's.
func PodNS(lab, host, pod string) string { return HostNS(lab, host) + "." + pod }

// CheckPodName refuses names of pods whose namespace would be taken for another's.
func CheckPodName(name string) error {
	if name == "inet" || strings.HasSuffix(name, "-inet") {
		return fmt.Errorf("pod name %q is kept for the lab's core: choose one that does not end in \"inet\"", name)
	}
	return nil
}

// Pods lists the pods that have a namespace on a host, in order.
func Pods(lab, host string) ([]string, error) {
	list, err := Namespaces(lab)
	if err != nil {
		return nil, err
	}
	return podsIn(lab, host, list), nil
}

func podsIn(lab, host string, namespaces []string) []string {
	var pods []string
	for _, n := range namespaces {
		if pod, ok := strings.CutPrefix(n, PodNS(lab, host, "")); ok {
			pods = append(pods, pod)
		}
	}
	slices.Sort(pods)
	return pods
}

// AddPod makes the namespace of a pod as a container runtime does: with nothing but its loopback.
func AddPod(lab, host, pod string) error {
	name := PodNS(lab, host, pod)
	if err := create(name); err != nil {
		return err
	}
	return on(name, func(h *netlink.Handle) error { return linkUp(h, "lo") })
}

// RemovePod takes the name of a pod's namespace away. What was in it goes when nothing holds it any more.
func RemovePod(lab, host, pod string) error { return remove(PodNS(lab, host, pod)) }

// Path is where a namespace of a lab is bound. An absolute path stands for itself.
func Path(ns string) string {
	if strings.HasPrefix(ns, "/") {
		return ns
	}
	return Dir + "/" + ns
}

// Addresses lists what the namespace at a path has on all links but its loopback, without the link-local ones, in
// order.
func Addresses(path string) ([]netip.Addr, error) {
	var out []netip.Addr
	err := look(path, func(h *netlink.Handle) error {
		out = nil
		lo, err := h.LinkByName("lo")
		if err != nil {
			return err
		}
		addrs, err := h.AddrList(nil, netlink.FAMILY_ALL)
		for _, a := range addrs {
			addr, ok := netip.AddrFromSlice(a.IP)
			if addr = addr.Unmap(); ok && a.LinkIndex != lo.Attrs().Index && !addr.IsLinkLocalUnicast() {
				out = append(out, addr)
			}
		}
		return err
	})
	slices.SortFunc(out, netip.Addr.Compare)
	return out, err
}

// Links lists the names of a namespace's links but the loopback, in order.
func Links(ns string) ([]string, error) {
	var out []string
	err := look(Path(ns), func(h *netlink.Handle) error {
		out = nil
		links, err := h.LinkList()
		for _, l := range links {
			// Kernels with tunnel modules put their fallback devices into every namespace.
			if name := l.Attrs().Name; l.Type() == "veth" || l.Type() == "dummy" {
				out = append(out, name)
			}
		}
		return err
	})
	slices.Sort(out)
	return out, err
}

// Route is one entry of a routing table.
type Route struct {
	Prefix      netip.Prefix
	Unreachable bool
	Throw       bool   // passes on to the next rule
	Link        string // "" for one that leads nowhere
}

// Routes lists a routing table of a namespace, both families, in order.
func Routes(ns string, table int) ([]Route, error) {
	var out []Route
	err := look(Path(ns), func(h *netlink.Handle) error {
		out = nil
		links, err := h.LinkList()
		if err != nil {
			return err
		}
		names := map[int]string{}
		for _, l := range links {
			names[l.Attrs().Index] = l.Attrs().Name
		}
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := h.RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				out = append(out, newRoute(r, family, names))
			}
		}
		return nil
	})
	slices.SortFunc(out, func(a, b Route) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return out, err
}

func newRoute(r netlink.Route, family int, names map[int]string) Route {
	out := Route{Unreachable: r.Type == unix.RTN_UNREACHABLE, Throw: r.Type == unix.RTN_THROW,
		Prefix: netip.PrefixFrom(netip.IPv4Unspecified(), 0)}
	if family == netlink.FAMILY_V6 {
		out.Prefix = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	if r.Dst != nil {
		if a, ok := netip.AddrFromSlice(r.Dst.IP); ok {
			bits, _ := r.Dst.Mask.Size()
			if family == netlink.FAMILY_V4 {
				a = a.Unmap()
			}
			out.Prefix = netip.PrefixFrom(a, bits)
		}
	}
	if !out.Unreachable { // the kernel says "lo" for those of IPv6
		out.Link = names[r.LinkIndex]
	}
	return out
}
