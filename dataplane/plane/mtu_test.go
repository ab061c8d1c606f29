package plane_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

// Only one end knows of the path's lower MTU. Its SYN tells the other end (MSS), whichever route the socket looked up
// first.
func TestTCPFitsTheWay(t *testing.T) {
	a, b := pair(t)
	s := withHost(a.spec(), b, addr("192.0.2.2"))
	b.apply(t, withHost(b.spec(), a, addr("192.0.2.1")))
	for _, step := range []struct {
		mtu, most, least int // of the other end's segments over IPv4
	}{{0, 1380, 1300}, {1328, 1288, 1260}, {1300, 1260, 1230}, {0, 1380, 1300}} {
		s.Link.Narrow = nil
		if step.mtu > 0 {
			s.Link.Narrow = []dataplane.Narrow{{Prefix: netip.PrefixFrom(b.overlay4(), 32), MTU: step.mtu},
				{Prefix: netip.PrefixFrom(b.overlay6(), 128), MTU: step.mtu}}
		}
		a.apply(t, s)
		a.clean(t, s)
		if n := a.apply(t, s).Writes["route"]; n != 0 {
			t.Errorf("MTU %d: %d messages for unchanged routes", step.mtu, n)
		}
		for _, to := range []netip.Addr{b.overlay4(), b.overlay6()} {
			less := 0
			if to.Is6() {
				less = 20 // of the longer header
			}
			if mss := segment(t, a, b, to); mss > step.most-less || mss < step.least-less {
				t.Errorf("MTU %d: %s sends segments of %d bytes, want %d to %d", step.mtu, to, mss, step.least-less, step.most-less)
			}
		}
	}
}

// segment connects two hosts, and returns the segment size of the one that accepted.
func segment(t *testing.T, from, at *host, to netip.Addr) (mss int) {
	t.Helper()
	var l net.Listener
	at.Must("listen", func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(to, 0).String())
		return err
	})
	defer l.Close()
	from.Must("connect", func() error {
		c, err := net.DialTimeout("tcp", l.Addr().String(), 10*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		s, err := l.Accept()
		if err != nil {
			return err
		}
		defer s.Close()
		raw, err := s.(*net.TCPConn).SyscallConn()
		if err != nil {
			return err
		}
		var got error
		err = raw.Control(func(fd uintptr) {
			info, e := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			if got = e; e == nil {
				mss = int(info.Snd_mss)
			}
		})
		return errors.Join(err, got)
	})
	return mss
}
