package fou_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/internal/testns"
)

// drivers are those that this machine has; in the kernel tier both.
func drivers(t *testing.T) []string {
	t.Helper()
	if err := fou.TryKernel(); err != nil {
		if wantKernel() {
			t.Fatal(err)
		}
		return []string{fou.Userspace}
	}
	return []string{fou.Userspace, fou.Kernel}
}

func each(t *testing.T, f func(t *testing.T, driver string)) {
	for _, d := range drivers(t) {
		t.Run(d, func(t *testing.T) { f(t, d) })
	}
}

// links lists names and indexes of a namespace's links.
func links(t testing.TB, n *testns.NS) map[string]int {
	t.Helper()
	out := map[string]int{}
	n.Must("links", func() error {
		all, err := netlink.LinkList()
		for _, l := range all {
			out[l.Attrs().Name] = l.Attrs().Index
		}
		return err
	})
	return out
}

// A driver that starts anew takes what the former left, with the routes, and writes nothing.
func TestRestartAdopts(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		s := newScene(t, driver, driver, false)
		s.echo(t, target4)
		u := s.dial(t, "udp", target4)
		ask(t, u, []byte("before"))
		if n := s.reconcile(t); n != 0 {
			t.Errorf("%d writes though nothing changed", n)
		}
		before := [2]map[string]int{links(t, s.client), links(t, s.gateway)}
		if err := errors.Join(s.near.Close(), s.far.Close()); err != nil {
			t.Fatal(err)
		}
		s.near, s.far = open(t, s.client, driver), open(t, s.gateway, driver)
		n := s.reconcile(t)
		if limit := map[string]int{fou.Kernel: 0, fou.Userspace: 4}[driver]; n != limit { // the TUN driver's sockets
			t.Errorf("%d writes after a restart, want %d", n, limit)
		}
		if n := s.reconcile(t); n != 0 {
			t.Errorf("%d writes though nothing changed", n)
		}
		for i, ns := range []*testns.NS{s.client, s.gateway} {
			for name, index := range links(t, ns) {
				if strings.HasPrefix(name, "fou") && before[i][name] != index {
					t.Errorf("%s was made anew", name)
				}
			}
		}
		ask(t, u, []byte("after"))
	})
}

// A driver takes over from the other.
func TestChangeOfDriver(t *testing.T) {
	needKernel(t)
	s := newScene(t, fou.Kernel, fou.Kernel, false)
	for _, driver := range []string{fou.Userspace, fou.Kernel} {
		if err := errors.Join(s.near.Close(), s.far.Close()); err != nil {
			t.Fatal(err)
		}
		s.near, s.far = open(t, s.client, driver), open(t, s.gateway, driver)
		s.gatewayMode = false
		s.reconcile(t)
		before, err := s.near.Stats()
		if err != nil {
			t.Fatal(err)
		}
		if n := s.reconcile(t); n != 0 {
			t.Errorf("%s: %d writes though nothing changed", driver, n)
		}
		route(t, s.client, netip.PrefixFrom(target4, 32).String(), s.near.Link(client4, endpoint4), 0)
		await(t, driver+" sends", func() bool {
			inject(t, s.client, datagram(client4, target4, 0, "x"), target4)
			now, _ := s.near.Stats()
			return now.TxPackets > before.TxPackets
		})
	}
}

// Devices of others stay as they are, also what loading ipip and ip6_tunnel makes in each namespace.
func TestForeignDevicesStay(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		n := testns.New(t, "foufo")
		n.Must("foreign links", func() error {
			for _, name := range []string{"fou40", "xfou4_1", "eth0"} {
				a := netlink.NewLinkAttrs()
				a.Name = name
				if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: a}); err != nil {
					return err
				}
			}
			return nil
		})
		before := links(t, n)
		d := open(t, n, driver)
		spec := fou.Spec{IPv4: true, IPv6: true, Any: true,
			Tunnels: []fou.Tunnel{{Local: client4, Remote: endpoint4, MTU: 1300}}}
		if _, err := d.Reconcile(spec); err != nil {
			t.Fatal(err)
		}
		if got := links(t, n); got[dataplane.FoULink(endpoint4)] == 0 || got[dataplane.FoUAny4] == 0 ||
			got[dataplane.FoUAny6] == 0 {
			t.Errorf("devices missing: %v", got)
		}
		if _, err := d.Reconcile(fou.Spec{}); err != nil {
			t.Fatal(err)
		}
		after := links(t, n)
		for name := range after {
			if strings.HasPrefix(name, "fou4_") || strings.HasPrefix(name, "fou6_") {
				t.Errorf("%s is left", name)
			}
		}
		for name, index := range before {
			if after[name] != index {
				t.Errorf("%s is another, or gone", name)
			}
		}
		if n, err := d.Reconcile(fou.Spec{}); n != 0 || err != nil {
			t.Errorf("%d writes though nothing is wanted, %v", n, err)
		}
	})
}

// Who deletes a device, sets it down or changes its MTU finds it repaired; traffic goes on.
func TestRepair(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		s := newScene(t, driver, driver, false)
		s.echo(t, target4)
		u := s.dial(t, "udp", target4)
		ask(t, u, []byte("before"))
		link := s.near.Link(client4, endpoint4)
		for what, harm := range map[string]func(l netlink.Link) error{
			"down":    netlink.LinkSetDown,
			"MTU":     func(l netlink.Link) error { return netlink.LinkSetMTU(l, 1000) },
			"deleted": netlink.LinkDel,
		} {
			s.client.Must(what, func() error {
				l, err := netlink.LinkByName(link)
				if err != nil {
					return err
				}
				return harm(l)
			})
			if n := s.reconcile(t); n != 1 {
				t.Errorf("%s: %d writes, want 1", what, n)
			}
			if n := s.reconcile(t); n != 0 {
				t.Errorf("%s: %d writes after the repair", what, n)
			}
			route(t, s.client, netip.PrefixFrom(target4, 32).String(), link, 0)
			ask(t, u, []byte(what))
		}
	})
}

// The source port changes while a connection stands, and not a packet of it is lost.
func TestSourcePortChangesLive(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		t.Parallel()
		s := newScene(t, driver, driver, false)
		s.echo(t, target4)
		s.echo(t, target6)
		before := links(t, s.client)
		w := capture(t, s.gateway, "under")
		for _, auto := range []bool{true, false, true} {
			for _, addr := range []netip.Addr{target4, target6} {
				u := s.dial(t, "udp", addr)
				ask(t, u, []byte("hello"))
			}
			if s.auto = auto; s.reconcile(t) == 0 {
				t.Error("no write for another source port")
			}
			u := s.dial(t, "udp", target4)
			for i := range 20 { // each must be answered at the first attempt
				u.Write([]byte{byte(i)})
				u.SetReadDeadline(time.Now().Add(deadline))
				if _, err := u.Read(make([]byte, 10)); err != nil {
					t.Fatalf("after the change: %v", err)
				}
			}
			seen := map[uint16]bool{}
			for p := range w.all(func(p []byte) bool {
				return p[0]>>4 == 4 && p[9] == unix.IPPROTO_UDP && p[20+2] == 0x15 && p[20+3] == 0xb3 && p[15] == 2 &&
					p[len(p)-1] == 19
			}) {
				seen[uint16(p[20])<<8|uint16(p[21])] = true
			}
			if len(seen) != 1 || seen[dataplane.FoUPort] == auto {
				t.Errorf("automatic %t: source ports %v", auto, seen)
			}
		}
		for name, index := range links(t, s.client) {
			if before[name] != index {
				t.Errorf("%s was made anew", name)
			}
		}
	})
}

// The port of the tunnels changes while connections stand: both ends take what comes to either, then send to the next,
// one after the other, then forget the former. Nothing is lost, no device is made anew, and the former port is free.
func TestPortChangesLive(t *testing.T) {
	const next = 6000
	each(t, func(t *testing.T, driver string) {
		t.Parallel()
		s := newScene(t, driver, driver, false)
		before := links(t, s.client)
		var all []net.Conn
		for _, addr := range []netip.Addr{target4, target6} {
			s.echo(t, addr)
			all = append(all, s.dial(t, "udp", addr))
		}
		w := capture(t, s.gateway, "under")
		both, turned := dataplane.FoUPorts{Also: next}, dataplane.FoUPorts{Send: next, Also: dataplane.FoUPort}
		last := dataplane.FoUPorts{Send: next}
		for step, ports := range [][2]dataplane.FoUPorts{
			{}, {both, {}}, {both, both}, {both, turned}, {turned, turned}, {last, turned}, {last, last},
		} {
			s.nearPorts, s.farPorts = ports[0], ports[1]
			if n := s.reconcile(t); step > 0 && n == 0 {
				t.Errorf("step %d: no write", step)
			}
			if n := s.reconcile(t); n != 0 {
				t.Errorf("step %d: %d writes after it", step, n)
			}
			for _, u := range all {
				for i := range 20 { // each must be answered at the first attempt
					u.Write([]byte{byte(step), byte(i)})
					u.SetReadDeadline(time.Now().Add(deadline))
					if _, err := u.Read(make([]byte, 10)); err != nil {
						t.Fatalf("step %d: %v", step, err)
					}
				}
			}
		}
		seen := map[uint16]bool{}
		for p := range w.all(func(p []byte) bool {
			return p[0]>>4 == 4 && p[9] == unix.IPPROTO_UDP && p[len(p)-2] == 6 && p[len(p)-1] == 19
		}) {
			seen[uint16(p[20])<<8|uint16(p[21])], seen[uint16(p[22])<<8|uint16(p[23])] = true, true
		}
		if len(seen) != 1 || !seen[next] {
			t.Errorf("ports at the end: %v, want %d alone", seen, next)
		}
		for name, index := range links(t, s.client) {
			if before[name] != index {
				t.Errorf("%s was made anew", name)
			}
		}
		for _, n := range []*testns.NS{s.client, s.gateway} {
			n.Must("binding the former port", func() error {
				fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // both families
				if err != nil {
					return err
				}
				defer unix.Close(fd)
				return unix.Bind(fd, &unix.SockaddrInet6{Port: dataplane.FoUPort})
			})
		}
	})
}

// A smaller network below than the tunnel believes: the sender is told, and TCP goes on.
func TestSmallerPathBelow(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		t.Parallel()
		s := newScene(t, driver, driver, false)
		for _, addr := range []netip.Addr{target4, target6} {
			s.echo(t, addr)
			u := s.dial(t, "udp", addr)
			ask(t, u, []byte("hello"))
			for _, n := range []*testns.NS{s.client, s.gateway} {
				n.Must("MTU", func() error { return setMTU("under", 1350) })
			}
			await(t, "the sender is told", func() bool {
				_, err := u.Write(make([]byte, 1300))
				return errors.Is(err, unix.EMSGSIZE)
			})
			stream(t, s.dial(t, "tcp", addr), 256<<10)
			for _, n := range []*testns.NS{s.client, s.gateway} {
				n.Must("MTU", func() error { return setMTU("under", underMTU) })
			}
		}
	})
}

// Errors say what is in the way.
func TestPortIsTaken(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		n := testns.New(t, "foupt")
		var fd int
		n.Must("binding", func() (err error) {
			if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
				return err
			}
			return unix.Bind(fd, &unix.SockaddrInet4{Port: dataplane.FoUPort})
		})
		d := open(t, n, driver)
		if _, err := d.Reconcile(fou.Spec{IPv4: true}); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(),
			"5555") || !strings.Contains(err.Error(), "another program") {
			t.Errorf("got %v", err)
		}
		unix.Close(fd)
		if _, err := d.Reconcile(fou.Spec{IPv4: true}); err != nil {
			t.Error(err)
		}
	})
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	for want, o := range map[string]fou.Options{"no such file": {NetNS: "/run/netns/none-such"},
		`driver "fast"`: {Driver: "fast"}} {
		if _, err := fou.Open(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
	if fou.TryKernel() != nil {
		if _, err := fou.Open(fou.Options{Driver: fou.Kernel}); !errors.Is(err, fou.ErrNoKernelFoU) ||
			!strings.Contains(err.Error(), "load the modules") {
			t.Errorf("got %v", err)
		}
	}
}

// Auto takes the kernel's where it has FoU.
func TestAuto(t *testing.T) {
	want := drivers(t)
	if d := open(t, testns.New(t, "fouau"), fou.Auto); d.Name() != want[len(want)-1] {
		t.Errorf("%s, want %s", d.Name(), want[len(want)-1])
	}
}

// Close ends all goroutines and gives back all files.
func TestCloseLeavesNothing(t *testing.T) {
	n := testns.New(t, "foucs")
	spec := fou.Spec{IPv4: true, IPv6: true, Any: true,
		Tunnels: []fou.Tunnel{{Local: client4, Remote: endpoint4, SourcePortAuto: true, MTU: 1300},
			{Local: client6, Remote: endpoint6, MTU: 1300}}}
	goroutines, files := runtime.NumGoroutine(), testenv.OpenFiles(t)
	for range 3 {
		d := open(t, n, fou.Userspace)
		if _, err := d.Reconcile(spec); err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "goroutines and files as before", func() bool {
		return runtime.NumGoroutine() <= goroutines && testenv.OpenFiles(t) <= files
	})
}

// A client's namespace costs little memory beside what all share, once the kernel has said its first words in it.
func TestMemoryOfClients(t *testing.T) {
	clients := 20
	if wantKernel() {
		clients = 3 // emulated
	}
	live := func() int {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse)
	}
	spec := fou.Spec{IPv4: true, IPv6: true, Any: true}
	for i := range 4 {
		spec.Tunnels = append(spec.Tunnels, fou.Tunnel{Local: client4, Remote: netip.AddrFrom4([4]byte{10, 9, 0, byte(i)}),
			SourcePortAuto: true, MTU: 1300})
	}
	all := make([]*testns.NS, 1+clients)
	for i := range all {
		all[i] = testns.New(t, "foume")
	}
	var before int
	for i, n := range all {
		if i == 1 { // what all share is there
			before = live()
		}
		if _, err := open(t, n, fou.Userspace).Reconcile(spec); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "at most 256 KiB for each client's namespace with four tunnels", func() bool {
		each := (live() - before) / clients >> 10
		t.Logf("%d KiB", each)
		return each <= 256
	})
}

// A thousand clients: made quickly, and one more costs as much as it costs.
func TestManyTunnels(t *testing.T) {
	each(t, func(t *testing.T, driver string) {
		count, limit := 1000, 10*time.Second
		if wantKernel() {
			count, limit = 200, 20*time.Second // emulated
		}
		n := testns.New(t, "fouma")
		d := open(t, n, driver)
		spec := fou.Spec{IPv4: true, Gateway: true}
		for i := range count {
			spec.Tunnels = append(spec.Tunnels,
				fou.Tunnel{Local: endpoint4, Remote: netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), MTU: 1300})
		}
		one := spec
		one.Tunnels = slices.Clone(spec.Tunnels[1:])
		start := time.Now()
		if _, err := d.Reconcile(one); err != nil {
			t.Fatal(err)
		}
		all := time.Since(start)
		start = time.Now()
		writes, err := d.Reconcile(spec)
		if err != nil || writes != 1 {
			t.Errorf("one more: %d writes, %v; want 1", writes, err)
		}
		more := time.Since(start)
		start = time.Now()
		if writes, err := d.Reconcile(spec); err != nil || writes != 0 {
			t.Errorf("nothing changed: %d writes, %v", writes, err)
		}
		t.Logf("%d tunnels in %s, one more in %s, nothing in %s", count-1, all, more, time.Since(start))
		if all > limit {
			t.Errorf("%d tunnels took %s, want at most %s", count-1, all, limit)
		}
	})
}

// Close returns while packets are under way both ways, and after it the namespace's tunnels carry nothing.
func TestCloseUnderLoad(t *testing.T) {
	s := newScene(t, fou.Userspace, fou.Userspace, true)
	s.echo(t, target6)
	c := s.dial(t, "tcp", target6)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 64<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	go io.Copy(io.Discard, c)
	await(t, "a load", func() bool { now, _ := s.far.Stats(); return now.RxBytes > 4<<20 && now.TxBytes > 4<<20 })
	closed := make(chan error, 1)
	go func() { closed <- errors.Join(s.far.Close(), s.near.Close()) }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(deadline):
		t.Fatal("Close does not return")
	}
	c.Close()
	<-done
	if before := links(t, s.client); before[dataplane.FoULink(endpoint6)] == 0 {
		t.Error("the device is gone")
	}
}
