package wireguard

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

// The kernel gives us no more packets at a time than there are buffers for: all of a long train of short
// ones come out of the tunnel's link.
func TestLongTrainsLeaveTheLinkWhole(t *testing.T) {
	ns := testns.New(t, "tun")
	arrived := make(chan int, 1000)
	var c *net.UDPConn
	ns.Do(func() {
		q, _, err := openTUN("wg0", dataplane.MTU)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { q.Close() })
		if err := setUp("wg0"); err != nil {
			t.Error(err)
			return
		}
		l, err := netlink.LinkByName("wg0")
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 0, 0, 1), Mask: net.CIDRMask(24, 32)}}
		if err := errors.Join(err, netlink.AddrAdd(l, addr), netlink.LinkSetUp(l)); err != nil {
			t.Error(err)
			return
		}
		go func() {
			bufs, sizes := make([][]byte, q.BatchSize()), make([]int, q.BatchSize())
			for i := range bufs {
				bufs[i] = make([]byte, 1<<16)
			}
			for {
				n, err := q.Read(bufs, sizes, 16)
				if err != nil {
					close(arrived)
					return
				}
				for i := range n {
					if p := bufs[i][16:][:sizes[i]]; p[0]>>4 == 4 && p[9] == unix.IPPROTO_UDP {
						arrived <- len(p)
					}
				}
			}
		}()
		c, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.2:9")))
		if err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	defer c.Close()
	const size = 100
	segments := 128 // since Linux 6.9; 64 before
	if _, err := sendTrain(c, segments, size); err != nil {
		segments = 64
		if _, err := sendTrain(c, segments, size); err != nil {
			t.Fatal(err)
		}
	}
	for i := range segments {
		select {
		case n, ok := <-arrived:
			if !ok || n != size+28 {
				t.Fatalf("packet %d has %d bytes, want %d (%v)", i, n, size+28, ok)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%d of %d packets came out", i, segments)
		}
	}
}

func sendTrain(c *net.UDPConn, segments, size int) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
	if err != nil {
		return 0, err
	}
	return c.Write(make([]byte, segments*size))
}
