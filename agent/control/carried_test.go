package control

import (
	"net/netip"
	"testing"
)

// WireGuard pads the packet with its IP and UDP headers to 16 bytes and adds 32.
func TestInTunnel(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.4.0.1"), netip.MustParseAddr("fd00::1")
	for _, c := range []struct {
		bytes int
		at    netip.Addr
		want  uint64
	}{
		{100, v4, 160}, {101, v4, 176}, {100, v6, 192}, {0, v4, 64}, {4, netip.MustParseAddr("::ffff:10.4.0.1"), 64}, {5, v4, 80},
	} {
		if got := inTunnel(c.bytes, c.at); got != c.want {
			t.Errorf("%d bytes at %s: %d, want %d", c.bytes, c.at, got, c.want)
		}
	}
}
