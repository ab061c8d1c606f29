package addr

import (
	"net/netip"
	"strings"
	"testing"
)

func TestPublic(t *testing.T) {
	for text, want := range map[string]bool{
		"8.8.8.8": true, "203.0.113.7": true, "2001:db8::1": true,
		"10.0.0.1": false, "172.31.0.1": false, "192.168.1.1": false, "100.64.0.1": false, "100.127.255.255": false,
		"100.128.0.1": true,
		"127.0.0.1":   false, "169.254.0.1": false, "fe80::1": false, "fd00::1": false, "::1": false, "0.0.0.0": false,
		"224.0.0.1": false,
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
		"10.0.0.0/8": true, "10.1.2.0/24": true, "172.16.0.0/12": true, "192.168.7.1/32": true, "100.64.0.0/10": true,
		"fd12::/48": true,
		"0.0.0.0/0": false, "10.0.0.0/7": false, "172.0.0.0/8": false, "203.0.113.0/24": false,
		"2001:db8::/32": false, "::/0": false,
	} {
		if have := Private(netip.MustParsePrefix(text)); have != want {
			t.Errorf("Private(%s) = %t, want %t", text, have, want)
		}
	}
}

func TestInternal(t *testing.T) {
	for text, want := range map[string]string{
		"": "invalid IP", "-": "invalid IP", "10.0.0.7": "10.0.0.7", "10.0.0.7/24": "10.0.0.7", "10.0.0.7/32": "10.0.0.7",
		"10.0.0.6/31": "10.0.0.6", "::ffff:10.0.0.7": "10.0.0.7", "fd00::7/64": "fd00::7", "203.0.113.7/32": "203.0.113.7",
	} {
		if have, err := Internal(text); err != nil || have.String() != want {
			t.Errorf("Internal(%q) = %s, %v, want %s", text, have, err, want)
		}
	}
	for text, says := range map[string]string{
		"10.0.0.0/24": "is a network: want the host's own address in it, such as 10.0.0.1/24",
		"fd00::/64":   "such as fd00::1/64", "here": "is not an IP address", "10.0.0.256": "is not an IP address",
		"127.0.0.1": "other hosts can send to", "::1/128": "other hosts can send to",
		"fe80::1%eth0": "other hosts can send to",
		"224.0.0.1":    "other hosts can send to",
	} {
		if a, err := Internal(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("Internal(%q) = %s, %v, want %q", text, a, err, says)
		}
	}
}
