package fou_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/dataplane/fou"
)

// netem gives a link of the client's namespace faults.
func netem(s *scene, link string, faults netlink.NetemQdiscAttrs) error {
	var err error
	s.client.Do(func() {
		var l netlink.Link
		if l, err = netlink.LinkByName(link); err != nil {
			return
		}
		q := netlink.NewNetem(netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
			Parent: netlink.HANDLE_ROOT}, faults)
		err = netlink.QdiscReplace(q)
	})
	return err
}

// Netem delays: the tier's kernel has it.
func TestNetemDelays(t *testing.T) {
	needKernel(t)
	s := newScene(t, fou.Kernel, fou.Kernel, false)
	s.echo(t, target4)
	u := s.dial(t, "udp", target4)
	ask(t, u, []byte("hello"))
	const delay = 80 * time.Millisecond
	if err := netem(s, "under", netlink.NetemQdiscAttrs{Latency: uint32(delay.Microseconds())}); err != nil {
		t.Fatalf("netem: %v", err)
	}
	start := time.Now()
	ask(t, u, []byte("delayed"))
	if took := time.Since(start); took < delay {
		t.Errorf("an answer after %s, though each packet waits %s", took, delay)
	}
}

// TCP gets through a network that loses, delays, reorders and duplicates, with each pair of drivers.
func TestTCPThroughFaults(t *testing.T) {
	needKernel(t)
	for _, pair := range [][2]string{{fou.Kernel, fou.Kernel}, {fou.Userspace, fou.Userspace},
		{fou.Kernel, fou.Userspace}} {
		t.Run(pair[0]+" and "+pair[1], func(t *testing.T) {
			t.Parallel()
			s := newScene(t, pair[0], pair[1], true)
			err := netem(s, "under", netlink.NetemQdiscAttrs{Latency: 5000, Jitter: 1000, Loss: 1, Duplicate: 2, ReorderProb: 10,
				ReorderCorr: 25})
			if err != nil {
				t.Fatalf("netem: %v", err)
			}
			for _, addr := range []netip.Addr{target4, target6} {
				s.echo(t, addr)
				stream(t, s.dial(t, "tcp", addr), 96<<10)
			}
		})
	}
}
