package inet

import (
	"net/netip"
	"testing"
)

func TestLast(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.0/8": "10.255.255.255", "10.0.0.7/32": "10.0.0.7", "0.0.0.0/0": "255.255.255.255",
		"192.0.2.9/30": "192.0.2.11", "fd00::/126": "fd00::3", "::/1": "7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
	} {
		if have := Last(netip.MustParsePrefix(text)); have.String() != want {
			t.Errorf("Last(%s) = %s, want %s", text, have, want)
		}
	}
}
