package addr

import (
	"net/netip"
	"testing"
)

func TestPublic(t *testing.T) {
	for text, want := range map[string]bool{
		"8.8.8.8": true, "203.0.113.7": true, "2001:db8::1": true,
		"10.0.0.1": false, "172.31.0.1": false, "192.168.1.1": false, "100.64.0.1": false, "100.127.255.255": false, "100.128.0.1": true,
		"127.0.0.1": false, "169.254.0.1": false, "fe80::1": false, "fd00::1": false, "::1": false, "0.0.0.0": false, "224.0.0.1": false,
	} {
		if have := Public(netip.MustParseAddr(text)); have != want {
			t.Errorf("Public(%s) = %t, want %t", text, have, want)
		}
	}
	if Public(netip.Addr{}) {
		t.Error("no address is public")
	}
}

func TestPrivate(t *testing.T) {
	for text, want := range map[string]bool{
		"10.0.0.0/8": true, "10.1.2.0/24": true, "172.16.0.0/12": true, "192.168.7.1/32": true, "100.64.0.0/10": true, "fd12::/48": true,
		"0.0.0.0/0": false, "10.0.0.0/7": false, "172.0.0.0/8": false, "203.0.113.0/24": false, "2001:db8::/32": false, "::/0": false,
	} {
		if have := Private(netip.MustParsePrefix(text)); have != want {
			t.Errorf("Private(%s) = %t, want %t", text, have, want)
		}
	}
}
