package nattest

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testenv"
)

// Kind is how a host is connected.
type Kind string

// Kinds of connection.
const (
	Public         Kind = "public"          // an address of the segment, no filter
	Firewalled     Kind = "firewalled"      // the same, and only answers come in
	OneToOne       Kind = "one-to-one"      // an outside address of its own
	FullCone       Kind = "full-cone"       // mapped and filtered independently of the endpoint
	Hairpin        Kind = "hairpin"         // a full cone that turns packets to its own outside address round
	RestrictedCone Kind = "restricted-cone" // lets in the addresses that were sent to
	PortRestricted Kind = "port-restricted" // lets in the addresses and ports that were sent to
	Forwarded      Kind = "forwarded"       // port-restricted, with WireGuard's port forwarded
	Symmetric      Kind = "symmetric"       // another port for each destination
	Narrow         Kind = "narrow"          // the same, of the NarrowPorts from NarrowFirst on
	Sequential     Kind = "sequential"      // the same, each port the last one plus one
	Blocked        Kind = "blocked"         // no UDP
)

// WireGuardPort is the port that Forwarded forwards.
const WireGuardPort = 51820

// The ports of a NAT of kind Narrow.
const (
	NarrowFirst = 40000
	NarrowPorts = 256
)

// Net is one internet: 203.0.113.0/24, or another /24, and 2001:db8::/64 on a bridge.
type Net struct {
	t       testing.TB
	core    netns.NsHandle
	network [3]byte
	next    byte
}

// Host is one namespace on it.
type Host struct {
	t       testing.TB
	ns      netns.NsHandle
	Addr    netip.Addr // its own IPv4 address
	Addr6   netip.Addr // IPv6; the zero Addr behind a NAT
	Outside netip.Addr // its IPv4 address as others see it
	Router  *Host      // the one it stands behind: link lan inside, wan outside; nil: none
}

// New makes an empty internet that ends with the test.
func New(t testing.TB) *Net {
	t.Helper()
	return At(t, netip.MustParsePrefix("203.0.113.0/24"))
}

// At is New with another IPv4 network, a /24: some programs do not take documentation's for public.
func At(t testing.TB, network netip.Prefix) *Net {
	t.Helper()
	testenv.NeedRoot(t)
	b := network.Addr().As4()
	n := &Net{t: t, core: namespace(t), network: [3]byte(b[:3]), next: 1}
	h := n.handle(n.core)
	snooping := false // else neighbour solicitations get lost until hosts have reported their groups
	must(t, h.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "core"}, MulticastSnooping: &snooping}))
	up(t, h, "core")
	return n
}

// Host adds a host. It may send and receive at once.
func (n *Net) Host(kind Kind) *Host {
	n.t.Helper()
	n.next++
	outside := netip.AddrFrom4([4]byte{n.network[0], n.network[1], n.network[2], n.next})
	switch kind {
	case Public, Firewalled:
		h := n.segment(n.next, outside)
		if kind == Firewalled {
			firewall(n.t, h.ns)
		}
		return h
	}
	router := n.segment(n.next, outside)
	inside := namespace(n.t)
	a, b := n.handle(router.ns), n.handle(inside)
	must(n.t, a.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "lan"}, PeerName: "eth0",
		PeerNamespace: netlink.NsFd(inside)}))
	h := &Host{t: n.t, ns: inside, Addr: netip.MustParseAddr("192.168.1.2"), Outside: outside, Router: router}
	address(n.t, a, "lan", "192.168.1.1/24")
	address(n.t, b, "eth0", "192.168.1.2/24")
	up(n.t, a, "lan")
	up(n.t, b, "lo")
	up(n.t, b, "eth0")
	carrier(n.t, a, "lan")
	carrier(n.t, b, "eth0")
	must(n.t, b.RouteAdd(&netlink.Route{Gw: net.IPv4(192, 168, 1, 1)}))
	router.Do(func() {
		must(n.t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644))
	})
	translate(n.t, router.ns, kind, h.Addr, outside)
	return h
}

// segment adds a namespace with an address on the bridge.
func (n *Net) segment(i byte, v4 netip.Addr) *Host {
	ns := namespace(n.t)
	core, h := n.handle(n.core), n.handle(ns)
	port := fmt.Sprintf("p%d", i)
	must(n.t, core.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: port}, PeerName: "wan",
		PeerNamespace: netlink.NsFd(ns)}))
	bridge, err := core.LinkByName("core")
	must(n.t, err)
	link, err := core.LinkByName(port)
	must(n.t, err)
	must(n.t, core.LinkSetMaster(link, bridge))
	must(n.t, core.LinkSetUp(link))
	v6 := netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 15: i})
	address(n.t, h, "wan", v4.String()+"/24")
	address(n.t, h, "wan", v6.String()+"/64")
	up(n.t, h, "lo")
	up(n.t, h, "wan")
	carrier(n.t, h, "wan")
	carrier(n.t, core, port)
	return &Host{t: n.t, ns: ns, Addr: v4, Addr6: v6, Outside: v4}
}

// Do runs f on a thread that is in the host's namespace. Sockets that f opens stay there; goroutines that it starts do
// not.
func (h *Host) Do(f func()) {
	h.t.Helper()
	within(h.t, h.ns, f)
}

// Command is a child process in the host's namespace; f starts it.
func (h *Host) Command(f func(*exec.Cmd) error, name string, args ...string) error {
	var err error
	h.Do(func() { err = f(exec.Command(name, args...)) })
	return err
}

// AddAddress gives the host's link another address.
func (h *Host) AddAddress(link, prefix string) {
	h.t.Helper()
	n, err := netlink.NewHandleAt(h.ns)
	must(h.t, err)
	defer n.Close()
	address(h.t, n, link, prefix)
}

func within(t testing.TB, ns netns.NsHandle, f func()) {
	t.Helper()
	runtime.LockOSThread()
	before, err := netns.Get()
	must(t, err)
	defer before.Close()
	must(t, netns.Set(ns))
	defer func() {
		// A thread that cannot go back stays locked and ends with its goroutine.
		if netns.Set(before) == nil {
			runtime.UnlockOSThread()
		}
	}()
	f()
}

// namespace makes one without a name; it is gone when nobody holds it open.
func namespace(t testing.TB) netns.NsHandle {
	t.Helper()
	runtime.LockOSThread()
	before, err := netns.Get()
	must(t, err)
	defer before.Close()
	ns, err := netns.New()
	must(t, err)
	must(t, netns.Set(before))
	runtime.UnlockOSThread()
	t.Cleanup(func() { ns.Close() })
	return ns
}

func (n *Net) handle(ns netns.NsHandle) *netlink.Handle {
	n.t.Helper()
	h, err := netlink.NewHandleAt(ns)
	must(n.t, err)
	n.t.Cleanup(h.Close)
	return h
}

func up(t testing.TB, h *netlink.Handle, name string) {
	t.Helper()
	link, err := h.LinkByName(name)
	must(t, err)
	must(t, h.LinkSetUp(link))
}

// carrier waits until the kernel has noticed that the other end of a link is up.
func carrier(t testing.TB, h *netlink.Handle, name string) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; runtime.Gosched() {
		link, err := h.LinkByName(name)
		must(t, err)
		if link.Attrs().OperState == netlink.OperUp {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("link %s is still %s", name, link.Attrs().OperState)
		}
	}
}

func address(t testing.TB, h *netlink.Handle, name, prefix string) {
	t.Helper()
	link, err := h.LinkByName(name)
	must(t, err)
	a, err := netlink.ParseAddr(prefix)
	must(t, err)
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	must(t, h.AddrAdd(link, a))
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
