// Package testgw gives tests two gateways that translate a client's packets, of the real kernel: a client, the router
// before the gateways, and a target on the gateways' LAN, each in a network namespace.
//
//	client ── router ─┬─ A ─┐
//	                  └─ B ─┴─ LAN ── target
package testgw

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane/hold"
	"github.com/skeinmesh/skein/dataplane/nftable"
	"github.com/skeinmesh/skein/internal/testns"
)

// Addresses of the scene. The gateways translate to Source4 and Source6, which no kernel has as its own.
var (
	Client4, Client6 = netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd01::2")
	Target4, Target6 = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8:2::10")
	Source4, Source6 = netip.MustParseAddr("192.0.2.99"), netip.MustParseAddr("2001:db8:2::99")
)

// Scene is the scene; at first nothing leads to a gateway.
type Scene struct {
	t                      testing.TB
	Client, Router, Target *testns.NS
	A, B                   *Gateway
}

// Gateway is one of the two; its link lan has LAN4 and LAN6.
type Gateway struct {
	*testns.NS
	t          testing.TB
	inside     [2]netip.Addr // where the router finds it
	LAN4, LAN6 netip.Addr
	nft        *nftables.Conn
	table      *nftables.Table
	raw, fwd   *nftables.Chain
	held       []*nftables.Rule
}

// Path is the namespace's file.
func Path(n *testns.NS) string { return filepath.Join("/run/netns", n.Name) }

// New makes the scene.
func New(t testing.TB) *Scene {
	s := &Scene{t: t, Client: testns.New(t, "cl"), Router: testns.New(t, "ro"), Target: testns.New(t, "ta")}
	lan := NewLAN(t)
	prefixes := func(a ...string) (out []netip.Prefix) {
		for _, s := range a {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	for _, n := range []*testns.NS{s.Client, s.Router, s.Target} {
		prompt(n)
	}
	testns.Link(s.Client, s.Router, "eth0", prefixes("10.1.0.2/24", "fd01::2/64"), prefixes("10.1.0.1/24", "fd01::1/64"))
	forwarding(s.Router)
	Route(s.Client, "0.0.0.0/0", "10.1.0.1")
	Route(s.Client, "::/0", "fd01::1")
	lan.Attach(s.Target, prefixes("192.0.2.10/24", "2001:db8:2::10/64"))
	gateway := func(name, in string, lanAddrs ...string) *Gateway {
		g := &Gateway{NS: testns.New(t, "gw"+name), t: t}
		prompt(g.NS)
		p := prefixes(in+".2/24", "fd0"+name+"::2/64")
		testns.Link(s.Router, g.NS, "gw"+name, prefixes(in+".1/24", "fd0"+name+"::1/64"), p)
		g.inside = [2]netip.Addr{p[0].Addr(), p[1].Addr()}
		addrs := prefixes(lanAddrs...)
		g.LAN4, g.LAN6 = addrs[0].Addr(), addrs[1].Addr()
		forwarding(g.NS)
		Route(g.NS, "10.1.0.0/24", in+".1")
		Route(g.NS, "fd01::/64", "fd0"+name+"::1")
		lan.Attach(g.NS, addrs)
		g.rules()
		return g
	}
	s.A = gateway("a", "10.2.1", "192.0.2.1/24", "2001:db8:2::1/64")
	s.B = gateway("b", "10.2.2", "192.0.2.2/24", "2001:db8:2::2/64")
	return s
}

// LAN is a segment for Ethernet.
type LAN struct {
	*testns.NS
	ports int
}

// NewLAN makes a bridge in a namespace of its own.
func NewLAN(t testing.TB) *LAN {
	l := &LAN{NS: testns.New(t, "lan")}
	prompt(l.NS)
	l.Must("bridge", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "br"
		off := false
		br := &netlink.Bridge{LinkAttrs: attrs, MulticastSnooping: &off}
		if err := netlink.LinkAdd(br); err != nil {
			return err
		}
		return netlink.LinkSetUp(br)
	})
	return l
}

// Attach gives a namespace a link to the LAN, named lan.
func (l *LAN) Attach(n *testns.NS, addrs []netip.Prefix) {
	l.ports++
	port := fmt.Sprintf("port%d", l.ports)
	prompt(n)
	n.Must("link lan", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "lan"
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: port, PeerNamespace: netlink.NsFd(l.Handle)})
	})
	l.Must("port of the LAN", func() error {
		br, err := netlink.LinkByName("br")
		if err != nil {
			return err
		}
		p, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(p, br); err != nil {
			return err
		}
		return netlink.LinkSetUp(p)
	})
	n.Address("lan", addrs...)
}

// prompt makes addresses of links to come usable at once.
func prompt(n *testns.NS) {
	n.Sysctl("net.ipv6.conf.default.accept_dad", "0")
	n.Sysctl("net.ipv6.conf.default.dad_transmits", "0")
}

func forwarding(n *testns.NS) {
	n.Sysctl("net.ipv4.ip_forward", "1")
	n.Sysctl("net.ipv6.conf.all.forwarding", "1")
}

// Route replaces a route of a namespace.
func Route(n *testns.NS, to, via string) {
	n.Must("route to "+to, func() error {
		_, dst, err := net.ParseCIDR(to)
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)})
	})
}

// Via leads the client's packets to a gateway.
func (s *Scene) Via(g *Gateway) {
	Route(s.Router, "192.0.2.0/24", g.inside[0].String())
	Route(s.Router, "2001:db8:2::/64", g.inside[1].String())
}

// Return leads the target's answers to a gateway by route.
func (s *Scene) Return(g *Gateway) {
	Route(s.Target, Source4.String()+"/32", g.LAN4.String())
	Route(s.Target, Source6.String()+"/128", g.LAN6.String())
}

const invalid = 1 << 0 // NF_CT_STATE_INVALID_BIT

func (g *Gateway) must(what string, err error) {
	g.t.Helper()
	if err != nil {
		g.t.Fatalf("%s in %s: %v", what, g.Name, err)
	}
}

func (g *Gateway) flush(what string) { g.t.Helper(); g.must(what, g.nft.Flush()) }

// rules are the gateway's: what leaves by lan is translated, and what the connection table calls invalid is counted and
// dropped.
func (g *Gateway) rules() {
	var err error
	g.nft, err = nftables.New(nftables.WithNetNSFd(int(g.Handle)))
	g.must("opening nftables", err)
	g.table = g.nft.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "gw"})
	accept := nftables.ChainPolicyAccept
	chain := func(name string, typ nftables.ChainType, hook *nftables.ChainHook,
		prio *nftables.ChainPriority) *nftables.Chain {
		return g.nft.AddChain(&nftables.Chain{Name: name, Table: g.table, Type: typ, Hooknum: hook, Priority: prio,
			Policy: &accept})
	}
	g.raw = chain("raw", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	g.fwd = chain("fwd", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter)
	post := chain("post", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	g.nft.AddRule(&nftables.Rule{Table: g.table, Chain: g.fwd, Exprs: append([]expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: nftable.Reg}, nftable.Masked(nftable.Native(invalid), nil),
		nftable.Differ(make([]byte, 4)...)}, nftable.CountedDrop()...)})
	for _, a := range []netip.Addr{Source4, Source6} {
		f, _ := family(a)
		g.nft.AddRule(&nftables.Rule{Table: g.table, Chain: post, Exprs: slices.Concat(f.Only(),
			nftable.Link(expr.MetaKeyOIFNAME, "lan"), []expr.Any{
				&expr.Immediate{Register: nftable.Reg, Data: a.AsSlice()},
				&expr.NAT{Type: expr.NATTypeSourceNAT, Family: uint32(f.Proto), RegAddrMin: nftable.Reg}})})
	}
	g.flush("rules")
}

// family is an address's, with its packets' mark in Hold.
func family(a netip.Addr) (f nftable.IP, mark uint32) {
	if a.Is4() {
		return nftable.IPv4, 4
	}
	return nftable.IPv6, 6
}

// Stop ends the gateway's forwarding.
func (g *Gateway) Stop() {
	g.t.Helper()
	g.nft.InsertRule(&nftables.Rule{Table: g.table, Chain: g.fwd,
		Exprs: []expr.Any{nftable.Drop}})
	g.flush("stopping")
}

// Hold gives the client's packets and their answers to a queue, before the connection table sees them, with the mark 4
// or 6 of their family; or ends that.
func (g *Gateway) Hold(queue uint16, on bool) {
	g.t.Helper()
	for _, r := range g.held {
		g.must("ending the hold", g.nft.DelRule(r))
	}
	g.held = nil
	g.flush("ending the hold")
	if !on {
		return
	}
	var err error
	for _, form := range hold.Forms() {
		g.queue(form.Statement(queue))
		if err = g.nft.Flush(); err == nil {
			break
		}
	}
	g.must("giving packets to a queue", err)
	g.held, err = g.nft.GetRules(g.table, g.raw)
	g.must("reading the hold's rules", err)
}

// queue adds the rules of a hold, which end with a statement.
func (g *Gateway) queue(statement expr.Any) {
	add := func(a netip.Addr, end func(nftable.IP) []expr.Any) {
		f, mark := family(a)
		g.nft.AddRule(&nftables.Rule{Table: g.table, Chain: g.raw, Exprs: append(end(f), nftable.Equal(a.AsSlice()...),
			&expr.Immediate{Register: nftable.Reg, Data: nftable.Native(mark)}, nftable.SetMark(), statement)})
	}
	add(Client4, nftable.IP.Source)
	add(Source4, nftable.IP.Destination)
	add(Client6, nftable.IP.Source)
	add(Source6, nftable.IP.Destination)
}

// Invalid is how many packets the connection table called invalid.
func (g *Gateway) Invalid() uint64 {
	g.t.Helper()
	rules, err := g.nft.GetRules(g.table, g.fwd)
	g.must("reading rules", err)
	for _, r := range rules {
		for _, e := range r.Exprs {
			if c, ok := e.(*expr.Counter); ok {
				return c.Packets
			}
		}
	}
	g.t.Fatal("no counter of invalid packets")
	return 0
}
