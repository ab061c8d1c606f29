// Package hostlinks sees which links of this host lead to networks, with their addresses and MTU, and which links of
// another CNI are too large for the tunnel.
package hostlinks

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	netlinkmsg "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane/rtnl"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
)

const (
	maxAge = 500 * time.Millisecond // how old the view may be where the kernel tells of no changes
	gather = 20 * time.Millisecond  // notifications that come together are one
)

// Link is a link of this host that leads to a network: it is up and has an address others could know. The ends of
// pods' links have none.
type Link struct {
	Name  string
	Kind  string
	MTU   int
	Addrs []netip.Prefix // with the network's length
	Pods  bool           // it leads to containers of this host, or to other hosts' inside another network's packets
	outer outer          // of one that puts what it carries into packets of another network
}

// outer is where the packets of an encapsulation go.
type outer struct {
	link string     // that they leave by; empty: not fixed
	from netip.Addr // their source; not valid: not fixed
	six  bool       // they are IPv6
}

func (l Link) equal(o Link) bool {
	return l.Name == o.Name && l.Kind == o.Kind && l.MTU == o.MTU && l.Pods == o.Pods && l.outer == o.outer &&
		slices.Equal(l.Addrs, o.Addrs)
}

// Links is the view of this host's links that every round of the loop asks for. While follow runs, the kernel's
// notifications keep it; else it is read when it is asked for, and at most so often.
type Links struct {
	mu       sync.Mutex
	followed bool
	at       time.Time
	links    []Link
	OfAgents func(name, kind string) bool // whether a link is a tunnel of an agent's; nil: none is
}

// Get returns the links as they are now, or were a moment ago. The slice is not to be changed.
func (h *Links) Get() []Link {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.followed && (h.at.IsZero() || time.Since(h.at) > maxAge) {
		h.read()
	}
	return h.links
}

// read renews the view and reports whether it is another one.
func (h *Links) read() bool {
	links, err := Read(h.OfAgents)
	h.at = time.Now()
	if err != nil || slices.EqualFunc(links, h.links, Link.equal) {
		return false
	}
	h.links = links
	return true
}

// Follow keeps the view until ctx ends, and calls changed when it is another one. Where the kernel gives no
// notifications it returns at once with the reason.
func (h *Links) Follow(ctx context.Context, changed func()) error {
	news, ended := make(chan struct{}, 1), make(chan error, 1)
	var listener rtnl.Listener
	if err := listener.Routing(0, rtnl.Links|rtnl.Addresses, func(_ []netlinkmsg.Message, err error) {
		if errors.Is(err, rtnl.ErrEnded) {
			ended <- err
		}
		select { // where some were lost all is read, too
		case news <- struct{}{}:
		default:
		}
	}); err != nil {
		return err
	}
	defer listener.Close()
	follows := func(f bool) {
		h.mu.Lock()
		h.followed = f
		h.mu.Unlock()
	}
	follows(true)
	defer follows(false)
	for { // the first look is at what changed before there were notifications
		h.mu.Lock()
		other := h.read()
		h.mu.Unlock()
		if other {
			changed()
		}
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			return err
		case <-news:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(gather):
		}
	}
}

// Read asks for all addresses once and for the links that have one: a host has more pods than networks.
func Read(ofAgents func(name, kind string) bool) ([]Link, error) {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("read this host's addresses: %w", err)
	}
	byLink := map[int][]netip.Prefix{}
	var order []int
	for _, a := range addrs {
		p := rtnl.Prefix(a.IPNet)
		if !p.Addr().IsGlobalUnicast() {
			continue
		}
		if !slices.Contains(order, a.LinkIndex) {
			order = append(order, a.LinkIndex)
		}
		byLink[a.LinkIndex] = append(byLink[a.LinkIndex], p)
	}
	var out []Link
	var bridges map[int]bool
	for _, index := range order {
		l, err := netlink.LinkByIndex(index)
		if err != nil {
			continue // it has gone meanwhile
		}
		at := l.Attrs()
		if at.Flags&net.FlagUp == 0 || at.Flags&net.FlagLoopback != 0 || ofAgents != nil && ofAgents(at.Name, l.Type()) {
			continue
		}
		h := Link{Name: at.Name, Kind: l.Type(), MTU: at.MTU, Addrs: byLink[index]}
		h.Pods = hostaddr.ForContainers(h.Name) || hostaddr.Encapsulates(h.Kind)
		if h.Kind == "bridge" && !h.Pods {
			if bridges == nil { // all links are read only where there is such a bridge
				bridges = podBridges()
			}
			h.Pods = bridges[index]
		}
		h.outer = outerOf(l)
		out = append(out, h)
	}
	if !slices.ContainsFunc(out, func(l Link) bool { return !l.Pods }) {
		for i := range out { // there is no other way out
			out[i].Pods = false
		}
	}
	return out, nil
}

func podBridges() map[int]bool {
	all, err := netlink.LinkList()
	if err != nil {
		return map[int]bool{}
	}
	return hostaddr.PodBridges(all)
}

// outerOf is where an encapsulation's packets go.
func outerOf(l netlink.Link) (o outer) {
	over, from := 0, net.IP(nil)
	switch l := l.(type) {
	case *netlink.Vxlan:
		over, from = l.VtepDevIndex, l.SrcAddr
	case *netlink.Iptun:
		over, from = int(l.Link), l.Local
	case *netlink.Gretun:
		over, from = int(l.Link), l.Local
	}
	if a := rtnl.Addr(from); a.IsValid() && !a.IsUnspecified() {
		o.from, o.six = a, a.Is6()
	}
	if over != 0 {
		if at, err := netlink.LinkByIndex(over); err == nil {
			o.link = at.Attrs().Name
		}
	}
	return o
}

// Addresses are the addresses of this host's links, without the tunnel's own and those of its containers.
func (h *Links) Addresses(tunnel string) []netip.Addr {
	out := slices.DeleteFunc(slices.Clone(h.Get()), func(l Link) bool { return l.Pods })
	return each(out, tunnel, netip.Prefix.Addr)
}

// Connected are the networks on this host's links, without the tunnel's own.
func (h *Links) Connected(tunnel string) []netip.Prefix {
	return each(h.Get(), tunnel, netip.Prefix.Masked)
}

func each[T any](links []Link, tunnel string, of func(netip.Prefix) T) (out []T) {
	for _, l := range links {
		for _, p := range l.Addrs {
			if l.Name != tunnel {
				out = append(out, of(p))
			}
		}
	}
	return out
}

// SmallestMTU is that of the smallest link which packets may leave by and which is not below floor; 0: there is none.
// Links of containers are smaller than the tunnel where they fit into it, and are no way out.
func (h *Links) SmallestMTU(tunnel string, floor int) int {
	least := 0
	for _, l := range h.Get() {
		if l.Name != tunnel && !l.Pods && l.MTU >= floor && (least == 0 || l.MTU < least) {
			least = l.MTU
		}
	}
	return least
}
