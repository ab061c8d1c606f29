package fabric

import (
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// NAT is the kind of address translation between a site and the core.
type NAT string

// The kinds that this build can make.
const (
	None               NAT = "none"                 // public addresses, nothing in between
	OneToOne           NAT = "one-to-one"           // every host has a public address of its own, translated both ways
	FullCone           NAT = "full-cone"            // endpoint-independent mapping and filtering
	RestrictedCone     NAT = "restricted-cone"      // endpoint-independent mapping, address-dependent filtering
	PortRestrictedCone NAT = "port-restricted-cone" // endpoint-independent mapping, address-and-port-dependent filtering
	Symmetric          NAT = "symmetric"            // address-and-port-dependent mapping and filtering
	UDPBlocked         NAT = "udp-blocked"          // TCP passes through a NAT, UDP does not pass
)

// NATs lists the kinds, in the order of growing hostility.
func NATs() []NAT {
	return []NAT{None, OneToOne, FullCone, RestrictedCone, PortRestrictedCone, Symmetric, UDPBlocked}
}

// public tells whether hosts of the site carry public addresses themselves.
func (n NAT) public() bool { return n == None }

// cone tells whether UDP mappings are the lab's own deterministic ones.
func (n NAT) cone() bool { return n == FullCone || n == RestrictedCone || n == PortRestrictedCone }

// SiteSpec asks for a site.
type SiteSpec struct {
	Name  string
	NAT   NAT
	IPv6  bool          // hosts have global IPv6 addresses, behind a stateful firewall unless the NAT kind is open
	Delay time.Duration // one way, between the site and the core; needs netem in the kernel
}

// HostSpec asks for a host.
type HostSpec struct{ Name, Site string }

// Plan is a lab's network, fully numbered.
type Plan struct {
	Lab   string
	Sites []Site
	Hosts []Host
}

// Site is one router and the LAN behind it.
type Site struct {
	SiteSpec
	Number int
	LAN    netip.Prefix // the hosts' IPv4 network
	Public netip.Addr   // the router's own public IPv4 address
	LAN6   netip.Prefix // zero: no IPv6
}

// Host is one namespace with one interface, eth0.
type Host struct {
	HostSpec
	Number int        // 1..63: its stamp
	Addr   netip.Addr // on eth0
	Public netip.Addr // what the core sees of it: its own or its NAT's address
	Addr6  netip.Addr // zero: no IPv6
}

// Limits: a stamp is a DSCP value (six bits, zero means unstamped); sites take one /24 each.
const (
	MaxHosts = 63
	MaxSites = 200
)

// NewPlan numbers a lab. Sites get 198.18.N.0/24 (RFC 2544) and 2001:db8:N::/64 (RFC 3849), LANs behind
// a NAT 192.168.N.0/24, all distinct.
func NewPlan(lab string, sites []SiteSpec, hosts []HostSpec) (Plan, error) {
	if len(hosts) > MaxHosts {
		return Plan{}, fmt.Errorf("%d nodes: a lab holds at most %d, because each needs a DSCP value of its own", len(hosts), MaxHosts)
	}
	if len(sites) > MaxSites {
		return Plan{}, fmt.Errorf("%d sites: a lab holds at most %d", len(sites), MaxSites)
	}
	p := Plan{Lab: lab}
	byName := map[string]*Site{}
	for i, s := range sites {
		n := byte(i + 1)
		site := Site{SiteSpec: s, Number: i + 1, Public: netip.AddrFrom4([4]byte{198, 18, n, 1})}
		site.LAN = netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, n, 0}), 24)
		if s.NAT.public() {
			site.LAN = netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, n, 0}), 24)
		}
		if s.IPv6 {
			site.LAN6 = netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0, n}), 64)
		}
		p.Sites = append(p.Sites, site)
	}
	for i := range p.Sites {
		byName[p.Sites[i].Name] = &p.Sites[i]
	}
	for i, h := range hosts {
		site, ok := byName[h.Site]
		if !ok {
			return Plan{}, fmt.Errorf("node %s: no site %q", h.Name, h.Site)
		}
		p.Hosts = append(p.Hosts, newHost(site, h, i+1))
	}
	return p, nil
}

func newHost(site *Site, spec HostSpec, number int) Host {
	host := Host{HostSpec: spec, Number: number}
	b := site.LAN.Addr().As4()
	b[3] = byte(10 + number)
	host.Addr = netip.AddrFrom4(b)
	host.Public = site.Public
	switch site.NAT {
	case None:
		host.Public = host.Addr
	case OneToOne:
		pub := site.Public.As4()
		pub[3] = byte(10 + number)
		host.Public = netip.AddrFrom4(pub)
	}
	if site.LAN6.IsValid() {
		b := site.LAN6.Addr().As16()
		b[15] = byte(10 + number)
		host.Addr6 = netip.AddrFrom16(b)
	}
	return host
}

// Host finds a host by name.
func (p Plan) Host(name string) (Host, bool) {
	for _, h := range p.Hosts {
		if h.Name == name {
			return h, true
		}
	}
	return Host{}, false
}

// Site finds a site by name.
func (p Plan) Site(name string) (Site, bool) {
	for _, s := range p.Sites {
		if s.Name == name {
			return s, true
		}
	}
	return Site{}, false
}

func (p Plan) hostsOf(site string) []Host {
	var out []Host
	for _, h := range p.Hosts {
		if h.Site == site {
			out = append(out, h)
		}
	}
	return out
}

// Prefix begins the names of all namespaces of a lab.
func Prefix(lab string) string { return "sk" + lab + "-" }

// Core names the namespace that stands for the internet.
func Core(lab string) string { return Prefix(lab) + "inet" }

// Router names the namespace of a site's router.
func Router(lab, site string) string { return Prefix(lab) + "r-" + site }

// HostNS names the namespace of a host.
func HostNS(lab, host string) string { return Prefix(lab) + host }

// CheckNodeName refuses node names whose namespace would be taken for another's.
func CheckNodeName(name string) error {
	switch {
	case name == "inet", strings.HasPrefix(name, "r-"), strings.HasSuffix(name, "-inet"):
		return fmt.Errorf("node name %q is kept for the lab's core and routers: choose one that is not \"inet\", does not begin with \"r-\" and does not end in \"-inet\"", name)
	}
	return nil
}
