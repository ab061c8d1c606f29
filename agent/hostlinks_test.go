package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/internal/testns"
)

// TestHostLinks: the ends of pods' links, whose MTU is the tunnel's and whose addresses are link-local, are no way to anywhere. The
// tunnel would otherwise get smaller with the first pod, and again with each start.
func TestHostLinks(t *testing.T) {
	n := testns.New(t, "hostlinks")
	add := func(name string, mtu int, up bool, addrs ...string) error {
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: mtu}, PeerName: name + "p"}
		if err := netlink.LinkAdd(v); err != nil {
			return fmt.Errorf("add %s: %w", name, err)
		}
		for _, a := range addrs {
			at, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(v, at); err != nil {
				return fmt.Errorf("%s on %s: %w", a, name, err)
			}
		}
		if up {
			return netlink.LinkSetUp(v)
		}
		return nil
	}
	n.Must("links", func() error {
		for _, err := range []error{
			add("eth0", 1500, true, "192.168.7.14/24", "2001:db8::7/64"), add("eth1", 1400, false, "192.168.8.1/24"),
			add("skein0", 1300, true, "10.4.0.1/16"), add("skpod", 1420, true, "169.254.1.1/32"),
		} {
			if err != nil {
				return err
			}
		}
		return nil
	})
	var h hostLinks
	n.Do(func() { h.get() })
	if got := h.smallestMTU("skein0"); got != 1500 {
		t.Errorf("the smallest link has %d, want 1500", got)
	}
	want := []netip.Prefix{netip.MustParsePrefix("192.168.7.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	if got := h.connected("skein0"); !slices.Equal(got, want) {
		t.Errorf("connected to %s, want %s", got, want)
	}
	if got := h.hostAddresses("skein0"); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("192.168.7.14"), netip.MustParseAddr("2001:db8::7")}) {
		t.Errorf("addresses %s", got)
	}
}
