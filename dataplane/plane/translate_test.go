package plane_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// overlap is two sites whose members have the same networks behind them, each with a host there.
type overlap struct {
	*hops
	hosts [2]*testns.NS
}

var (
	lanHost4, lanHost6 = addr("192.168.1.18"), addr("fd12:1::18") // in both
)

// at are the addresses of a site's host as seen from the other site.
func (o *overlap) at(site int) []netip.Addr {
	n := o.sites[site].member.n
	return []netip.Addr{addr(fmt.Sprintf("10.201.%d.18", n)), addr(fmt.Sprintf("fd99:%d::18", n))}
}

func newOverlap(t *testing.T, h *hops) *overlap {
	t.Helper()
	o := &overlap{hops: h}
	for i, s := range o.sites {
		o.hosts[i] = testns.New(t, "lan")
		testns.Link(s.member.NS, o.hosts[i], "lan", []netip.Prefix{pfx("192.168.1.1/24"), pfx("fd12:1::1/64")},
			[]netip.Prefix{netip.PrefixFrom(lanHost4, 24), netip.PrefixFrom(lanHost6, 64)})
		o.hosts[i].Must("default routes", func() error {
			var all error
			for to, gw := range map[string]string{"0.0.0.0/0": "192.168.1.1", "::/0": "fd12:1::1"} {
				_, dst, err := net.ParseCIDR(to)
				all = errors.Join(all, err, netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(gw)}))
			}
			return all
		})
		s.member.Sysctl("net.ipv4.ip_forward", "1")
		s.member.Sysctl("net.ipv6.conf.all.forwarding", "1")
		s.lan = []netip.Prefix{pfx("192.168.1.0/24"), pfx("fd12:1::/64")}
		n := s.member.n
		s.elsewhere = []netip.Prefix{pfx(fmt.Sprintf("10.201.%d.0/24", n)), pfx(fmt.Sprintf("fd99:%d::/64", n))}
		if !wantKernel() { // the guest of the kernel tier has not all modules
			s.member.Must("firewall", withNft(firewall))
		}
	}
	o.applyAll(t)
	return o
}

// comes fails unless the echo at an address answers a namespace.
func comes(t *testing.T, from *testns.NS, to netip.Addr) {
	t.Helper()
	within(t, 10*time.Second, from.Name+" reaches "+to.String(), func() bool {
		ok, _ := (&host{NS: from}).reaches(t, to)
		return ok
	})
}

// firewall is another program's: it forwards packets that belong to a connection in conntrack, or begin one.
func firewall(c *nftables.Conn) {
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "other"})
	drop := nftables.ChainPolicyDrop
	chain := c.AddChain(&nftables.Chain{Table: table, Name: "forward", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	bits := binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED | expr.CtStateBitNEW)
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: bits, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
		&expr.Verdict{Kind: expr.VerdictAccept},
	}})
}

// TestOverlappingSitesReachEachOther: both members have 192.168.1.0/24 and fd12:1::/64 behind them. Hosts there reach
// each other and the other site's members and pods, each under the addresses agreed for the other site, by UDP, ping
// and TCP through the leaders; within a site the real addresses apply.
func TestOverlappingSitesReachEachOther(t *testing.T) { newOverlap(t, newHops(t)).reachEachOther(t) }

// TestBothDriversTranslate: the same, with kernel WireGuard on one translating member and userspace on the other.
func TestBothDriversTranslate(t *testing.T) { newOverlap(t, newMixed(t)).reachEachOther(t) }

func (o *overlap) reachEachOther(t *testing.T) {
	t.Helper()
	o.echoAll(t)
	for _, n := range o.hosts {
		(&host{NS: n}).echo(t, lanHost4)
		(&host{NS: n}).echo(t, lanHost6)
	}
	for _, o.bound = range bindings() {
		o.applyAll(t)
		for i, s := range o.sites {
			other := o.sites[1-i]
			for _, from := range []*testns.NS{o.hosts[i], s.member.NS, s.leaders[0].NS, s.pod.NS} {
				for _, to := range o.at(1 - i) {
					comes(t, from, to)
				}
			}
			for _, to := range []netip.Addr{other.member.overlay4(), other.member.overlay6(), other.pod.IPv4,
				other.pod.IPv6, other.leaders[0].overlay4()} {
				comes(t, o.hosts[i], to)
			}
			for _, to := range []netip.Addr{lanHost4, lanHost6} { // of the own site
				comes(t, s.leaders[1].NS, to)
			}
		}
	}
	for i := range o.sites {
		for j, to := range o.at(1 - i) {
			ping(t, o.hosts[i], to)
			transferTo(t, o.hosts[i], o.hosts[1-i], to, []netip.Addr{lanHost4, lanHost6}[j], o.at(i)[j])
		}
	}
	for _, x := range o.all() {
		x.clean(t, o.spec(x))
		if c, _ := x.plane.Hops(t.Context()); c.Refused+c.Malformed+c.Congested+c.TooLarge != 0 {
			t.Errorf("%s counts %+v", x.Name, c)
		}
	}
}

// transferTo sends bytes in both directions by TCP to a translated address; the host there must see the sender's
// translated address.
func transferTo(t *testing.T, from, at *testns.NS, to, there, seen netip.Addr) {
	t.Helper()
	var l net.Listener
	at.Must("listen", func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(there, 0).String())
		return err
	})
	defer l.Close()
	who := make(chan netip.Addr, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		who <- c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
		_, _ = io.Copy(c, c)
	}()
	from.Must("connect", func() error {
		port := l.Addr().(*net.TCPAddr).AddrPort().Port()
		c, err := net.DialTimeout("tcp", netip.AddrPortFrom(to, port).String(), 10*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		sent := bytes.Repeat([]byte("skein and "), 50_000)
		go func() { _, _ = c.Write(sent) }()
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
			return fmt.Errorf("the bytes came back wrong: %w", err)
		}
		return nil
	})
	if a := <-who; a != seen {
		t.Errorf("%s sees %s, want %s", at.Name, a, seen)
	}
}

// TestErrorsOfOverlappingSitesArrive: the packet header inside an ICMP error is translated, too, since the receiver
// could not match it otherwise.
func TestErrorsOfOverlappingSitesArrive(t *testing.T) {
	o := newOverlap(t, newHops(t))
	for i := range o.sites {
		for _, to := range o.at(1 - i) { // nobody listens
			within(t, 10*time.Second, "the error about "+to.String(), func() bool {
				_, err := (&host{NS: o.hosts[i]}).reaches(t, to)
				return errors.Is(err, unix.ECONNREFUSED)
			})
		}
	}
}

// TestNobodyElseIsTranslated: a node of the own site has no route to the translated addresses, and a neighbour cannot
// send with them.
func TestNobodyElseIsTranslated(t *testing.T) {
	o := newOverlap(t, newHops(t))
	o.echoAll(t)
	(&host{NS: o.hosts[0]}).echo(t, lanHost4)
	a, b := o.sites[0], o.sites[1]
	comes(t, b.leaders[0].NS, o.at(0)[0])
	if err := send(a.leaders[0].NS, o.at(0)[0]); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("the own leader sends to the address for others: %v", err)
	}
	if err := send(a.member.NS, o.at(0)[0]); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("the member itself sends to the address for others: %v", err)
	}
	e := hear(t, b.member.NS, forgedPort)
	give(o.hosts[0], o.at(0)[0], o.at(1)[0])
	for _, from := range []netip.Addr{o.at(0)[0], o.at(1)[0]} {
		if (&scene{}).forge(t, e, o.hosts[0], from, lanHost4, b.member.overlay4()) {
			t.Errorf("the neighbour was heard as %s", from)
		}
	}
}

// TestTranslationsAreRepairedAndGo with what asked for them.
func TestTranslationsAreRepairedAndGo(t *testing.T) {
	a := newHost(t, 1)
	s := a.spec()
	a.apply(t, s)
	plain := s
	s.Translations = []dataplane.Translation{{Prefix: pfx("192.168.1.0/24"), As: pfx("10.201.1.0/24")},
		{Prefix: pfx("fd12:1::/61"), As: pfx("fd99:8::/61")}}
	s.Inside = []netip.Prefix{pfx("10.4.0.2/32"), pfx("fd00:5::2/128")}
	a.apply(t, s)
	a.clean(t, s)
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: dataplane.DefaultNumbers().NftTable}
	for _, chain := range []string{dataplane.ChainTranslateIn, dataplane.ChainTranslateOut} {
		before := a.repairs()
		a.Must("flush", withNft(func(c *nftables.Conn) { c.FlushChain(&nftables.Chain{Table: table, Name: chain}) }))
		within(t, repairLimit(), chain+" is repaired", func() bool { return a.repairs() > before && len(a.diff(t, s)) == 0 })
	}
	s.Translations = slices.Clone(s.Translations[1:])
	a.apply(t, s)
	a.clean(t, s)
	a.apply(t, plain)
	a.clean(t, plain)
}
