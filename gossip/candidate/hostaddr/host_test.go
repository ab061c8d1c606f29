package hostaddr

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate"
)

func addrs(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func TestHostAddresses(t *testing.T) {
	links := []link{
		{index: 1, name: "lo", up: true, loopback: true},
		{index: 2, name: "eth0", kind: "device", up: true},
		{index: 3, name: "skein0", kind: "wireguard", up: true},
		{index: 4, name: "docker0", kind: "bridge", up: true},
		{index: 5, name: "br0", kind: "bridge", up: true},
		{index: 6, name: "eth1", kind: "device"},
		{index: 7, name: "tailscale0", kind: "tuntap", up: true},
		{index: 8, name: "mesh", kind: "device", up: true},
		{index: 9, name: "veth1", kind: "veth", up: true},
	}
	on := func(link int, list ...string) (out []address) {
		for _, a := range addrs(list...) {
			out = append(out, address{link: link, addr: a})
		}
		return out
	}
	var all []address
	all = append(all, on(1, "127.0.0.1", "::1", "203.0.113.50")...)
	all = append(all, on(2, "2001:db8::2", "fe80::1", "192.168.1.2", "169.254.1.1", "10.4.0.9", "198.51.100.7", "fd00::2",
		"192.168.1.2")...)
	all = append(all, address{link: 2, addr: netip.MustParseAddr("2001:db8::bad"), unusable: true})
	all = append(all, on(3, "10.4.0.1")...)
	all = append(all, on(4, "172.17.0.1")...)
	all = append(all, on(5, "10.0.0.5")...)
	all = append(all, on(6, "10.1.1.1")...)
	all = append(all, on(7, "100.100.1.1")...)
	all = append(all, on(8, "10.7.7.7")...)
	all = append(all, on(9, "10.8.8.8")...)
	all = append(all, on(99, "10.9.9.9")...)
	got := hostAddresses(links, all, []string{"mesh"}, []netip.Prefix{netip.MustParsePrefix("10.4.0.0/16")})
	want := addrs("198.51.100.7", "2001:db8::2", "192.168.1.2", "10.0.0.5", "10.8.8.8", "fd00::2")
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %v, want %v", got, want)
			break
		}
	}
	var many []address
	for i := range 200 {
		many = append(many, address{link: 2, addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})})
	}
	if got := hostAddresses(links, many, nil, nil); len(got) != maxHosts {
		t.Errorf("%d host candidates, want at most %d", len(got), maxHosts)
	}
}

func TestGateways(t *testing.T) {
	links := []link{
		{index: 2, name: "eth0", up: true}, {index: 3, name: "skein0", kind: "wireguard", up: true},
		{index: 4, name: "wlan0", up: true},
		{index: 5, name: "mesh", up: true}, {index: 6, name: "eth1"},
	}
	on := func(link int, prefix string) address {
		p := netip.MustParsePrefix(prefix)
		return address{link: link, addr: p.Addr(), bits: p.Bits()}
	}
	addrs := []address{on(2, "10.0.0.9/24"), on(2, "192.168.1.2/24"), on(4, "192.168.7.2/24"), on(4, "2001:db8::2/64"),
		on(5, "10.7.0.1/16"), on(6, "10.8.0.1/16")}
	ip := netip.MustParseAddr
	got := gateways(links, addrs, []route{
		{via: ip("192.168.7.1"), link: 4, metric: 600},
		{via: ip("192.168.1.1"), link: 2, metric: 100},
		{via: ip("192.168.1.1"), link: 2, metric: 200},
		{via: ip("fe80::1"), link: 4, metric: 1024},
		{via: ip("10.4.0.1"), link: 3},
		{via: ip("10.7.0.9"), link: 5},
		{via: ip("10.8.0.9"), link: 6},
		{link: 2, metric: 50}, // no next hop: nobody to talk to
		{via: ip("192.0.2.1"), src: ip("10.0.0.9"), link: 2, metric: 700},
	}, []string{"mesh"})
	want := []candidate.Gateway{
		{Addr: ip("192.168.1.1"), Local: ip("192.168.1.2"), Link: "eth0"},
		{Addr: ip("192.168.7.1"), Local: ip("192.168.7.2"), Link: "wlan0"},
		{Addr: ip("192.0.2.1"), Local: ip("10.0.0.9"), Link: "eth0"},
		{Addr: ip("fe80::1%wlan0"), Local: ip("2001:db8::2"), Link: "wlan0"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
