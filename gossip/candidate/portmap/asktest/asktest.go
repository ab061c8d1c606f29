// Package asktest is a gateway on the loopback for tests of the small clients above package ask, with a stranger beside
// it who answers too.
package asktest

import (
	"net"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
)

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Gateway answers each request with what answers returns. Before, a stranger on another port sends the client what
// stranger returns; nil: none.
func Gateway(t testing.TB, answers func(request []byte) [][]byte, stranger func(request []byte) []byte) ask.Gateway {
	t.Helper()
	conn, other := listen(t), listen(t)
	go func() {
		for b := make([]byte, 2000); ; {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if stranger != nil {
				_, _ = other.WriteToUDPAddrPort(stranger(b[:n]), from)
			}
			for _, a := range answers(b[:n]) {
				_, _ = conn.WriteToUDPAddrPort(a, from)
			}
		}
	}()
	return ask.Gateway{Addr: conn.LocalAddr().(*net.UDPAddr).AddrPort(), Local: loopback}
}

// Nobody is a gateway where nothing listens.
func Nobody(t testing.TB) ask.Gateway {
	t.Helper()
	conn := listen(t)
	defer conn.Close()
	return ask.Gateway{Addr: conn.LocalAddr().(*net.UDPAddr).AddrPort(), Local: loopback}
}

func listen(t testing.TB) *net.UDPConn {
	t.Helper()
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(loopback, 0)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
