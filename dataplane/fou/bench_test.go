package fou_test

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testns"
)

// BenchmarkTCP is one TCP connection from the client through the gateway to the target. Compare the drivers with
// "plain": the same way over two TUN devices of one process, which copies packets from one to the other and does
// nothing else.
func BenchmarkTCP(b *testing.B) {
	for _, c := range []struct {
		name   string
		target netip.Addr
		make   func(b *testing.B) *scene
	}{
		{"plain/IPv4", target4, plain},
		{"plain/IPv6", target6, plain},
		{"userspace/IPv4", target4, func(b *testing.B) *scene { return newScene(b, fou.Userspace, fou.Userspace, false) }},
		{"userspace/IPv6", target6, func(b *testing.B) *scene { return newScene(b, fou.Userspace, fou.Userspace, false) }},
		{"userspace-auto/IPv4", target4, func(b *testing.B) *scene {
			return newScene(b, fou.Userspace, fou.Userspace, true)
		}},
		{"kernel/IPv4", target4, kernelScene},
		{"kernel/IPv6", target6, kernelScene},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.make(b)
			received := s.sink(b, c.target)
			conn := s.dial(b, "tcp", c.target)
			chunk := make([]byte, 1<<20)
			conn.Write(chunk) // past the slow start
			b.SetBytes(int64(len(chunk)))
			b.ResetTimer()
			for range b.N {
				conn.SetDeadline(time.Now().Add(deadline))
				if _, err := conn.Write(chunk); err != nil {
					b.Fatal(err)
				}
			}
			conn.Close()
			if n := <-received; n != int64(b.N+1)<<20 {
				b.Fatalf("%d bytes arrived, want %d", n, int64(b.N+1)<<20)
			}
		})
	}
}

func kernelScene(b *testing.B) *scene {
	if err := fou.TryKernel(); err != nil {
		b.Skip(err)
	}
	return newScene(b, fou.Kernel, fou.Kernel, false)
}

// sink takes one connection at the target, and tells how much came.
func (s *scene) sink(t testing.TB, addr netip.Addr) <-chan int64 {
	t.Helper()
	out := make(chan int64, 1)
	s.target.Must("listening", func() error {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 7)))
		if err != nil {
			return err
		}
		go func() {
			defer l.Close()
			c, err := l.AcceptTCP()
			if err != nil {
				out <- 0
				return
			}
			defer c.Close()
			n, _ := io.Copy(io.Discard, c)
			out <- n
		}()
		return nil
	})
	return out
}

// plain is a scene whose tunnel is two TUN devices with a copying process between.
func plain(b *testing.B) *scene {
	p := netip.MustParsePrefix
	s := &scene{client: testns.New(b, "foucl"), gateway: testns.New(b, "fougw"), target: testns.New(b, "foutg")}
	testns.Link(s.gateway, s.target, "out", []netip.Prefix{p("198.51.100.1/24"), p("2001:db8:7::1/64")},
		[]netip.Prefix{p("198.51.100.7/24"), p("2001:db8:7::7/64")})
	s.gateway.Sysctl("net.ipv4.ip_forward", "1")
	s.gateway.Sysctl("net.ipv6.conf.all.forwarding", "1")
	for _, r := range []string{"10.100.0.0/16 198.51.100.1", "fd00::/8 2001:db8:7::1"} {
		route(b, s.target, r, "", 0)
	}
	var devices []tun.Device
	for i, n := range []*testns.NS{s.client, s.gateway} {
		n.Must("TUN", func() error {
			d, err := tun.CreateTUN("tun", mtu4)
			if err == nil {
				devices = append(devices, d)
				go func() {
					for range d.Events() {
					}
				}()
			}
			return err
		})
		b.Cleanup(func() { devices[i].Close() })
	}
	s.client.Address("tun", p("10.100.1.2/32"), p("fd00:1::2/128"))
	s.gateway.Address("tun")
	for _, r := range []netip.Addr{target4, target6} {
		deviceRoute(b, s.client, r)
	}
	for _, r := range []netip.Addr{client4, client6} {
		deviceRoute(b, s.gateway, r)
	}
	for i := range devices {
		go pump(devices[i], devices[1-i])
	}
	return s
}

func deviceRoute(t testing.TB, n *testns.NS, to netip.Addr) {
	n.Must("route", func() error {
		l, err := netlink.LinkByName("tun")
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &net.IPNet{IP: to.AsSlice(),
			Mask: net.CIDRMask(to.BitLen(), to.BitLen())}})
	})
}

// pump copies packets until a device is closed.
func pump(from, to tun.Device) {
	const room = 16 // bytes before each packet, for the header of the TUN device
	bufs, sizes := make([][]byte, from.BatchSize()), make([]int, from.BatchSize())
	for i := range bufs {
		bufs[i] = make([]byte, 1<<16)
	}
	for {
		n, err := from.Read(bufs, sizes, room)
		if err != nil {
			return
		}
		out := make([][]byte, n)
		for i := range n {
			out[i] = bufs[i][:room+sizes[i]]
		}
		if _, err := to.Write(out, room); err != nil {
			return
		}
	}
}
