package hostaddr

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/nlcount"
)

// maxGateways bounds how many are told of.
const maxGateways = 4

// Kernel is this host's network as the kernel has it.
type Kernel struct {
	SkipLinks []string       // the overlay's own link
	Overlay   []netip.Prefix // the overlay's addresses
}

// Read asks the kernel for links, addresses and default routes.
func (k Kernel) Read() (candidate.Host, error) {
	links, addrs, err := readLinks()
	if err != nil {
		return candidate.Host{}, err
	}
	routes, err := readDefaults()
	if err != nil {
		return candidate.Host{}, err
	}
	for i := range links { // whatever leads to a default gateway leads out
		links[i].pods = links[i].pods && !slices.ContainsFunc(routes, func(r route) bool { return r.link == links[i].index })
	}
	return candidate.Host{
		Addrs: hostAddresses(links, addrs, k.SkipLinks, k.Overlay), Gateways: gateways(links, addrs, routes, k.SkipLinks),
		Overlay: k.Overlay,
	}, nil
}

func readLinks() ([]link, []address, error) {
	ls, err := netlink.LinkList()
	if err != nil {
		return nil, nil, fmt.Errorf("list links: %w", err)
	}
	as, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, fmt.Errorf("list addresses: %w", err)
	}
	pods := PodBridges(ls)
	var links []link
	for _, l := range ls {
		a := l.Attrs()
		down := a.OperState == netlink.OperDown || a.OperState == netlink.OperLowerLayerDown
		links = append(links, link{
			index: a.Index, name: a.Name, kind: l.Type(),
			up: a.Flags&net.FlagUp != 0 && !down, loopback: a.Flags&net.FlagLoopback != 0,
			pods: pods[a.Index],
		})
	}
	const bad = unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED | unix.IFA_F_TEMPORARY
	var addrs []address
	for _, a := range as {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		ip = ip.Unmap()
		bits, _ := a.Mask.Size()
		// On IPv4 the bit of IFA_F_TEMPORARY means "secondary", which is a fine address.
		addrs = append(addrs, address{link: a.LinkIndex, addr: ip, bits: bits, unusable: ip.Is6() && a.Flags&bad != 0})
	}
	return links, addrs, nil
}

// PodBridges are the indexes of bridges that lead to pods and nowhere else: they have ports, and each is one end of a
// pair of links whose other end is in another network namespace. Reference plugins make such ones, under any name.
func PodBridges(links []netlink.Link) map[int]bool {
	out := map[int]bool{}
	for _, l := range links {
		if m := l.Attrs().MasterIndex; m != 0 {
			away := l.Type() == "veth" && l.Attrs().NetNsID >= 0
			before, known := out[m]
			out[m] = away && (before || !known)
		}
	}
	for _, l := range links {
		if l.Type() != "bridge" {
			delete(out, l.Attrs().Index)
		}
	}
	return out
}

func readDefaults() ([]route, error) {
	var out []route
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		rs, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range rs {
			if !isDefault(r) {
				continue
			}
			add := func(gw net.IP, link int) {
				via, _ := netip.AddrFromSlice(gw)
				src, _ := netip.AddrFromSlice(r.Src)
				out = append(out, route{via: via.Unmap(), src: src.Unmap(), link: link, metric: r.Priority})
			}
			if len(r.MultiPath) == 0 {
				add(r.Gw, r.LinkIndex)
			}
			for _, hop := range r.MultiPath {
				add(hop.Gw, hop.LinkIndex)
			}
		}
	}
	return out, nil
}

func isDefault(r netlink.Route) bool {
	if r.Type != unix.RTN_UNICAST && r.Type != 0 {
		return false
	}
	if r.Dst == nil {
		return true
	}
	bits, _ := r.Dst.Mask.Size()
	return bits == 0
}

// Watch calls changed whenever the kernel tells of a link, an address or a default route.
func (k Kernel) Watch(ctx context.Context, changed func()) error {
	done := make(chan struct{})
	defer close(done)
	lost := make(chan error, 1)
	ended := func(err error) {
		select {
		case lost <- err:
		default:
		}
	}
	addrs := make(chan netlink.AddrUpdate, 64)
	links := make(chan netlink.LinkUpdate, 64)
	routes := make(chan netlink.RouteUpdate, 64)
	if err := netlink.AddrSubscribeWithOptions(addrs, done,
		netlink.AddrSubscribeOptions{ErrorCallback: ended}); err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	if err := netlink.LinkSubscribeWithOptions(links, done,
		netlink.LinkSubscribeOptions{ErrorCallback: ended}); err != nil {
		return fmt.Errorf("watch links: %w", err)
	}
	if err := netlink.RouteSubscribeWithOptions(routes, done,
		netlink.RouteSubscribeOptions{ErrorCallback: ended}); err != nil {
		return fmt.Errorf("watch routes: %w", err)
	}
	go forward(addrs, func(netlink.AddrUpdate) bool { return true }, changed)
	go forward(links, func(netlink.LinkUpdate) bool { return true }, changed)
	go forward(routes, func(u netlink.RouteUpdate) bool {
		return u.Table == unix.RT_TABLE_MAIN && isDefault(u.Route)
	}, changed)
	changed() // what happened before the subscription stood
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-lost:
		return err
	}
}

// forward ends when the subscription does.
func forward[T any](updates <-chan T, matters func(T) bool, changed func()) {
	for u := range updates {
		nlcount.Heard(1)
		if matters(u) {
			changed()
		}
	}
}

// route is a default route.
type route struct {
	via, src netip.Addr
	link     int
	metric   int
}

// gateways picks those that this host can send to from an address of its own, the preferred ones first.
func gateways(links []link, addrs []address, routes []route, skipLinks []string) []candidate.Gateway {
	names := map[int]string{}
	for _, l := range links {
		if l.up && !l.loopback && !slices.Contains(tunnels, l.kind) && !slices.Contains(skipLinks, l.name) {
			names[l.index] = l.name
		}
	}
	routes = slices.Clone(routes)
	slices.SortStableFunc(routes, func(a, b route) int { return a.metric - b.metric })
	var out []candidate.Gateway
	for _, r := range routes {
		name := names[r.link]
		if name == "" || !r.via.IsValid() || len(out) == maxGateways {
			continue
		}
		g := candidate.Gateway{Addr: r.via, Local: sourceTowards(r, addrs), Link: name}
		if g.Addr.IsLinkLocalUnicast() && g.Addr.Is6() {
			g.Addr = g.Addr.WithZone(name)
		}
		if g.Local.IsValid() && !slices.Contains(out, g) {
			out = append(out, g)
		}
	}
	return out
}

// sourceTowards is the address that the route names, else one in the gateway's own network, else one of the link.
func sourceTowards(r route, addrs []address) netip.Addr {
	if r.src.IsValid() {
		return r.src
	}
	var any netip.Addr
	for _, a := range addrs {
		if a.link != r.link || a.unusable || a.addr.Is4() != r.via.Is4() || !a.addr.IsGlobalUnicast() {
			continue
		}
		if netip.PrefixFrom(a.addr, a.bits).Masked().Contains(r.via) {
			return a.addr
		}
		if !any.IsValid() {
			any = a.addr
		}
	}
	return any
}
