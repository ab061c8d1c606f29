package hostlinks

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

// TestHostLinks: the ends of pods' links, whose MTU is the tunnel's and whose addresses are link-local, are no way to
// anywhere. The tunnel would otherwise get smaller with the first pod, and again with each start.
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
	var h Links
	n.Do(func() { h.Get() })
	if got := h.SmallestMTU("skein0", 1360); got != 1500 {
		t.Errorf("the smallest link has %d, want 1500", got)
	}
	want := []netip.Prefix{netip.MustParsePrefix("192.168.7.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	if got := h.Connected("skein0"); !slices.Equal(got, want) {
		t.Errorf("connected to %s, want %s", got, want)
	}
	if got := h.Addresses("skein0"); !slices.Equal(got, []netip.Addr{netip.MustParseAddr("192.168.7.14"),
		netip.MustParseAddr("2001:db8::7")}) {
		t.Errorf("addresses %s", got)
	}
}

// TestHostLinksAreFollowed: what changes is seen by the kernel's word, without anybody asking, and only what changes is
// told.
func TestHostLinksAreFollowed(t *testing.T) {
	n := testns.New(t, "linksfollow")
	ctx, stop := context.WithCancel(t.Context())
	var h Links
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
	go n.Do(func() { ended <- h.Follow(ctx, func() { changed <- struct{}{} }) })
	await := func(what string, want int) {
		t.Helper()
		select {
		case <-changed:
		case <-time.After(5 * time.Second):
			t.Fatalf("%s, and nobody is told", what)
		}
		if got := h.Addresses("skein0"); len(got) != want {
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

// TestLinksOfAnotherCNI: bridges and encapsulations of another CNI are no way out of the host. A small one does not
// make the tunnel smaller, and the addresses on it are not told to others as this host's.
func TestLinksOfAnotherCNI(t *testing.T) {
	n := testns.New(t, "othercni")
	up := func(l netlink.Link, addrs ...string) error {
		if err := netlink.LinkAdd(l); err != nil {
			return fmt.Errorf("add %s: %w", l.Attrs().Name, err)
		}
		for _, a := range addrs {
			at, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(l, at); err != nil {
				return fmt.Errorf("%s on %s: %w", a, l.Attrs().Name, err)
			}
		}
		return netlink.LinkSetUp(l)
	}
	attrs := func(name string, mtu int) netlink.LinkAttrs {
		a := netlink.NewLinkAttrs()
		a.Name, a.MTU = name, mtu
		return a
	}
	pod := testns.New(t, "othercnipod")
	n.Must("links", func() error {
		eth0 := &netlink.Veth{LinkAttrs: attrs("eth0", 1500), PeerName: "eth0p"}
		bridge := &netlink.Bridge{LinkAttrs: attrs("mynet0", 1376)}
		port := &netlink.Veth{LinkAttrs: attrs("veth1", 1376), PeerName: "veth1p"}
		// A bridge over the host's own link, as hosts of virtual machines have it.
		lan, nic := &netlink.Bridge{LinkAttrs: attrs("br0", 1480)}, &netlink.Veth{LinkAttrs: attrs("nic0", 1480),
			PeerName: "nic0p"}
		if err := errors.Join(up(eth0, "192.168.7.14/24"), up(bridge, "10.244.3.1/24"), up(port),
			up(lan, "192.168.9.2/24"), up(nic), netlink.LinkSetMaster(port, bridge),
			netlink.LinkSetMaster(nic, lan)); err != nil {
			return err
		}
		peer, err := netlink.LinkByName("veth1p")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.LinkSetNsFd(peer, int(pod.Handle)),
			up(&netlink.Bridge{LinkAttrs: attrs("cni0", 1372)}, "10.244.1.1/24"),
			up(&netlink.Vxlan{LinkAttrs: attrs("flannel.1", 1400), VxlanId: 1, VtepDevIndex: eth0.Index, Port: 8472},
				"10.244.1.0/32"),
		)
	})
	var h Links
	n.Do(func() { h.Get() })
	if got := h.SmallestMTU("skein0", 1360); got != 1480 {
		t.Errorf("the smallest link has %d, want 1480: %+v", got, h.links)
	}
	want := []netip.Addr{netip.MustParseAddr("192.168.7.14"), netip.MustParseAddr("192.168.9.2")}
	if got := h.Addresses("skein0"); !slices.Equal(got, want) {
		t.Errorf("the host's addresses are %s, want %s", got, want)
	}
	if got := h.Connected("skein0"); len(got) != 5 {
		t.Errorf("connected to %s; the pods' networks are", got)
	}
	for _, l := range h.links {
		if l.Name == "flannel.1" && (l.Kind != "vxlan" || l.outer.link != "eth0") {
			t.Errorf("flannel.1 is %+v", l)
		}
	}
}

// TestMisfits: a link of another CNI is told of when its packets ride in the tunnel and do not fit.
func TestMisfits(t *testing.T) {
	ps := func(texts ...string) (out []netip.Prefix) {
		for _, s := range texts {
			out = append(out, netip.MustParsePrefix(s))
		}
		return out
	}
	overlays, ranges := ps("10.4.0.0/16", "fd65::/64"), ps("10.244.0.0/16")
	overlay4, overlay6 := netip.MustParseAddr("10.4.0.7"), netip.MustParseAddr("fd65::7")
	for name, c := range map[string]struct {
		link Link
		want int // 0: it fits, or is none of the tunnel's
	}{
		"pods' bridge": {Link{Name: "cni0", Kind: "bridge", MTU: 1500, Pods: true,
			Addrs: ps("10.244.1.1/24")}, 1420},
		"one that fits": {Link{Name: "cni0", Kind: "bridge", MTU: 1420, Pods: true,
			Addrs: ps("10.244.1.1/24")}, 0},
		"pods that are not led": {Link{Name: "docker0", Kind: "bridge", MTU: 1500, Pods: true,
			Addrs: ps("172.17.0.1/16")}, 0},
		"the host's own network": {Link{Name: "eth0", Kind: "device", MTU: 9000,
			Addrs: ps("10.244.9.1/24")}, 0},
		"vxlan over the tunnel": {Link{Name: "flannel.1", Kind: "vxlan", MTU: 1450, Pods: true,
			outer: outer{link: "skein0"}}, 1370},
		"vxlan over the tunnel that fits": {Link{Name: "flannel.1", Kind: "vxlan", MTU: 1370, Pods: true,
			outer: outer{link: "skein0"}}, 0},
		"vxlan between overlay addresses": {Link{Name: "vxlan.calico", Kind: "vxlan", MTU: 1450, Pods: true,
			outer: outer{link: "eth0", from: overlay4}}, 1370},
		"the same over IPv6": {Link{Name: "vxlan-v6.calico", Kind: "vxlan", MTU: 1370, Pods: true,
			outer: outer{from: overlay6, six: true}}, 1350},
		"ipip between overlay addresses": {Link{Name: "tunl1", Kind: "ipip", MTU: 1480, Pods: true,
			outer: outer{from: overlay4}}, 1400},
		"vxlan over the host's own link": {Link{Name: "flannel.1", Kind: "vxlan", MTU: 1450, Pods: true,
			Addrs: ps("10.244.1.0/32"), outer: outer{link: "eth0"}}, 0},
		"one that does not say where": {Link{Name: "cilium_vxlan", Kind: "vxlan", MTU: 1500, Pods: true}, 0},
		"the tunnel itself": {Link{Name: "skein0", Kind: "wireguard", MTU: 1420,
			Addrs: ps("10.4.0.7/16")}, 0},
		"a bridge beside the ranges' edge": {Link{Name: "cni0", Kind: "bridge", MTU: 1500, Pods: true,
			Addrs: ps("10.245.1.1/24")}, 0},
	} {
		got := Misfits([]Link{c.link}, "skein0", 1420, overlays, ranges)
		if c.want == 0 && len(got) > 0 || c.want > 0 && (len(got) != 1 || got[0].Want != c.want ||
			got[0].Have != c.link.MTU) {
			t.Errorf("%s: %+v, want %d", name, got, c.want)
		}
	}
}
