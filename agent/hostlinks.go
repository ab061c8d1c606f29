package agent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
)

// hostLinksAge is how old the view of this host's links may be. It is asked for in every round of the loop.
const hostLinksAge = 500 * time.Millisecond

// hostLink is a link of this host that leads to a network: it is up and has an address others could know. The ends of
// pods' links have none.
type hostLink struct {
	name  string
	mtu   int
	addrs []netip.Prefix // with the network's length
}

// hostLinks reads this host's links, at most so often.
type hostLinks struct {
	mu    sync.Mutex
	at    time.Time
	links []hostLink
}

func (h *hostLinks) get() []hostLink {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.at.IsZero() || time.Since(h.at) > hostLinksAge {
		if links, err := readHostLinks(); err == nil {
			h.links = links
		}
		h.at = time.Now()
	}
	return h.links
}

// readHostLinks asks for all addresses once and for the links that have one: a host has more pods than networks.
func readHostLinks() ([]hostLink, error) {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("read this host's addresses: %w", err)
	}
	byLink := map[int][]netip.Prefix{}
	var order []int
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ones, _ := a.Mask.Size()
		if ip = ip.Unmap(); !ok || !ip.IsGlobalUnicast() {
			continue
		}
		if !slices.Contains(order, a.LinkIndex) {
			order = append(order, a.LinkIndex)
		}
		byLink[a.LinkIndex] = append(byLink[a.LinkIndex], netip.PrefixFrom(ip, ones))
	}
	var out []hostLink
	for _, index := range order {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			continue // it has gone meanwhile
		}
		if at := l.Attrs(); at.Flags&net.FlagUp != 0 && at.Flags&net.FlagLoopback == 0 {
			out = append(out, hostLink{name: at.Name, mtu: at.MTU, addrs: byLink[index]})
		}
	}
	return out, nil
}

// hostAddresses are the addresses of this host's links, without the tunnel's own.
func (h *hostLinks) hostAddresses(tunnel string) []netip.Addr {
	return each(h.get(), tunnel, netip.Prefix.Addr)
}

// connected are the networks on this host's links, without the tunnel's own.
func (h *hostLinks) connected(tunnel string) []netip.Prefix {
	return each(h.get(), tunnel, netip.Prefix.Masked)
}

func each[T any](links []hostLink, tunnel string, of func(netip.Prefix) T) (out []T) {
	for _, l := range links {
		for _, p := range l.addrs {
			if l.name != tunnel {
				out = append(out, of(p))
			}
		}
	}
	return out
}

// smallestMTU is that of the smallest link which packets may leave by and WireGuard can use; 0: there is none.
func (h *hostLinks) smallestMTU(tunnel string) int {
	least := 0
	for _, l := range h.get() {
		if l.name != tunnel && l.mtu >= 1280+tunnelOverhead && (least == 0 || l.mtu < least) {
			least = l.mtu
		}
	}
	return least
}
