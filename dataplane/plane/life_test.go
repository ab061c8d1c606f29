package plane_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/internal/testns"
)

func (h *host) purge(t *testing.T) {
	t.Helper()
	if err := plane.Purge(t.Context(), plane.Options{Namespace: &h.Handle, Numbers: h.numbers}); err != nil {
		t.Fatalf("purge: %v", err)
	}
}

// ours lists what is left of skein in the kernel.
func ours(t *testing.T, h *host) (left []string) {
	t.Helper()
	h.Do(func() {
		if _, err := netlink.LinkByName(dataplane.DefaultNumbers().Link); err == nil {
			left = append(left, "link")
		}
		tables, _ := (&nftables.Conn{}).ListTables()
		for _, tb := range tables {
			if tb.Name == dataplane.DefaultNumbers().NftTable && tb.Family == nftables.TableFamilyINet {
				left = append(left, "table")
			}
		}
		for _, f := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, _ := netlink.RuleList(f)
			for _, r := range rules {
				if r.Protocol == dataplane.RouteProtocol && r.Priority == dataplane.DefaultNumbers().RulePriority {
					left = append(left, r.String())
				}
			}
			routes, _ := netlink.RouteListFiltered(f, &netlink.Route{Table: dataplane.DefaultNumbers().RouteTable},
				netlink.RT_FILTER_TABLE)
			for _, r := range routes {
				if r.Protocol == dataplane.RouteProtocol {
					left = append(left, r.String())
				}
			}
		}
	})
	return left
}

func TestPurgeRemovesEverythingOfOurs(t *testing.T) {
	a := newHost(t, 1)
	a.apply(t, withPeer(a.spec(), newKeyPair(t).public, netip.AddrPort{}, pfx("10.4.0.9/32")))
	if n := len(ours(t, a)); n != 8 {
		t.Errorf("%d things of ours, want link, table, 2 rules and 4 routes: %q", n, ours(t, a))
	}
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.purge(t)
	if left := ours(t, a); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	a.purge(t) // of nothing is not an error
}

func TestRestartAdoptsAndWritesNothing(t *testing.T) {
	a := newHost(t, 1)
	s := withPeer(a.spec(), newKeyPair(t).public, netip.MustParseAddrPort("192.0.2.9:51820"), pfx("10.4.0.9/32"),
		pfx("10.100.0.0/27"), pfx("fd00:5::9/128"))
	a.apply(t, s)
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.open(t)
	w := a.apply(t, s).Writes
	if w["nft"] != 0 {
		t.Errorf("nft: %d messages", w["nft"])
	}
	if a.plane.Driver() == "kernel" && (w["wireguard"] != 0 || w["route"] != 0) {
		t.Errorf("after a restart: %v", w)
	}
	a.clean(t, s)
}

// In userspace the link ends with the agent. Packets for the tunnel must then not leave in plaintext.
func TestNoPlaintextWithoutTheLink(t *testing.T) {
	a, b := pair(t)
	block4, block6 := pfx("10.100.2.0/27"), pfx("fd00:6::/64")
	inside := []netip.Addr{addr("10.100.2.1"), addr("fd00:6::1")}
	b.Address("lo", netip.PrefixFrom(inside[0], 32), netip.PrefixFrom(inside[1], 128))
	for _, ip := range inside {
		b.echo(t, ip)
	}
	// Without skein everything in b is reached over the underlay: this is the leak to detect.
	a.Must("default routes", func() error {
		l, err := netlink.LinkByName("under")
		if err != nil {
			return err
		}
		for _, gw := range []string{"192.0.2.2", "2001:db8::2"} {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP(gw)}); err != nil {
				return err
			}
		}
		return nil
	})
	for _, ip := range inside {
		within(t, 5*time.Second, "plaintext before skein", func() bool { ok, _ := a.reaches(t, ip); return ok })
	}
	s := withPeer(a.spec(), b.keys.public, netip.MustParseAddrPort("192.0.2.2:51820"), block4, block6)
	a.apply(t, s)
	if err := a.plane.Close(); err != nil {
		t.Fatal(err)
	}
	a.Do(func() { // with the kernel driver the link outlives the agent: as if somebody deleted it
		if l, err := netlink.LinkByName(dataplane.DefaultNumbers().Link); err == nil {
			_ = netlink.LinkDel(l)
		}
	})
	for _, ip := range inside {
		ok, err := a.reaches(t, ip)
		if ok || !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.EACCES) {
			t.Errorf("%s: answered=%v, error %v, want unreachable", ip, ok, err)
		}
	}
	// Packets to the underlay itself are not marked.
	b.echo(t, addr("192.0.2.2"))
	if ok, err := a.reaches(t, addr("192.0.2.2")); !ok {
		t.Errorf("underlay: %v", err)
	}
}

// fleetSpec has n peers with an overlay address in each family and a block.
func fleetSpec(a *host, n int) (dataplane.Spec, []dataplane.Key) {
	s := a.spec()
	var keys []dataplane.Key
	for i := range n {
		k := dataplane.Key{byte(i), byte(i >> 8), 42, 31: 1}
		keys = append(keys, k)
		s = withPeer(s, k, netip.AddrPortFrom(addr("192.0.2.9"), uint16(1024+i)),
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 4, byte(1 + i/250), byte(i % 250)}), 32),
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 100, byte(i / 8), byte(i % 8 * 32)}), 27),
			netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 5, 13: 1, 14: byte(i / 256), 15: byte(i)}), 128))
	}
	return s, keys
}

func TestOneChangeAmongAThousandPeers(t *testing.T) {
	a := newHost(t, 1)
	s, keys := fleetSpec(a, 1000)
	start := time.Now()
	t.Logf("1,000 peers: %v in %s", a.apply(t, s).Writes, time.Since(start))
	a.clean(t, s)
	k := keys[500]
	step := func(name string, most map[string]int, change func()) {
		t.Helper()
		change()
		start := time.Now()
		w := a.apply(t, s).Writes
		t.Logf("%s: %v in %s", name, w, time.Since(start))
		for sub, n := range w {
			if n > most[sub] {
				t.Errorf("%s: %d messages to %s, want at most %d", name, n, sub, most[sub])
			}
		}
		a.clean(t, s)
	}
	p := s.WireGuard.Peers[k]
	step("endpoint", map[string]int{"wireguard": 1}, func() {
		p.Endpoint = netip.MustParseAddrPort("127.0.0.1:4000")
		s.WireGuard.Peers[k] = p
	})
	step("one more block", map[string]int{"wireguard": 1, "nft": 1}, func() {
		more := pfx("10.200.0.0/27")
		p.AllowedIPs = append(p.AllowedIPs[:3:3], more)
		s.WireGuard.Peers[k] = p
		s.Targets = append(s.Targets, more)
	})
	step("one block less", map[string]int{"wireguard": 1, "nft": 1}, func() {
		p.AllowedIPs = p.AllowedIPs[:3]
		s.WireGuard.Peers[k] = p
		s.Targets = s.Targets[:len(s.Targets)-1]
	})
	step("peer gone", map[string]int{"wireguard": 1, "nft": 2}, func() {
		delete(s.WireGuard.Peers, k)
		s.Targets = append(s.Targets[:1500:1500], s.Targets[1503:]...)
	})
	step("nothing", nil, func() {})
}

func TestNothingIsPrunedBeforeComplete(t *testing.T) {
	a := newHost(t, 1)
	s, _ := fleetSpec(a, 5)
	a.apply(t, s)
	empty := a.spec()
	empty.Complete = false
	a.apply(t, empty)
	if d := a.diff(t, s); len(d) > 0 {
		t.Errorf("pruned too early: %q", d)
	}
	fewer, _ := fleetSpec(a, 2)
	a.apply(t, fewer)
	a.clean(t, fewer)
	if peers, err := a.plane.Peers(t.Context()); err != nil || len(peers) != 2 {
		t.Errorf("%d peers, %v", len(peers), err)
	}
}

// The agent sets endpoints: the next Apply resets an endpoint that a peer or a stranger has changed, and until then
// it is not drift.
func TestEndpointIsPutBackByApplyOnly(t *testing.T) {
	a := newHost(t, 1)
	if a.plane.Driver() != "kernel" {
		t.Skip("a userspace device does not let others move a peer's endpoint; the kernel tier does")
	}
	here, there := netip.MustParseAddrPort("192.0.2.9:51820"), netip.MustParseAddrPort("203.0.113.9:9")
	k := newKeyPair(t).public
	s := withPeer(a.spec(), k, here, pfx("10.4.0.9/32"))
	a.apply(t, s)
	a.Must("move endpoint", changePeer(func(p wgtypes.Peer) wgtypes.PeerConfig {
		return wgtypes.PeerConfig{PublicKey: p.PublicKey, UpdateOnly: true, Endpoint: net.UDPAddrFromAddrPort(there)}
	}))
	for range 3 {
		peers, err := a.plane.Peers(t.Context())
		if err != nil || len(peers) != 1 || peers[0].Endpoint != there {
			t.Fatalf("peers: %+v %v", peers, err)
		}
	}
	if w := a.apply(t, s).Writes["wireguard"]; w != 1 {
		t.Errorf("%d messages to put the endpoint back", w)
	}
	a.clean(t, s)
}

// A change of many peers loses no packet of another peer.
func TestChangesDisturbNobodyElse(t *testing.T) {
	a, b := pair(t)
	sa, sb := withHost(a.spec(), b, addr("192.0.2.2")), withHost(b.spec(), a, addr("192.0.2.1"))
	a.apply(t, sa)
	b.apply(t, sb)
	b.echo(t, b.overlay4())
	within(t, 8*time.Second, "reach", func() bool { ok, _ := a.reaches(t, b.overlay4()); return ok })
	var c net.Conn
	a.Must("dial", func() (err error) {
		c, err = net.Dial("udp", net.JoinHostPort(b.overlay4().String(), "7"))
		return err
	})
	defer c.Close()
	lost := 0
	buf := make([]byte, 10)
	for i := range 60 {
		s, _ := fleetSpec(a, i%7*10)
		a.apply(t, withHost(s, b, addr("192.0.2.2")))
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write([]byte("x")); err != nil {
			lost++
		} else if _, err := c.Read(buf); err != nil {
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("%d of 60 packets lost", lost)
	}
}

func TestHostWithoutIPv6(t *testing.T) {
	h := &host{NS: testns.New(t, "plane"), keys: newKeyPair(t), n: 1}
	h.Sysctl("net.ipv6.conf.all.disable_ipv6", "1")
	h.Sysctl("net.ipv6.conf.default.disable_ipv6", "1")
	h.open(t)
	s := withPeer(h.spec(), newKeyPair(t).public, netip.AddrPort{}, pfx("10.4.0.9/32"), pfx("fd00:5::9/128"))
	r := h.apply(t, s)
	if len(r.Notes) != 1 || !strings.Contains(r.Notes[0], "IPv6 is disabled") {
		t.Errorf("notes: %q", r.Notes)
	}
	h.clean(t, s)
}

// Strict reverse path filtering would drop packets from the tunnel whose source the main table does not route through
// the tunnel.
func TestStrictReversePathFilter(t *testing.T) {
	a, b := pair(t)
	a.Sysctl("net.ipv4.conf.all.rp_filter", "1")
	pod := addr("10.100.2.1")
	b.Address("lo", netip.PrefixFrom(pod, 32))
	a.Must("default route", func() error {
		l, err := netlink.LinkByName("under")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP("192.0.2.2")})
	})
	sa := withHost(a.spec(), b, addr("192.0.2.2"))
	p := sa.WireGuard.Peers[b.keys.public]
	p.AllowedIPs = append(p.AllowedIPs, pfx("10.100.2.0/27"))
	sa.WireGuard.Peers[b.keys.public] = p
	sa.Targets = append(sa.Targets, pfx("10.100.2.0/27"))
	a.apply(t, sa)
	b.apply(t, withHost(b.spec(), a, addr("192.0.2.1")))
	a.echo(t, a.overlay4())
	within(t, 8*time.Second, "a's echo answers b's pod", func() bool {
		ok := false
		b.Do(func() {
			c, err := (&net.Dialer{LocalAddr: &net.UDPAddr{IP: pod.AsSlice()}}).Dial("udp",
				net.JoinHostPort(a.overlay4().String(), "7"))
			if err != nil {
				return
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
			_, _ = c.Write([]byte("x"))
			_, err = c.Read(make([]byte, 10))
			ok = err == nil
		})
		return ok
	})
	a.Do(func() {
		v, _ := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter")
		if strings.TrimSpace(string(v)) != "1" {
			t.Errorf("all.rp_filter is now %s", v)
		}
	})
}

func TestPortInUseIsNamed(t *testing.T) {
	a := newHost(t, 1)
	var c net.PacketConn
	a.Must("take the port", func() (err error) {
		c, err = net.ListenPacket("udp4", fmt.Sprintf(":%d", dataplane.Port))
		return err
	})
	s := a.spec()
	r, err := a.plane.Apply(t.Context(), s)
	if err == nil || !strings.Contains(err.Error(), "ports.wireguard") || !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("error: %v", err)
	}
	if r.Errors["nft"] != nil {
		t.Errorf("nft failed with it: %v", r.Errors["nft"])
	}
	c.Close()
	within(t, 10*time.Second, "works by itself once the port is free", func() bool { return len(a.diff(t, s)) == 0 })
}

func TestForeignLinkIsRefused(t *testing.T) {
	n := testns.New(t, "plane")
	addVeth(t, n, dataplane.DefaultNumbers().Link)
	_, err := plane.Open(t.Context(), plane.Options{Namespace: &n.Handle})
	if err == nil || !strings.Contains(err.Error(), "skein0 exists and is a veth link") {
		t.Errorf("error: %v", err)
	}
	if err := plane.Purge(t.Context(), plane.Options{Namespace: &n.Handle}); err == nil {
		t.Error("purge took a foreign link for ours")
	}
}

func TestSecondUserspaceAgentIsRefused(t *testing.T) {
	n := testns.New(t, "plane")
	p, err := plane.Open(t.Context(), plane.Options{Namespace: &n.Handle, Driver: "userspace"})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err = plane.Open(t.Context(), plane.Options{Namespace: &n.Handle, Driver: "userspace"}); err == nil ||
		!strings.Contains(err.Error(), "stop that agent first") {
		t.Errorf("error: %v", err)
	}
}

func TestUnknownDriverIsNamed(t *testing.T) {
	n := testns.New(t, "plane")
	if _, err := plane.Open(t.Context(), plane.Options{Namespace: &n.Handle, Driver: "magic"}); err == nil ||
		!strings.Contains(err.Error(), "auto, kernel and userspace") {
		t.Errorf("error: %v", err)
	}
}

func TestClosedPlaneSaysSo(t *testing.T) {
	a := newHost(t, 1)
	_ = a.plane.Close()
	if _, err := a.plane.Apply(t.Context(), a.spec()); !errors.Is(err, plane.ErrClosed) {
		t.Errorf("error: %v", err)
	}
}
