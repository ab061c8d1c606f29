package candidate

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/addr"
)

// maxHosts bounds the host candidates of one node; a record holds 64 candidates of all kinds.
const maxHosts = 16

// tunnels are link types whose addresses lie inside some tunnel.
var tunnels = []string{"wireguard", "tun", "tuntap", "vxlan", "geneve", "gre", "gretap", "ip6gre", "ipip", "ip6tnl", "sit", "vti", "xfrm", "ppp"}

// containers are name prefixes of links whose addresses mean something only inside this host.
var containers = []string{"docker", "br-", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "virbr", "podman", "weave", "kube-", "nodelocaldns"}

// link and address are what the kernel says, as far as it matters here.
type link struct {
	index    int
	name     string
	kind     string
	up       bool
	loopback bool
}

type address struct {
	link     int
	addr     netip.Addr
	unusable bool // tentative, failed, deprecated or temporary
}

// hostAddresses picks the addresses that others may reach: on links that are up and no tunnels, global in scope, and
// not in the overlay. Public ones come first, IPv4 before IPv6.
func hostAddresses(links []link, addrs []address, skipLinks []string, skip []netip.Prefix) []netip.Addr {
	usable := map[int]bool{}
	for _, l := range links {
		inside := slices.ContainsFunc(containers, func(p string) bool { return strings.HasPrefix(l.name, p) })
		usable[l.index] = l.up && !l.loopback && !inside && !slices.Contains(tunnels, l.kind) && !slices.Contains(skipLinks, l.name)
	}
	var kept []address
	for _, a := range addrs {
		overlay := slices.ContainsFunc(skip, func(p netip.Prefix) bool { return p.Contains(a.addr) })
		if usable[a.link] && !a.unusable && !overlay && a.addr.IsGlobalUnicast() {
			kept = append(kept, a)
		}
	}
	rank := func(a netip.Addr) int {
		r := 0
		if !addr.Public(a) {
			r += 2
		}
		if a.Is6() {
			r++
		}
		return r
	}
	slices.SortFunc(kept, func(x, y address) int {
		return cmp.Or(cmp.Compare(rank(x.addr), rank(y.addr)), cmp.Compare(x.link, y.link), x.addr.Compare(y.addr))
	})
	var out []netip.Addr
	for _, a := range kept {
		if !slices.Contains(out, a.addr) && len(out) < maxHosts {
			out = append(out, a.addr)
		}
	}
	return out
}

// readHost asks the kernel for links and addresses.
func readHost() ([]link, []address, error) {
	ls, err := netlink.LinkList()
	if err != nil {
		return nil, nil, fmt.Errorf("list links: %w", err)
	}
	as, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, nil, fmt.Errorf("list addresses: %w", err)
	}
	var links []link
	for _, l := range ls {
		a := l.Attrs()
		down := a.OperState == netlink.OperDown || a.OperState == netlink.OperLowerLayerDown
		links = append(links, link{
			index: a.Index, name: a.Name, kind: l.Type(),
			up: a.Flags&net.FlagUp != 0 && !down, loopback: a.Flags&net.FlagLoopback != 0,
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
		// On IPv4 the bit of IFA_F_TEMPORARY means "secondary", which is a fine address.
		addrs = append(addrs, address{link: a.LinkIndex, addr: ip, unusable: ip.Is6() && a.Flags&bad != 0})
	}
	return links, addrs, nil
}

// watchHost calls changed whenever the kernel tells of a link or an address, until done is closed. When the
// subscription ends for another reason, lost is called once.
func watchHost(done <-chan struct{}, changed func(), lost func(error)) error {
	addrs := make(chan netlink.AddrUpdate, 64)
	links := make(chan netlink.LinkUpdate, 64)
	ended := func(err error) {
		select {
		case <-done:
		default:
			lost(err)
		}
	}
	if err := netlink.AddrSubscribeWithOptions(addrs, done, netlink.AddrSubscribeOptions{ErrorCallback: ended}); err != nil {
		return fmt.Errorf("watch addresses: %w", err)
	}
	if err := netlink.LinkSubscribeWithOptions(links, done, netlink.LinkSubscribeOptions{ErrorCallback: func(error) {}}); err != nil {
		return fmt.Errorf("watch links: %w", err)
	}
	go func() {
		for range addrs {
			changed()
		}
	}()
	go func() {
		for range links {
			changed()
		}
	}()
	return nil
}
