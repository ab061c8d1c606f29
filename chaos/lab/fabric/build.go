package fabric

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Interface names inside the lab's namespaces.
const (
	HostLink = "eth0" // a host's only link
	lanLink  = "lan"  // a router's bridge towards its hosts
	wanLink  = "wan"  // a router's link towards the core
)

// coreAddr is the core's own address and every router's next hop.
var coreAddr = netip.MustParseAddr("198.19.255.254")

// gateway6 is the link-local address of the next hop outwards: the core's on each veth to a router, a
// router's on its LAN.
var gateway6 = netip.MustParseAddr("fe80::1")

// Build makes the namespaces, links, routes, NATs and stamps of the plan. After an error, or when ctx
// ends, what was made so far is left for Teardown.
func Build(ctx context.Context, p Plan) error {
	if err := create(Core(p.Lab)); err != nil {
		return err
	}
	if err := prepare(Core(p.Lab), true); err != nil {
		return err
	}
	if err := on(Core(p.Lab), func(h *netlink.Handle) error {
		return addrAdd(h, "lo", netip.PrefixFrom(coreAddr, 32))
	}); err != nil {
		return err
	}
	for _, s := range p.Sites {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := buildSite(p, s); err != nil {
			return fmt.Errorf("site %s: %w", s.Name, err)
		}
	}
	return ready(ctx, p)
}

func buildSite(p Plan, s Site) error {
	router := Router(p.Lab, s.Name)
	if err := create(router); err != nil {
		return err
	}
	if err := prepare(router, true); err != nil {
		return err
	}
	next := coreAddr
	if up, ok := p.Site(s.Behind); ok {
		next = up.gateway()
		if err := connectRouter(p.Lab, s, up, router); err != nil {
			return err
		}
	} else if err := connectCore(p.Lab, s, router); err != nil {
		return err
	}
	if s.LAN6.IsValid() {
		if err := routeToSite6(p, s); err != nil {
			return err
		}
	}
	if err := on(router, func(h *netlink.Handle) error { return routerSide(h, s, next) }); err != nil {
		return err
	}
	for _, host := range p.hostsOf(s.Name) {
		if err := buildHost(p.Lab, s, host); err != nil {
			return fmt.Errorf("node %s: %w", host.Name, err)
		}
	}
	if err := translate(router, s, p.clientsOf(s)); err != nil {
		return fmt.Errorf("nat %s: %w", s.NAT, err)
	}
	return delay(p, s, router)
}

// gateway is the router's IPv4 address in its LAN.
func (s Site) gateway() netip.Addr { return s.LAN.Addr().Next() }

// outsideLL is the router's link-local address on its link outwards.
func (s Site) outsideLL() netip.Addr {
	return netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 14: 1, 15: byte(s.Number)})
}

// coreLink names the far end of the veth from a site's router: in the core, or in the router that it is behind.
func coreLink(s Site) string { return "s" + strconv.Itoa(s.Number) }

func connectCore(lab string, s Site, router string) error {
	if err := veth(Core(lab), coreLink(s), router, wanLink); err != nil {
		return err
	}
	return on(Core(lab), func(h *netlink.Handle) error {
		name := coreLink(s)
		if err := linkUp(h, name); err != nil {
			return err
		}
		if err := routeAdd(h, name, netip.PrefixFrom(s.Public, 32), netip.Addr{}); err != nil {
			return err
		}
		public := netip.PrefixFrom(s.Public, 24).Masked()
		if err := routeAdd(h, name, public, s.Public); err != nil {
			return err
		}
		return addrAdd(h, name, netip.PrefixFrom(gateway6, 64))
	})
}

// connectRouter puts a router into the network of the site that it is behind.
func connectRouter(lab string, s, up Site, router string) error {
	outer := Router(lab, up.Name)
	if err := veth(outer, coreLink(s), router, wanLink); err != nil {
		return err
	}
	return on(outer, func(h *netlink.Handle) error { return enslave(h, coreLink(s), lanLink) })
}

// routeToSite6 leads a site's IPv6 network to its router.
func routeToSite6(p Plan, s Site) error {
	up, nested := p.Site(s.Behind)
	first := s
	if nested {
		first = up
	}
	if err := on(Core(p.Lab), func(h *netlink.Handle) error {
		return routeAdd(h, coreLink(first), s.LAN6, first.outsideLL())
	}); err != nil || !nested {
		return err
	}
	return on(Router(p.Lab, up.Name), func(h *netlink.Handle) error { return routeAdd(h, lanLink, s.LAN6, s.outsideLL()) })
}

// routerSide sets up a router's links; next is its next hop outwards.
func routerSide(h *netlink.Handle, s Site, next netip.Addr) error {
	// A bridge without an address of its own takes the lowest of its ports' and changes it with them: for half a minute
	// hosts would send to an address that the router has no more.
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 0} // locally administered
	rand.Read(mac[1:])
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: lanLink, HardwareAddr: mac}}
	snooping := false
	bridge.MulticastSnooping = &snooping // else neighbour discovery waits for a querier
	if err := h.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge %s: %w", lanLink, err)
	}
	for _, name := range []string{lanLink, wanLink} {
		if err := linkUp(h, name); err != nil {
			return err
		}
	}
	// Each router forwards IPv6, also for sites behind it; hosts have it where the site has a network.
	steps := []error{
		addrAdd(h, lanLink, netip.PrefixFrom(s.gateway(), 24)),
		addrAdd(h, wanLink, netip.PrefixFrom(s.outsideLL(), 64)),
		addrAdd(h, lanLink, netip.PrefixFrom(gateway6, 64)),
		routeAdd(h, wanLink, netip.PrefixFrom(next, 32), netip.Addr{}),
		routeAdd(h, wanLink, netip.PrefixFrom(netip.IPv4Unspecified(), 0), next),
		routeAdd(h, wanLink, netip.PrefixFrom(netip.IPv6Unspecified(), 0), gateway6),
	}
	if !s.NAT.public() {
		steps = append(steps, addrAdd(h, wanLink, netip.PrefixFrom(s.Outside, 32)))
	}
	if s.LAN6.IsValid() {
		steps = append(steps, addrAdd(h, lanLink, netip.PrefixFrom(s.LAN6.Addr().Next(), 64)))
	}
	return errors.Join(steps...)
}

func buildHost(lab string, s Site, host Host) error {
	name, router := HostNS(lab, host.Name), Router(lab, s.Name)
	if err := create(name); err != nil {
		return err
	}
	if err := prepare(name, false); err != nil {
		return err
	}
	port := hostPort(host)
	if err := veth(router, port, name, HostLink); err != nil {
		return err
	}
	if err := on(router, func(h *netlink.Handle) error { return enslave(h, port, lanLink) }); err != nil {
		return err
	}
	if err := on(name, func(h *netlink.Handle) error {
		if err := linkUp(h, HostLink); err != nil {
			return err
		}
		return number(h, s, host)
	}); err != nil {
		return err
	}
	return installStamp(name, host.Number)
}

// hostPort names the router's end of a host's link.
func hostPort(host Host) string { return "h" + strconv.Itoa(host.Number) }

// number gives a host's link its addresses and routes.
func number(h *netlink.Handle, s Site, host Host) error {
	var steps []error
	if host.Addr.IsValid() {
		steps = append(steps,
			addrAdd(h, HostLink, netip.PrefixFrom(host.Addr, 24)),
			routeAdd(h, HostLink, netip.PrefixFrom(netip.IPv4Unspecified(), 0), s.gateway()))
	}
	if host.Addr6.IsValid() {
		steps = append(steps,
			addrAdd(h, HostLink, netip.PrefixFrom(host.Addr6, 64)),
			routeAdd(h, HostLink, netip.PrefixFrom(netip.IPv6Unspecified(), 0), gateway6))
	}
	return errors.Join(steps...)
}

// prepare sets what a new namespace needs before its first link: addresses usable at once (no
// duplicate detection), no autoconfiguration, and for routers forwarding.
func prepare(name string, router bool) error {
	settings := [][2]string{
		{"net/ipv6/conf/all/disable_ipv6", "0"}, {"net/ipv6/conf/default/disable_ipv6", "0"},
		{"net/ipv6/conf/all/accept_dad", "0"}, {"net/ipv6/conf/default/accept_dad", "0"},
		{"net/ipv6/conf/default/dad_transmits", "0"},
		{"net/ipv6/conf/all/accept_ra", "0"}, {"net/ipv6/conf/default/accept_ra", "0"},
		{"net/ipv4/conf/all/rp_filter", "0"}, {"net/ipv4/conf/default/rp_filter", "0"},
	}
	if router {
		settings = append(settings, [][2]string{
			{"net/ipv4/ip_forward", "1"}, {"net/ipv6/conf/all/forwarding", "1"},
			{"net/ipv4/conf/all/send_redirects", "0"}, {"net/ipv4/conf/default/send_redirects", "0"},
			// Where the machine has br_netfilter, the LAN's bridge would translate and then bridge what has to
			// be routed: a packet that goes back out of the port that it came from would be lost.
			{"net/bridge/bridge-nf-call-iptables", "0"}, {"net/bridge/bridge-nf-call-ip6tables", "0"},
		}...)
	}
	if err := In(name, func() error {
		for _, s := range settings {
			if err := sysctl(s[0], s[1]); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	return on(name, func(h *netlink.Handle) error { return linkUp(h, "lo") })
}

// on gives fn a netlink handle inside the named namespace.
func on(name string, fn func(*netlink.Handle) error) error { return onPath(Path(name), fn) }

// onPath is on for a namespace at a path.
func onPath(path string, fn func(*netlink.Handle) error) error {
	name := strings.TrimPrefix(path, Dir+"/")
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("namespace %s: %w", name, err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns)
	if err != nil {
		return fmt.Errorf("netlink in namespace %s: %w", name, err)
	}
	defer h.Close()
	if err := fn(h); err != nil {
		return fmt.Errorf("in namespace %s: %w", name, err)
	}
	return nil
}

// lookTries is how often a list is asked for that was changed while the kernel gave it.
const lookTries = 20

// look is onPath for what only reads. fn begins anew when a list was changed meanwhile.
func look(path string, fn func(*netlink.Handle) error) error {
	return onPath(path, func(h *netlink.Handle) (err error) {
		for range lookTries {
			if err = fn(h); !errors.Is(err, netlink.ErrDumpInterrupted) {
				break
			}
		}
		return err
	})
}

// veth makes a pair directly between two namespaces, so that the caller's own never sees it.
func veth(ns, link, peerNS, peerLink string) error {
	peer, err := open(peerNS)
	if err != nil {
		return err
	}
	defer peer.Close()
	return on(ns, func(h *netlink.Handle) error {
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: link}, PeerName: peerLink,
			PeerNamespace: netlink.NsFd(int(peer))}
		if err := h.LinkAdd(v); err != nil {
			return fmt.Errorf("add veth %s to %s in %s: %w", link, peerLink, peerNS, err)
		}
		return nil
	})
}

func linkUp(h *netlink.Handle, name string) error {
	l, err := h.LinkByName(name)
	if err == nil {
		err = h.LinkSetUp(l)
	}
	if err != nil {
		return fmt.Errorf("bring up %s: %w", name, err)
	}
	return nil
}

func enslave(h *netlink.Handle, port, bridge string) error {
	l, err := h.LinkByName(port)
	if err != nil {
		return fmt.Errorf("port %s: %w", port, err)
	}
	b, err := h.LinkByName(bridge)
	if err == nil {
		err = h.LinkSetMaster(l, b)
	}
	if err != nil {
		return fmt.Errorf("attach %s to %s: %w", port, bridge, err)
	}
	return linkUp(h, port)
}

func addrAdd(h *netlink.Handle, link string, p netip.Prefix) error {
	a := &netlink.Addr{IPNet: ipNet(p)}
	if p.Addr().Is6() {
		a.Flags = unix.IFA_F_NODAD // usable at once
	}
	l, err := h.LinkByName(link)
	if err == nil {
		err = h.AddrAdd(l, a)
	}
	if err != nil {
		return fmt.Errorf("add %s to %s: %w", p, link, err)
	}
	return nil
}

// routeAdd adds a route out of a link: on the link itself without via, else through via, which is
// taken to be on the link whatever the link's own addresses say.
func routeAdd(h *netlink.Handle, link string, to netip.Prefix, via netip.Addr) error {
	l, err := h.LinkByName(link)
	if err != nil {
		return fmt.Errorf("route %s: %w", to, err)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(to), Scope: netlink.SCOPE_LINK}
	if via.IsValid() {
		r.Gw, r.Scope, r.Flags = via.AsSlice(), netlink.SCOPE_UNIVERSE, int(netlink.FLAG_ONLINK)
	}
	if err := h.RouteAdd(r); err != nil {
		return fmt.Errorf("route %s via %s on %s: %w", to, via, link, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// ErrNoNetem says that this kernel cannot delay packets.
var ErrNoNetem = errors.New("this kernel has no netem (sch_netem), which `delay` needs: leave delay out, or use a " +
	"kernel that has it")

// delay holds packets back between the site and the core, in each direction.
func delay(p Plan, s Site, router string) error {
	if s.Delay == 0 {
		return nil
	}
	outer := Core(p.Lab)
	if s.Behind != "" {
		outer = Router(p.Lab, s.Behind)
	}
	for ns, link := range map[string]string{outer: coreLink(s), router: wanLink} {
		if err := on(ns, func(h *netlink.Handle) error {
			l, err := h.LinkByName(link)
			if err != nil {
				return err
			}
			q := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
				Parent: netlink.HANDLE_ROOT},
				netlink.NetemQdiscAttrs{Latency: uint32(s.Delay.Microseconds()), Limit: 100_000})
			if err := h.QdiscAdd(q); err != nil {
				return fmt.Errorf("delay on %s: %w: %w", link, ErrNoNetem, err)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}
