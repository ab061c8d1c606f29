package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// NAT is the kind of address translation between a site and the core.
type NAT string

// The kinds that the lab can make.
const (
	None                NAT = "none"                 // public addresses, nothing in between
	OneToOne            NAT = "one-to-one"           // every host has a public address of its own, translated both ways
	FullCone            NAT = "full-cone"            // endpoint-independent mapping and filtering
	RestrictedCone      NAT = "restricted-cone"      // endpoint-independent mapping, address-dependent filtering
	PortRestrictedCone  NAT = "port-restricted-cone" // endpoint-independent mapping, address-and-port-dependent filtering
	Symmetric           NAT = "symmetric"            // address-and-port-dependent mapping and filtering, ports at random
	SymmetricSequential NAT = "symmetric-sequential" // the same, and each new destination takes the next port
	// a port-restricted cone behind a carrier's NAT, which is a full cone (RFC 6888)
	Double     NAT = "double"
	UDPBlocked NAT = "udp-blocked" // TCP passes through a NAT, UDP does not pass
)

// NATs lists the kinds, in the order of growing hostility.
func NATs() []NAT {
	return []NAT{None, OneToOne, FullCone, RestrictedCone, PortRestrictedCone, Symmetric, SymmetricSequential,
		Double, UDPBlocked}
}

// public tells whether hosts of the site carry public addresses themselves.
func (n NAT) public() bool { return n == None }

// cone tells whether UDP mappings are the lab's own deterministic ones.
func (n NAT) cone() bool {
	return n == FullCone || n == RestrictedCone || n == PortRestrictedCone || n == Double
}

// CanHairpin tells the kinds whose filtering lets anything come back from the NAT's own address.
func (n NAT) CanHairpin() bool { return n.cone() || n == OneToOne }

// CanMap tells the kinds that a port-mapping daemon has a use for: one address that many share.
func (n NAT) CanMap() bool { return n.cone() || n.symmetric() }

func (n NAT) symmetric() bool { return n == Symmetric || n == SymmetricSequential }

// SiteSpec asks for a site.
type SiteSpec struct {
	Name    string
	NAT     NAT
	IPv6    bool          // hosts have global IPv6 addresses, behind a stateful firewall unless the NAT kind is open
	NoIPv4  bool          // hosts have no IPv4 address
	Hairpin bool          // what hosts send to the NAT's own address comes back in, if its filtering lets it
	Portmap []string      // port-mapping protocols that the router speaks: PCP, NATPMP, UPnP
	Behind  string        // the site whose network the router is in; "": the core
	LAN     netip.Prefix  // the hosts' network, a /24; zero: one that no other site has
	Delay   time.Duration // one way, between the site and the core; needs netem in the kernel
}

// HostSpec asks for a host.
type HostSpec struct{ Name, Site string }

// Plan is a lab's network, fully numbered.
type Plan struct {
	Lab   string
	Sites []Site // those that others are behind come first
	Hosts []Host
}

// Site is one router and the LAN behind it.
type Site struct {
	SiteSpec
	Number     int
	LAN        netip.Prefix // the hosts' IPv4 network
	Outside    netip.Addr   // the router's own address towards the core or the site that it is behind
	Public     netip.Addr   // as which the core sees it
	LAN6       netip.Prefix // zero: no IPv6
	Generation int          // how often the router has forgotten its mappings

	carrier bool // made for a site of kind Double
	outer   bool // routers of other sites are in its network
	index   int  // of the router among the clients of the site that it is behind
	clients int  // how many indices of this site's own clients are taken
}

// Host is one namespace with one interface, eth0.
type Host struct {
	HostSpec
	Number int        // 1..63: its stamp
	Addr   netip.Addr // on eth0; zero: no IPv4
	Public netip.Addr // what the core sees of it: its own or its NAT's address; zero: no IPv4
	Addr6  netip.Addr // zero: no IPv6

	index int // among the clients of its site
}

// Limits: a stamp is a DSCP value (six bits, zero means unstamped); sites take one /24 each.
const (
	MaxHosts = 63
	MaxSites = 200
)

// NewPlan numbers a lab. Sites get 198.18.N.0/24 (RFC 2544) and 2001:db8:N::/64 (RFC 3849), LANs behind
// a NAT 192.168.N.0/24, and where other sites are behind it 100.64.N.0/24 (RFC 6598), all distinct.
// A site whose router maps ports has 11.18.N.0/24 outside: miniupnpd refuses to work on addresses that
// are reserved for tests, and in a lab's namespaces any address will do.
func NewPlan(lab string, sites []SiteSpec, hosts []HostSpec) (Plan, error) {
	if len(hosts) > MaxHosts {
		return Plan{}, fmt.Errorf("%d nodes: a lab holds at most %d, because each needs a DSCP value of its own",
			len(hosts), MaxHosts)
	}
	p := Plan{Lab: lab}
	for i, s := range sites {
		p.Sites = append(p.Sites, newSite(s, i+1))
	}
	for i := range sites { // carriers have the numbers after all others
		if s := &p.Sites[i]; s.NAT == Double {
			c := newSite(SiteSpec{Name: s.Name + carrierSuffix, NAT: FullCone, Hairpin: s.Hairpin}, len(p.Sites)+1)
			c.carrier, s.Behind = true, c.Name
			p.Sites = append(p.Sites, c)
		}
	}
	if len(p.Sites) > MaxSites {
		return Plan{}, fmt.Errorf("%d sites: a lab holds at most %d, and a double NAT counts twice", len(p.Sites), MaxSites)
	}
	if err := p.nest(); err != nil {
		return Plan{}, err
	}
	for i, h := range hosts {
		site := p.site(h.Site)
		if site == nil {
			return Plan{}, fmt.Errorf("node %s: no site %q", h.Name, h.Site)
		}
		p.Hosts = append(p.Hosts, newHost(site, h, i+1))
	}
	return p, nil
}

// carrierSuffix ends the name of the site that a double NAT's router is behind. No name in a lab file
// has a dot.
const carrierSuffix = ".carrier"

func newSite(spec SiteSpec, number int) Site {
	n := byte(number)
	net := [4]byte{198, 18, n, 0}
	if len(spec.Portmap) > 0 {
		net[0] = 11
	}
	s := Site{SiteSpec: spec, Number: number, LAN: netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, n, 0}), 24)}
	s.Outside = at(netip.AddrFrom4(net), 1)
	s.Public = s.Outside
	switch {
	case s.NAT.public():
		s.LAN = netip.PrefixFrom(netip.AddrFrom4(net), 24)
	case spec.LAN.IsValid():
		s.LAN = spec.LAN
	}
	if s.IPv6 {
		s.LAN6 = netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0, n}), 64)
	}
	return s
}

// at is the address with the given last byte in the /24 of a.
func at(a netip.Addr, last byte) netip.Addr {
	b := a.As4()
	b[3] = last
	return netip.AddrFrom4(b)
}

// nest puts the routers of sites that are behind others into their networks, and those others first.
func (p *Plan) nest() error {
	for i := range p.Sites {
		s := &p.Sites[i]
		if s.Behind == "" {
			continue
		}
		up := p.site(s.Behind)
		switch {
		case up == nil:
			return fmt.Errorf("site %s: it is behind %q, and there is no site of that name", s.Name, s.Behind)
		case up.Behind != "":
			return fmt.Errorf("site %s: it is behind %s, which is behind %s: allowed is one behind another", s.Name,
				up.Name, up.Behind)
		}
		up.outer = true
		if !up.NAT.public() && !up.SiteSpec.LAN.IsValid() {
			up.LAN = netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64, byte(up.Number), 0}), 24)
		}
	}
	for i := range p.Sites {
		s := &p.Sites[i]
		if s.Behind == "" {
			continue
		}
		up := p.site(s.Behind)
		// Hosts have the addresses below 100. A carrier's first client would keep its ports: leave that out.
		s.index = up.nextClient()
		if up.carrier {
			s.index = up.nextClient()
		}
		s.Outside = at(up.LAN.Addr(), byte(100+s.index))
		s.Public = up.seenAs(s.Outside)
	}
	slices.SortStableFunc(p.Sites, func(a, b Site) int { return cmp.Compare(a.depth(), b.depth()) })
	return nil
}

func (s *Site) depth() int {
	if s.Behind != "" {
		return 1
	}
	return 0
}

// nextClient gives out the next index among the site's clients.
func (s *Site) nextClient() int {
	s.clients++
	return s.clients - 1
}

// outsideOf is what a client's address becomes on the router's far side.
func (s *Site) outsideOf(client netip.Addr) netip.Addr {
	switch s.NAT {
	case None:
		return client
	case OneToOne:
		return at(s.Outside, client.As4()[3])
	}
	return s.Outside
}

// seenAs is what the core sees of a client.
func (s *Site) seenAs(client netip.Addr) netip.Addr {
	if s.Behind != "" {
		return s.Public
	}
	return s.outsideOf(client)
}

func newHost(site *Site, spec HostSpec, number int) Host {
	host := Host{HostSpec: spec, Number: number}
	host.place(site)
	return host
}

// Address is the host's IPv4 address, or its IPv6 address where it has no other.
func (h Host) Address() netip.Addr {
	if h.Addr.IsValid() {
		return h.Addr
	}
	return h.Addr6
}

// movedHosts is where the last bytes of those begin who have got another address in the same network.
const movedHosts = 140

// place gives a host its addresses in a site. In a network that the lab file names hosts are numbered
// from 11 on, so that two sites with the same network have the same addresses.
func (h *Host) place(site *Site) {
	last := byte(10 + h.Number)
	if again := h.Address(); h.Site == site.Name && again.IsValid() && again.AsSlice()[len(again.AsSlice())-1] == last {
		last = byte(movedHosts + h.Number)
	}
	h.Site, h.index = site.Name, site.nextClient()
	if site.SiteSpec.LAN.IsValid() {
		last = byte(11 + h.index)
	}
	h.Addr, h.Public, h.Addr6 = netip.Addr{}, netip.Addr{}, netip.Addr{}
	if !site.NoIPv4 {
		h.Addr = at(site.LAN.Addr(), last)
		h.Public = site.seenAs(h.Addr)
	}
	if site.LAN6.IsValid() {
		b := site.LAN6.Addr().As16()
		b[15] = last
		h.Addr6 = netip.AddrFrom16(b)
	}
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
	if s := p.site(name); s != nil {
		return *s, true
	}
	return Site{}, false
}

func (p Plan) site(name string) *Site {
	for i := range p.Sites {
		if p.Sites[i].Name == name {
			return &p.Sites[i]
		}
	}
	return nil
}

// client is what a NAT translates: a host, or the router of a site behind it.
type client struct {
	addr, outside netip.Addr
	index         int
}

func (p Plan) clientsOf(s Site) []client {
	var out []client
	for _, h := range p.hostsOf(s.Name) {
		if h.Addr.IsValid() {
			out = append(out, client{h.Addr, s.outsideOf(h.Addr), h.index})
		}
	}
	for _, b := range p.behind(s.Name) {
		out = append(out, client{b.Outside, s.outsideOf(b.Outside), b.index})
	}
	return out
}

// behind lists the sites whose routers are in a site's network.
func (p Plan) behind(site string) []Site {
	var out []Site
	for _, s := range p.Sites {
		if s.Behind == site {
			out = append(out, s)
		}
	}
	return out
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

// CheckSiteName refuses site names whose router's namespace would be taken for another lab's core.
func CheckSiteName(name string) error {
	if name == "inet" || strings.HasSuffix(name, "-inet") {
		return fmt.Errorf("site name %q is kept for the lab's core: choose one that does not end in \"inet\"", name)
	}
	return nil
}

// CheckNodeName refuses node names whose namespace would be taken for another's.
func CheckNodeName(name string) error {
	switch {
	case name == "inet", strings.HasPrefix(name, "r-"), strings.HasSuffix(name, "-inet"):
		return fmt.Errorf("node name %q is kept for the lab's core and routers: choose one that is not \"inet\", does not "+
			"begin with \"r-\" and does not end in \"-inet\"", name)
	}
	return nil
}
