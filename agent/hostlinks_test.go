package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

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

// TestHostLinksAreFollowed: what changes is seen by the kernel's word, without anybody asking, and only what changes is
// told.
func TestHostLinksAreFollowed(t *testing.T) {
	n := testns.New(t, "linksfollow")
	ctx, stop := context.WithCancel(t.Context())
	var h hostLinks
	changed := make(chan struct{}, 100)
	ended := make(chan error, 1)
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0p"}
	at, err := netlink.ParseAddr("192.168.7.14/24")
	if err != nil {
		t.Fatal(err)
	}
	n.Must("a link", func() error {
		return errors.Join(netlink.LinkAdd(link), netlink.LinkSetUp(link), netlink.AddrAdd(link, at))
	})
	go n.Do(func() { ended <- h.follow(ctx, func() { changed <- struct{}{} }) })
	await := func(what string, want int) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(5 * time.Second):
			t.Fatalf("%s, and nobody is told", what)
		}
		if got := h.hostAddresses("skein0"); len(got) != want {
			t.Fatalf("%s: %s", what, got)
		}
	}
	await("there is an address", 1)
	n.Must("the address goes", func() error { return netlink.AddrDel(link, at) })
	await("the address is removed", 0)
	n.Must("the address comes", func() error { return netlink.AddrAdd(link, at) })
	await("the address is back", 1)
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("it goes on after its context")
	}
	if h.mu.Lock(); h.followed {
		t.Error("nobody follows any more, and the view is never read again")
	}
	h.mu.Unlock()
}
