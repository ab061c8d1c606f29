package plane_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/testns"
)

// site is a node with a pod, whose only peers are the two leaders of its site. These also peer with those of the
// other site.
type site struct {
	member  *host
	leaders [2]*host
	pod     pod

	lan, elsewhere []netip.Prefix // behind the member, and as what other sites know it; none
}

// newSite makes the site whose numbers begin with n, with these drivers: one for both leaders, or one for each.
func newSite(t *testing.T, n int, member string, leaders ...string) *site {
	t.Helper()
	s := &site{member: newHostWith(t, n, member)}
	for i := range s.leaders {
		s.leaders[i] = newHostWith(t, n+1+i, leaders[i%len(leaders)])
	}
	ns := testns.New(t, "pod")
	s.pod = pod{ns, podnet.Attachment{Key: podnet.Key{ContainerID: fmt.Sprintf("site%d", n), Interface: "eth0"},
		NetNS: "/var/run/netns/" + ns.Name, MTU: dataplane.MTU,
		IPv4: s.blocks()[0].Addr().Next(), IPv6: s.blocks()[1].Addr().Next()}}
	s.member.Must("add pod", func() error { _, err := podnet.Add(s.pod.Attachment); return err })
	return s
}

func (s *site) blocks() []netip.Prefix {
	return []netip.Prefix{pfx(fmt.Sprintf("10.64.%d.0/27", s.member.n)), pfx(fmt.Sprintf("fd64:%d::/123", s.member.n))}
}

func nodes(hosts ...*host) (out []netip.Prefix) {
	for _, h := range hosts {
		out = append(out, netip.PrefixFrom(h.overlay4(), 32), netip.PrefixFrom(h.overlay6(), 128))
	}
	return out
}

// prefixes are all prefixes of the site.
func (s *site) prefixes() []netip.Prefix {
	return sorted(slices.Concat(nodes(s.member, s.leaders[0], s.leaders[1]), s.blocks(), s.elsewhere))
}

// around are prefixes that contain the site's nodes and no other nodes.
func (s *site) around() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(s.member.overlay4(), 28).Masked(),
		netip.PrefixFrom(s.member.overlay6(), 124).Masked()}
}

func (s *site) ofMember() []netip.Prefix {
	return sorted(slices.Concat(nodes(s.member), s.blocks(), s.elsewhere))
}

// inside are the prefixes that the site's own nodes send to the member.
func (s *site) inside() []netip.Prefix { return sorted(slices.Concat(s.ofMember(), s.lan)) }

func sorted(p []netip.Prefix) []netip.Prefix {
	slices.SortFunc(p, netip.Prefix.Compare)
	return p
}

// hops is two sites, each with the leader that its member uses.
type hops struct {
	sites [2]*site
	bound [2]int
	wide  bool                    // leaders have one route around all nodes of the other site
	wires map[[2]*host]netip.Addr // where the second is reached by the first
}

func newHops(t *testing.T) *hops {
	t.Helper()
	return join(t, newSite(t, 10, "auto", "auto"), newSite(t, 20, "auto", "auto"))
}

// newMixed makes two sites with both drivers among their members, and among the leaders of each.
func newMixed(t *testing.T) *hops {
	t.Helper()
	a := newSite(t, 10, "auto", "userspace", "auto")
	if a.member.plane.Driver() != "kernel" {
		t.Skip("this kernel has no WireGuard")
	}
	return join(t, a, newSite(t, 20, "userspace", "auto", "userspace"))
}

func join(t *testing.T, a, b *site) *hops {
	t.Helper()
	h := &hops{sites: [2]*site{a, b}, wires: map[[2]*host]netip.Addr{}}
	wire := func(a, b *host) {
		n := len(h.wires) / 2
		ends := [2]netip.Addr{netip.AddrFrom4([4]byte{198, 18, byte(n), 1}), netip.AddrFrom4([4]byte{198, 18, byte(n), 2})}
		testns.Link(a.NS, b.NS, fmt.Sprintf("wire%d", n), []netip.Prefix{netip.PrefixFrom(ends[0], 24)},
			[]netip.Prefix{netip.PrefixFrom(ends[1], 24)})
		h.wires[[2]*host{a, b}], h.wires[[2]*host{b, a}] = ends[1], ends[0]
	}
	for _, s := range h.sites {
		for _, l := range s.leaders {
			wire(s.member, l)
		}
	}
	for _, a := range h.sites[0].leaders {
		for _, b := range h.sites[1].leaders {
			wire(a, b)
		}
	}
	h.applyAll(t)
	return h
}

// all are the hosts of both sites.
func (h *hops) all() (out []*host) {
	for _, s := range h.sites {
		out = append(out, s.member, s.leaders[0], s.leaders[1])
	}
	return out
}

func (h *hops) applyAll(t *testing.T) {
	t.Helper()
	for _, x := range h.all() {
		x.apply(t, h.spec(x))
	}
}

// narrower is the MTU with hops.
const narrower = dataplane.MTU - dataplane.HopOverhead

// spec is the Spec for a host of the two sites.
func (h *hops) spec(x *host) dataplane.Spec {
	here := slices.IndexFunc(h.sites[:], func(s *site) bool { return x == s.member || slices.Contains(s.leaders[:], x) })
	own, other := h.sites[here], h.sites[1-here]
	s := x.spec()
	peer := func(o *host, more ...netip.Prefix) {
		at, ok := h.wires[[2]*host{x, o}]
		if !ok {
			panic("no wire")
		}
		s = withPeer(s, o.keys.public, netip.AddrPortFrom(at, dataplane.Port), slices.Concat(nodes(o), more)...)
	}
	s.Hops.Self = x.overlay4()
	lead := func(via *host, last bool, to ...netip.Prefix) {
		for _, p := range to {
			s.Hops.Routes = append(s.Hops.Routes, dataplane.HopRoute{Prefix: p, Via: via.overlay4(), Last: last})
			if !last {
				s.Targets = append(s.Targets, p)
				s.Link.Narrow = append(s.Link.Narrow, dataplane.Narrow{Prefix: p, MTU: narrower})
			}
		}
	}
	guard := func(from *host, sources []netip.Prefix) {
		s.Hops.Guards = append(s.Hops.Guards, dataplane.HopGuard{From: from.overlay4(), Sources: sources})
	}
	if x == own.member {
		for _, l := range own.leaders {
			peer(l)
			guard(l, other.prefixes())
		}
		lead(own.leaders[h.bound[here]], false, other.prefixes()...)
		s.Hops.Own = own.inside()
		for i, p := range own.lan {
			s.Translations = append(s.Translations, dataplane.Translation{Prefix: p, As: own.elsewhere[i]})
			s.Inside = nodes(own.leaders[:]...)
		}
		s.Pods.Blocks = own.blocks()
		s.Pods.Routes = []dataplane.PodRoute{{Addr: own.pod.IPv4, Link: own.pod.link()},
			{Addr: own.pod.IPv6, Link: own.pod.link()}}
	} else {
		peer(own.member, slices.Concat(own.blocks(), own.lan, own.elsewhere)...)
		guard(own.member, own.inside())
		lead(own.member, true, own.inside()...)
		for _, l := range other.leaders {
			peer(l)
			guard(l, other.prefixes())
			lead(l, true, nodes(l)...)
		}
		lead(other.leaders[h.bound[1-here]], false, other.ofMember()...)
		if h.wide {
			within := func(p netip.Prefix) bool { return slices.ContainsFunc(other.around(), p.Overlaps) }
			s.Targets = slices.DeleteFunc(s.Targets, within)
			lead(other.leaders[h.bound[1-here]], false, other.around()...)
			for _, p := range nodes(other.leaders[:]...) {
				s.Link.Narrow = append(s.Link.Narrow, dataplane.Narrow{Prefix: p, MTU: dataplane.MTU})
			}
		}
		s.Hops.Own = nodes(x)
		s.Pods.Forward = true
		for _, b := range slices.Concat(own.blocks(), own.lan, own.elsewhere) {
			s.Pods.Remote = append(s.Pods.Remote, dataplane.Narrow{Prefix: b})
		}
	}
	for _, b := range slices.Concat(other.blocks(), other.elsewhere) {
		s.Pods.Remote = append(s.Pods.Remote, dataplane.Narrow{Prefix: b, MTU: narrower})
	}
	s.Pods.Pools = slices.Concat(own.elsewhere, other.elsewhere)
	byPrefix := func(a, b dataplane.Narrow) int { return a.Prefix.Compare(b.Prefix) }
	slices.SortFunc(s.Link.Narrow, byPrefix)
	slices.SortFunc(s.Pods.Remote, byPrefix)
	slices.SortFunc(s.Hops.Routes, dataplane.HopRoute.Compare)
	slices.SortFunc(s.Hops.Guards, dataplane.HopGuard.Compare)
	slices.SortFunc(s.Targets, netip.Prefix.Compare)
	return s
}

// reachAll fails unless every address of each site reaches every address of the other, including pods; in the kernel
// tier's guest one of each kind suffices.
func (h *hops) reachAll(t *testing.T) {
	t.Helper()
	for i, s := range h.sites {
		o := h.sites[1-i]
		from := []*testns.NS{s.member.NS, s.pod.NS, s.leaders[0].NS, s.leaders[1].NS}
		to := []netip.Addr{o.member.overlay4(), o.pod.IPv6, o.leaders[1].overlay4(), o.leaders[0].overlay6(),
			o.member.overlay6(), o.pod.IPv4, o.leaders[0].overlay4(), o.leaders[1].overlay6()}
		if wantKernel() {
			from, to = from[:3], to[:4]
		}
		for _, n := range from {
			x := &host{NS: n}
			for _, a := range to {
				within(t, 10*time.Second, n.Name+" reaches "+a.String(), func() bool { ok, _ := x.reaches(t, a); return ok })
			}
		}
	}
}

// echoAll answers at each address.
func (h *hops) echoAll(t *testing.T) {
	t.Helper()
	for _, x := range h.all() {
		x.echo(t, x.overlay4())
		x.echo(t, x.overlay6())
	}
	for _, s := range h.sites {
		s.pod.echo(t, s.pod.IPv4, s.pod.IPv6)
	}
}

// bindings are the assignments of members to leaders: all, or in the kernel tier's guest, which is emulated and slow,
// enough to use each leader.
func bindings() [][2]int {
	if wantKernel() {
		return [][2]int{{0, 0}, {1, 1}}
	}
	return [][2]int{{0, 0}, {0, 1}, {1, 1}, {1, 0}}
}

// TestHopsLeadToOtherSites: members, leaders and pods reach the other site in both families, by UDP, ping and TCP,
// whichever leaders the members use; afterwards Diff is empty.
func TestHopsLeadToOtherSites(t *testing.T) {
	h := newHops(t)
	h.echoAll(t)
	for _, h.bound = range bindings() {
		h.applyAll(t)
		h.reachAll(t)
	}
	for i, s := range h.sites {
		o := h.sites[1-i]
		for _, c := range []struct {
			from, at *testns.NS
			to       netip.Addr
		}{
			{s.member.NS, o.member.NS, o.member.overlay4()}, {s.pod.NS, o.pod.NS, o.pod.IPv6},
			{s.member.NS, o.member.NS, o.member.overlay6()}, {s.pod.NS, o.pod.NS, o.pod.IPv4},
			{s.member.NS, o.pod.NS, o.pod.IPv4}, {s.member.NS, o.pod.NS, o.pod.IPv6},
			{s.pod.NS, o.member.NS, o.member.overlay4()}, {s.pod.NS, o.member.NS, o.member.overlay6()},
		}[:map[bool]int{false: 8, true: 2}[wantKernel()]] {
			ping(t, c.from, c.to)
			transfer(t, c.from, c.at, c.to)
		}
	}
	for _, x := range h.all() {
		x.clean(t, h.spec(x))
		for sub, n := range x.apply(t, h.spec(x)).Writes {
			if n != 0 {
				t.Errorf("%s: %d messages for an unchanged Spec", sub, n)
			}
		}
		if n := redirects(t, x.NS); n > 0 {
			t.Errorf("%s got %d redirects", x.Name, n)
		}
		c, err := x.plane.Hops(t.Context())
		if err != nil || c.Wrapped == 0 || c.Unwrapped == 0 || c.Refused+c.Malformed+c.Congested+c.TooLarge != 0 {
			t.Errorf("%s counts %+v, %v", x.Name, c, err)
		}
	}
	x := h.sites[0].member
	s := h.spec(x)
	s.Hops = dataplane.Hops{}
	want := "wireguard: set hops: 0 ways, 0 guards"
	if x.plane.Driver() == "kernel" {
		want = "hop: delete link " + dataplane.DefaultNumbers().HopLink
	}
	if d := x.diff(t, s); !slices.Contains(d, want) {
		t.Errorf("skein plan would show %q", d)
	}
	x.apply(t, s)
	x.clean(t, s)
	if ok, _ := x.reaches(t, h.sites[1].member.overlay4()); ok {
		t.Error("without hops the other site still answers")
	}
}

// TestHopsLieAroundLeaders: if a leader's route to the other site surrounds the leaders there, which are its peers,
// its own packets go directly to these, and everything is reached as before.
func TestHopsLieAroundLeaders(t *testing.T) {
	h := newHops(t)
	h.wide = true
	h.echoAll(t)
	for _, h.bound = range bindings() {
		h.applyAll(t)
		h.reachAll(t)
	}
	for i, s := range h.sites {
		for _, x := range s.leaders {
			before, err := x.plane.Hops(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range h.sites[1-i].leaders {
				ping(t, x.NS, o.overlay4())
				ping(t, x.NS, o.overlay6())
			}
			if c, err := x.plane.Hops(t.Context()); err != nil || c.Wrapped != before.Wrapped {
				t.Errorf("%s wrapped %d of its own packets for peers, %v", x.Name, c.Wrapped-before.Wrapped, err)
			}
		}
	}
	for _, x := range h.all() {
		x.clean(t, h.spec(x))
	}
}

// TestHopsOfBothDrivers: a member with kernel WireGuard and leaders in userspace, and the reverse.
func TestHopsOfBothDrivers(t *testing.T) {
	a := newSite(t, 10, "auto", "userspace")
	if a.member.plane.Driver() != "kernel" {
		t.Skip("this kernel has no WireGuard")
	}
	h := join(t, a, newSite(t, 20, "userspace", "kernel"))
	h.echoAll(t)
	h.reachAll(t)
	for _, s := range h.sites {
		for _, o := range h.sites {
			if s != o {
				transfer(t, s.member.NS, o.member.NS, o.member.overlay4())
				transfer(t, s.pod.NS, o.pod.NS, o.pod.IPv6)
			}
		}
	}
	for _, x := range h.all() {
		x.clean(t, h.spec(x))
		if n := redirects(t, x.NS); n > 0 {
			t.Errorf("%s got %d redirects", x.Name, n)
		}
		if c, err := x.plane.Hops(t.Context()); err != nil || c.Refused+c.Malformed+c.Congested+c.TooLarge != 0 {
			t.Errorf("%s counts %+v, %v", x.Name, c, err)
		}
	}
}

// redirects counts received ICMP redirects: a host that forwards over the link of arrival sends them, and here they
// would point to a node that is not a peer.
func redirects(t *testing.T, n *testns.NS) (count int) {
	t.Helper()
	n.Must("read counters", func() error {
		b, err := os.ReadFile("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		var names []string
		for line := range strings.Lines(string(b)) {
			fields := strings.Fields(line)
			switch {
			case fields[0] != "Icmp:":
			case names == nil:
				names = fields
			default:
				count, err = strconv.Atoi(fields[slices.Index(names, "InRedirects")])
			}
		}
		return err
	})
	return count
}

// ping sends echo requests until one is answered.
func ping(t *testing.T, from *testns.NS, to netip.Addr) {
	t.Helper()
	network, request, reply, protocol := "ip4:icmp", icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply), 1
	if to.Is6() {
		network, request, reply, protocol = "ip6:ipv6-icmp", ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply, 58
	}
	from.Must("ping "+to.String(), func() error {
		c, err := icmp.ListenPacket(network, "")
		if err != nil {
			return err
		}
		defer c.Close()
		m := icmp.Message{Type: request, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("skein")}}
		b, err := m.Marshal(nil)
		if err != nil {
			return err
		}
		answer := make([]byte, 200)
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
			if _, err := c.WriteTo(b, &net.IPAddr{IP: to.AsSlice()}); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			n, who, err := c.ReadFrom(answer)
			if err != nil {
				continue
			}
			if m, err := icmp.ParseMessage(protocol, answer[:n]); err == nil && m.Type == reply && who.String() == to.String() {
				return nil
			}
		}
		return errors.New("no answer")
	})
}

// transfer sends a few megabytes in both directions by TCP; less in the kernel tier's guest.
func transfer(t *testing.T, from, at *testns.NS, to netip.Addr) {
	t.Helper()
	size := 3 << 20
	if wantKernel() {
		size = 64 << 10
	}
	var l net.Listener
	at.Must("listen", func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	})
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.Copy(c, c)
	}()
	from.Must("connect", func() error {
		c, err := net.DialTimeout("tcp", l.Addr().String(), 10*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		sent := bytes.Repeat([]byte("skein and "), size/10)
		go func() { _, _ = c.Write(sent) }()
		got := make([]byte, len(sent))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, sent) {
			return fmt.Errorf("the bytes came back wrong: %w", err)
		}
		return nil
	})
}

// flow is a UDP conversation with a constant number of packets under way in both directions.
type flow struct {
	conn net.Conn
	sent uint64
	came map[uint64]bool
}

func newFlow(t *testing.T, from *testns.NS, to netip.Addr) *flow {
	t.Helper()
	f := &flow{came: map[uint64]bool{}}
	from.Must("flow", func() (err error) {
		f.conn, err = net.Dial("udp", netip.AddrPortFrom(to, 7).String())
		return err
	})
	t.Cleanup(func() { f.conn.Close() })
	return f
}

const underway = 16 // packets of a flow at a time

func (f *flow) send() error {
	_, err := f.conn.Write(binary.BigEndian.AppendUint64(nil, f.sent))
	f.sent++
	return err
}

// run sends packets, a new one for each that returns, and finally waits for all.
func (f *flow) run(n int) error {
	for range underway {
		if err := f.send(); err != nil {
			return err
		}
	}
	b := make([]byte, 100)
	for len(f.came) < n {
		_ = f.conn.SetReadDeadline(time.Now().Add(5 * time.Second))
		k, err := f.conn.Read(b)
		if err != nil {
			return fmt.Errorf("%d of %d packets came back, then %w", len(f.came), f.sent, err)
		}
		if k == 8 {
			f.came[binary.BigEndian.Uint64(b)] = true
		}
		if int(f.sent) < n {
			if err := f.send(); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestHopsMoveWithoutLoss: members of both sites change leaders while packets are under way, each host at its own
// time and in any order.
func TestHopsMoveWithoutLoss(t *testing.T) {
	h := newHops(t)
	h.echoAll(t)
	for _, h.bound = range bindings() { // so that all have shaken hands
		h.applyAll(t)
		h.reachAll(t)
	}
	packets, least := 6000, 20
	if wantKernel() { // the guest is emulated
		packets, least = 300, 3
	}
	a, b := h.sites[0], h.sites[1]
	flows := []*flow{newFlow(t, a.member.NS, b.member.overlay4()), newFlow(t, b.member.NS, a.member.overlay6()),
		newFlow(t, a.pod.NS, b.pod.IPv4), newFlow(t, b.pod.NS, a.pod.IPv6)}
	done := make(chan error, len(flows))
	for _, f := range flows {
		go func() { done <- f.run(packets) }()
	}
	order := h.all()
	moves, left := 0, len(flows)
	for ; left > 0; moves++ {
		h.bound[moves%2] = 1 - h.bound[moves%2]
		for i := range order { // another begins each time
			x := order[(i*5+moves)%len(order)]
			x.apply(t, h.spec(x))
		}
		select {
		case err := <-done:
			left--
			if err != nil {
				t.Errorf("after %d moves: %v", moves, err)
			}
		default:
		}
	}
	t.Logf("%d moves while %d packets went there and back", moves, len(flows)*packets)
	if moves < least {
		t.Errorf("only %d moves happened meanwhile", moves)
	}
	for _, x := range h.all() {
		if c, _ := x.plane.Hops(t.Context()); c.Refused+c.Malformed+c.Congested+c.TooLarge != 0 {
			t.Errorf("%s counts %+v", x.Name, c)
		}
	}
}

// TestHopsAreGuarded: a member can send only with its own addresses, a leader only with those of its site, and a pod
// only with its own.
func TestHopsAreGuarded(t *testing.T) {
	h := newHops(t)
	h.echoAll(t)
	h.reachAll(t)
	a, b := h.sites[0], h.sites[1]
	e, pods := hear(t, b.member.NS, forgedPort), hear(t, b.pod.NS, forgedPort)
	mate4, mate6 := a.leaders[1].overlay4(), a.leaders[1].overlay6()
	theirs4, theirs6 := b.leaders[1].overlay4(), b.leaders[1].overlay6()
	stranger4, stranger6 := addr("10.4.0.99"), addr("fd00:5::99")
	foreign4, foreign6 := addr("203.0.113.9"), addr("2001:db8:9::9")
	for _, c := range []struct {
		what   string
		from   *testns.NS
		own    [2]netip.Addr
		as     []netip.Addr
		counts *host // who refuses; nil: it does not come so far
	}{
		{"a member", a.member.NS, [2]netip.Addr{a.member.overlay4(), a.member.overlay6()},
			[]netip.Addr{mate4, mate6, theirs4, theirs6, stranger4, stranger6, foreign4, foreign6}, a.leaders[0]},
		{"a leader", a.leaders[0].NS, [2]netip.Addr{a.leaders[0].overlay4(), a.leaders[0].overlay6()},
			[]netip.Addr{theirs4, theirs6, b.pod.IPv4.Next(), b.pod.IPv6.Next(), stranger4, stranger6, foreign4,
				foreign6}, b.leaders[0]},
		{"a pod", a.pod.NS, [2]netip.Addr{a.pod.IPv4, a.pod.IPv6},
			[]netip.Addr{a.member.overlay4(), a.member.overlay6(), mate4, mate6, theirs4, theirs6, stranger4,
				stranger6, foreign4, foreign6}, nil},
	} {
		if wantKernel() {
			c.as = c.as[:4]
		}
		give(c.from, c.as...)
		for _, from := range c.as {
			for i, e := range []*ear{e, pods} {
				if wantKernel() && (i == 1) != from.Is6() { // one of both is enough in the guest
					continue
				}
				own, to := c.own[0], [...]netip.Addr{b.member.overlay4(), b.pod.IPv4}[i]
				if from.Is6() {
					own, to = c.own[1], [...]netip.Addr{b.member.overlay6(), b.pod.IPv6}[i]
				}
				before := refusedBy(t, c.counts)
				if (&scene{}).forge(t, e, c.from, from, own, to) {
					t.Errorf("%s was heard as %s at %s", c.what, from, to)
				}
				if n := refusedBy(t, c.counts) - before; c.counts != nil && n != 1 {
					t.Errorf("%s as %s to %s: %d packets were refused", c.what, from, to, n)
				}
			}
		}
	}
}

func refusedBy(t *testing.T, h *host) uint64 {
	t.Helper()
	if h == nil {
		return 0
	}
	c, err := h.plane.Hops(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return c.Refused
}

// TestHopsLeaveRoomForTheirHeader: packets that fit with the outer header pass; larger ones are refused at the
// sender, or fragmented where that is allowed.
func TestHopsLeaveRoomForTheirHeader(t *testing.T) {
	h := newHops(t)
	h.echoAll(t)
	h.reachAll(t)
	a, b := h.sites[0], h.sites[1]
	senders := []*testns.NS{a.pod.NS, a.member.NS}
	receivers := []netip.Addr{b.member.overlay4(), b.pod.IPv6, b.member.overlay6(), b.pod.IPv4}
	if wantKernel() {
		senders, receivers = senders[:1], receivers[:2]
	}
	for _, from := range senders {
		for _, to := range receivers {
			headers := 28
			if to.Is6() {
				headers = 48
			}
			for _, c := range []struct {
				size int
				cut  bool
				want error
			}{{narrower, false, nil}, {narrower + 1, false, unix.EMSGSIZE},
				{dataplane.MTU, false, unix.EMSGSIZE}, {1900, true, nil}} {
				if err := sized(from, to, c.size-headers, c.cut); !errors.Is(err, c.want) {
					t.Errorf("%s to %s with %d bytes (fragments: %t): %v, want %v", from.Name, to, c.size, c.cut, err, c.want)
				}
			}
		}
	}
	for _, x := range h.all() {
		if c, _ := x.plane.Hops(t.Context()); c.Refused+c.Malformed+c.Congested+c.TooLarge != 0 {
			t.Errorf("%s counts %+v", x.Name, c)
		}
	}
}

// sized sends UDP packets of one size until one returns or an error occurs.
func sized(from *testns.NS, to netip.Addr, payload int, cut bool) (err error) {
	from.Do(func() {
		discover := unix.IP_PMTUDISC_DO // the same in IPv6
		if cut {
			discover = unix.IP_PMTUDISC_WANT
		}
		control := func(_, _ string, c syscall.RawConn) error {
			var set error
			err := c.Control(func(fd uintptr) {
				if to.Is4() {
					set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, discover)
				} else {
					set = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, discover)
				}
			})
			return errors.Join(err, set)
		}
		var c net.Conn
		if c, err = (&net.Dialer{Control: control}).Dial("udp", netip.AddrPortFrom(to, 7).String()); err != nil {
			return
		}
		defer c.Close()
		b := make([]byte, 2000)
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); {
			_ = c.SetDeadline(time.Now().Add(time.Second))
			if _, err = c.Write(make([]byte, payload)); err != nil {
				return
			}
			n := 0
			if n, err = c.Read(b); err == nil && n != payload {
				err = fmt.Errorf("%d of %d bytes came back", n, payload)
			}
			if err == nil || errors.Is(err, unix.EMSGSIZE) {
				return
			}
		}
	})
	return err
}

// TestHopsAreRepairedAdoptedAndPurged: the kernel driver's state is adopted unchanged by the next run, repaired after
// foreign changes, rejects packets instead of leaking plaintext when the tunnel is missing, and is purged with the
// rest. The other driver has no such state.
func TestHopsAreRepairedAdoptedAndPurged(t *testing.T) {
	a := newHost(t, 1)
	outside := uplink(t, a)
	other, far := newKeyPair(t), []netip.Prefix{pfx("10.4.8.1/32"), pfx("fd00:5::8/128")}
	s := withPeer(a.spec(), other.public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.2/32"),
		pfx("fd00:5::2/128"))
	s.Targets = append(s.Targets, far...)
	s.Pods.Forward = true
	s.Hops = dataplane.Hops{Self: a.overlay4(), Own: nodes(a),
		Guards: []dataplane.HopGuard{{From: addr("10.4.0.2"), Sources: far}}}
	for _, p := range far {
		s.Hops.Routes = append(s.Hops.Routes, dataplane.HopRoute{Prefix: p, Via: addr("10.4.0.2")})
	}
	s.Hops.Routes = append(s.Hops.Routes,
		dataplane.HopRoute{Prefix: pfx("10.4.0.2/32"), Via: addr("10.4.0.2"), Last: true})
	slices.SortFunc(s.Hops.Routes, dataplane.HopRoute.Compare)
	a.apply(t, s)
	a.clean(t, s)
	kernel := a.plane.Driver() == "kernel"
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"link deleted", deleteLink(dataplane.DefaultNumbers().HopLink)},
		{"link down", func() error {
			l, err := netlink.LinkByName(dataplane.DefaultNumbers().HopLink)
			if err != nil {
				return err
			}
			return netlink.LinkSetDown(l)
		}},
		{"IPv4 ways deleted", deleteRoutes(unix.AF_INET, dataplane.DefaultNumbers().HopTable(), unix.RTN_UNICAST)},
		{"IPv6 ways deleted", deleteRoutes(unix.AF_INET6, dataplane.DefaultNumbers().HopTable(), unix.RTN_UNICAST)},
		{"last hops deleted", deleteRoutes(unix.AF_INET, dataplane.DefaultNumbers().HopLastTable(), unix.RTN_UNICAST)},
		{"a way of another kind", func() error {
			return netlink.RouteReplace(&netlink.Route{Dst: netlink.NewIPNet(far[0].Addr().AsSlice()),
				Table: dataplane.DefaultNumbers().HopTable(),
				Type:  unix.RTN_PROHIBIT, Protocol: dataplane.RouteProtocol})
		}},
		{"a second way", func() error {
			return netlink.RouteAdd(&netlink.Route{Dst: netlink.NewIPNet(far[0].Addr().AsSlice()),
				Table: dataplane.DefaultNumbers().HopTable(),
				Type:  unix.RTN_PROHIBIT, Protocol: dataplane.RouteProtocol, Priority: 7})
		}},
		{"rule deleted", func() error {
			r := netlink.NewRule()
			r.Family, r.Priority, r.Table = unix.AF_INET, dataplane.DefaultNumbers().HopLastRule(),
				dataplane.DefaultNumbers().HopLastTable()
			return netlink.RuleDel(r)
		}},
		{"guards deleted", withNft(func(c *nftables.Conn) {
			c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: dataplane.DefaultNumbers().HopNftTable})
		})},
		{"guards emptied", withNft(func(c *nftables.Conn) {
			table := &nftables.Table{Family: nftables.TableFamilyINet, Name: dataplane.DefaultNumbers().HopNftTable}
			c.FlushChain(&nftables.Chain{Table: table, Name: "skein_hop_guards"})
		})},
		{"tunnel deleted", deleteLink(dataplane.DefaultNumbers().Link)},
	} {
		if !kernel {
			break
		}
		before := a.repairs()
		a.Must(c.name, c.do)
		took := within(t, repairLimit(), c.name+" is repaired", func() bool {
			return a.repairs() > before && len(a.diff(t, s)) == 0
		})
		t.Logf("%s: repaired after %s", c.name, took)
	}
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.open(t)
	early := s
	early.Hops.Routes, early.Hops.Guards, early.Complete = nil, nil, false // another source has not spoken yet
	for i, spec := range []dataplane.Spec{early, s} {
		if n := a.apply(t, spec).Writes["hop"]; n != 0 {
			t.Errorf("round %d: %d messages for what a former run has left", i, n)
		}
	}
	a.clean(t, s)
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	if kernel { // of the other driver the tunnel is gone already
		a.Must("delete the tunnel", deleteLink(dataplane.DefaultNumbers().Link))
	}
	seen := overhear(t, outside, "up", "plaintext?")
	const packets = 50
	for range packets {
		for _, p := range far {
			a.Do(func() { // where nothing leads there this fails, as it may
				if c, err := net.Dial("udp", netip.AddrPortFrom(p.Addr(), 7).String()); err == nil {
					_, _ = c.Write([]byte("plaintext?"))
					c.Close()
				}
			})
		}
	}
	say(t, a.NS, addr("192.0.2.1"), addr("192.0.2.2"), 7, "plaintext? the last")
	if n := seen("plaintext? the last"); n > 0 {
		t.Errorf("without the tunnel %d packets left the host", n)
	}
	if err := plane.Purge(t.Context(), plane.Options{Namespace: &a.Handle}); err != nil {
		t.Fatal(err)
	}
	a.nothingLeft(t, true)
	a.open(t)
	a.apply(t, s)
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.driver = "userspace" // from now on
	a.open(t)
	a.apply(t, s)
	a.nothingLeft(t, false)
	a.clean(t, s)
}

// nothingLeft fails unless the kernel has nothing of hops, and if all is true nothing of skein.
func (h *host) nothingLeft(t *testing.T, all bool) {
	t.Helper()
	h.Must("what is left", func() error {
		if _, err := netlink.LinkByName(dataplane.DefaultNumbers().HopLink); err == nil {
			return errors.New("the link of hops")
		}
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(family)
			if err != nil {
				return err
			}
			for _, r := range rules {
				if r.Protocol == dataplane.RouteProtocol &&
					(all || r.Priority == dataplane.DefaultNumbers().HopRule() ||
						r.Priority == dataplane.DefaultNumbers().HopLastRule()) {
					return fmt.Errorf("rule %s", r)
				}
			}
			for _, table := range []int{dataplane.DefaultNumbers().HopTable(), dataplane.DefaultNumbers().HopLastTable()} {
				routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE)
				if err == nil && len(routes) > 0 {
					return fmt.Errorf("routes %v", routes)
				}
			}
		}
		c, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
		for _, table := range tables {
			if all || table.Name == dataplane.DefaultNumbers().HopNftTable {
				return fmt.Errorf("table %s", table.Name)
			}
		}
		return err
	})
}

// overhear counts frames received by a link of a namespace that contain given texts, until one with the last text
// arrives.
func overhear(t *testing.T, n *testns.NS, link, text string) (until func(last string) int) {
	t.Helper()
	fd := -1
	n.Must("overhear", func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		const every = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network order
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, every); err != nil {
			return err
		}
		wait := unix.NsecToTimeval((5 * time.Second).Nanoseconds())
		return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: every, Ifindex: l.Attrs().Index}))
	})
	t.Cleanup(func() { unix.Close(fd) })
	return func(last string) (count int) {
		b := make([]byte, 4096)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			if err != nil {
				t.Fatalf("%q was not overheard: %v", last, err)
			}
			switch {
			case bytes.Contains(b[:n], []byte(last)):
				return count
			case bytes.Contains(b[:n], []byte(text)):
				count++
			}
		}
	}
}

func deleteLink(name string) func() error {
	return func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}
}
