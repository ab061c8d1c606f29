package hostaddr

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/internal/addr"
)

// maxHosts bounds the host candidates of one node; a record holds 64 candidates of all kinds.
const maxHosts = 16

// tunnels are link types whose addresses lie inside some tunnel.
var tunnels = []string{"wireguard", "tun", "tuntap", "vxlan", "geneve", "gre", "gretap", "ip6gre", "ipip", "ip6tnl",
	"sit", "vti", "xfrm", "ppp"}

// containers are name prefixes of links whose addresses mean something only inside this host.
var containers = []string{
	"docker", "br-", "cni", "cbr", "flannel", "cali", "cilium", "lxc", "lxd", "virbr", "podman", "weave", "kube-",
	"nodelocaldns", "antrea-", "ovn-k8s-", "ovn-", "kilo",
}

// encapsulations are link types by which another network, such as a CNI's, rides on this host's own.
var encapsulations = []string{"vxlan", "geneve", "gre", "gretap", "ip6gre", "ipip", "ip6tnl", "sit"}

// Encapsulates reports whether a link puts what it carries into packets of another network.
func Encapsulates(kind string) bool { return slices.Contains(encapsulations, kind) }

// ForContainers reports whether a link, by its name, leads to containers or virtual machines of this host.
func ForContainers(name string) bool {
	return slices.ContainsFunc(containers, func(p string) bool { return strings.HasPrefix(name, p) })
}

// link and address are what the kernel says, as far as it matters here.
type link struct {
	index    int
	name     string
	kind     string
	up       bool
	loopback bool
	pods     bool // a bridge that has nothing but the ends of pods' links
}

type address struct {
	link     int
	addr     netip.Addr
	bits     int  // of its network
	unusable bool // tentative, failed, deprecated or temporary
}

// hostAddresses picks the addresses that others may reach: on links that are up and no tunnels, global in scope, and
// not in the overlay. Public ones come first, IPv4 before IPv6.
func hostAddresses(links []link, addrs []address, skipLinks []string, skip []netip.Prefix) []netip.Addr {
	usable := map[int]bool{}
	for _, l := range links {
		usable[l.index] = l.up && !l.loopback && !l.pods && !ForContainers(l.name) && !slices.Contains(tunnels, l.kind) &&
			!slices.Contains(skipLinks, l.name)
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
