package wireguard

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// BenchmarkStream sends one TCP stream through two devices in two namespaces: ours, ours with each packet inside
// another one, and as the wireguard-go program makes them. cpu-ns/KiB is the processor time of all that, which other
// work on this machine moves least.
func BenchmarkStream(b *testing.B) {
	for name, open := range map[string]func(b *testing.B, link string, n int) *device.Device{"ours": openOurs,
		"hops": openHops, "plain": openPlain} {
		b.Run(name, func(b *testing.B) { stream(b, open, name == "hops") })
	}
}

func openOurs(b *testing.B, link string, _ int) *device.Device {
	return openWith(b, link, dataplane.Hops{})
}

// openHops is one of the two ends, where addresses of 10.1 are behind the other end's of 10.0.
func openHops(b *testing.B, link string, n int) *device.Device {
	own, other := netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + n)}), netip.AddrFrom4([4]byte{10, 0, 0, byte(2 - n)})
	all := netip.MustParsePrefix("10.1.0.0/24")
	return openWith(b, link, dataplane.Hops{Self: own, Routes: []dataplane.HopRoute{{Prefix: all, Via: other}},
		Guards: []dataplane.HopGuard{{From: other, Sources: []netip.Prefix{all}}}})
}

func openWith(b *testing.B, link string, h dataplane.Hops) *device.Device {
	d, _, err := openUserspace(OpenConfig{Link: link, MTU: dataplane.MTU, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Error(err)
		return nil
	}
	if notes := d.SetHops(h); len(notes) > 0 {
		b.Error(notes)
	}
	return d.(*userspaceDevice).dev
}

func openPlain(b *testing.B, link string, _ int) *device.Device {
	t, err := tun.CreateTUN(link, dataplane.MTU)
	if err != nil {
		b.Error(err)
		return nil
	}
	return device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, ""))
}

func stream(b *testing.B, open func(b *testing.B, link string, n int) *device.Device, hops bool) {
	ends := [2]*testns.NS{testns.New(b, "stream"), testns.New(b, "stream")}
	ends[0].Do(func() {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(ends[1].Handle)}
		if err := netlink.LinkAdd(veth); err != nil {
			b.Error(err)
		}
	})
	keys := [2]dataplane.Key{}
	public := [2]dataplane.Key{}
	for i := range keys {
		k := newKey(b)
		keys[i], public[i] = dataplane.Key(k), dataplane.Key(k.PublicKey())
	}
	outer := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, 0, byte(1 + i)}) }
	inner := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + i)}) }
	mtu, to := dataplane.MTU, inner
	if hops {
		mtu, to = dataplane.MTU-dataplane.HopOverhead,
			func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, 0, byte(1 + i)}) }
	}
	for i, ns := range ends {
		var d *device.Device
		ns.Do(func() {
			if d = open(b, "wg0", i); d == nil {
				return
			}
			err := d.IpcSet(
				fmt.Sprintf("private_key=%x\nlisten_port=51820\npublic_key=%x\nendpoint=%s:51820\nallowed_ip=%s/32\n", keys[i][:],
					public[1-i][:], outer(1-i), inner(1-i)))
			if err == nil {
				err = d.Up()
			}
			for link, addr := range map[string]netip.Addr{"eth0": outer(i), "wg0": to(i)} {
				l, lerr := netlink.LinkByName(link)
				if lerr != nil || err != nil {
					b.Error(lerr, err)
					return
				}
				if link == "wg0" {
					err = netlink.LinkSetMTU(l, mtu)
				}
				if aerr := netlink.AddrAdd(l,
					&netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(24, 32)}}); aerr != nil {
					b.Error(aerr)
				}
				if uerr := netlink.LinkSetUp(l); uerr != nil {
					b.Error(uerr)
				}
			}
			if err != nil {
				b.Error(err)
			}
		})
		if d != nil {
			defer d.Close()
		}
	}
	if b.Failed() {
		return
	}
	pump(b, ends, to(1))
}

// pump sends what the benchmark asks for, in pieces of 128 KiB, and waits until all of it has arrived.
func pump(b *testing.B, ends [2]*testns.NS, to netip.Addr) {
	const piece = 128 << 10
	at := netip.AddrPortFrom(to, 5001)
	var listener net.Listener
	var sender net.Conn
	ends[1].Do(func() {
		var err error
		if listener, err = net.Listen("tcp", at.String()); err != nil {
			b.Error(err)
		}
	})
	if b.Failed() {
		return
	}
	defer listener.Close()
	ends[0].Do(func() {
		var err error
		if sender, err = net.DialTimeout("tcp", at.String(), 10*time.Second); err != nil {
			b.Error(err)
		}
	})
	if b.Failed() {
		return
	}
	receiver, err := listener.Accept()
	if err != nil {
		b.Fatal(err)
	}
	arrived := make(chan int64)
	go func() {
		n, _ := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{receiver}, make([]byte, piece))
		arrived <- n
	}()
	b.SetBytes(piece)
	buf := make([]byte, piece)
	runtime.GC()
	begin := cpuNow()
	sent := int64(0)
	for b.Loop() {
		n, err := sender.Write(buf)
		if err != nil {
			b.Fatal(err)
		}
		sent += int64(n)
	}
	sender.Close()
	if n := <-arrived; n != sent {
		b.Errorf("%d of %d bytes arrived", n, sent)
	}
	b.ReportMetric(float64((cpuNow()-begin).Nanoseconds())/float64(sent>>10), "cpu-ns/KiB")
}

func cpuNow() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
