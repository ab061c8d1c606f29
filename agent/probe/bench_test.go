package probe

import (
	"net"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/internal/nattest"
)

// BenchmarkDataBeside measures what the raw sockets cost WireGuard's own traffic.
func BenchmarkDataBeside(b *testing.B) {
	for _, beside := range []bool{false, true} {
		name := "alone"
		if beside {
			name = "with probe socket"
		}
		b.Run(name, func(b *testing.B) { dataBeside(b, beside) })
	}
}

// dataBeside sends WireGuard-like datagrams to a host one after the other; on veth the receiving half of the kernel's
// work is done by the sender, so the time of one covers the filter.
func dataBeside(b *testing.B, beside bool) {
	internet := nattest.New(b)
	from, to := internet.Host(nattest.Public), internet.Host(nattest.Public)
	var out, in *net.UDPConn
	from.Do(func() { out, _ = net.ListenUDP("udp4", nil) })
	to.Do(func() {
		in, _ = net.ListenUDP("udp4", &net.UDPAddr{Port: wgPort})
		if beside {
			s, err := Open(Config{Port: wgPort, Mark: 0x20})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { s.Close() })
			s.Serve(NewProber(ProberConfig{Self: bob, Socket: s}).Handle)
		}
	})
	if out == nil || in == nil {
		b.Fatal("no sockets")
	}
	b.Cleanup(func() { out.Close() })
	b.Cleanup(func() { in.Close() })
	data := make([]byte, 1400)
	data[0] = 4
	dst := netip.AddrPortFrom(to.Addr, wgPort)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := out.WriteToUDPAddrPort(data, dst); err != nil {
			b.Fatal(err)
		}
	}
}
