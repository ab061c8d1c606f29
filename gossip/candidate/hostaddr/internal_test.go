package hostaddr

import (
	"context"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate"
)

// The address that is named is the only private one, beside the public ones of the interfaces, until nobody names it
// any more.
func TestInternalAddress(t *testing.T) {
	s := &Step{Port: 51820}
	look := func() (out string) {
		f := s.Look(context.Background(),
			candidate.Request{Host: candidate.Host{Addrs: []netip.Addr{netip.MustParseAddr("192.168.1.2"),
				netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("fd00::2"), netip.MustParseAddr("2001:db8::2")}}})
		for _, c := range f.Candidates {
			out += c.GetAddress() + " " + c.GetSource() + ", "
		}
		return out
	}
	const all = "192.168.1.2:51820 interface, 203.0.113.7:51820 interface, [fd00::2]:51820 interface, " +
		"[2001:db8::2]:51820 interface, "
	if have := look(); have != all {
		t.Errorf("of the interfaces alone: %s", have)
	}
	s.SetInternal(netip.MustParseAddr("10.0.0.7"))
	if have := look(); have != "10.0.0.7:51820 config, 203.0.113.7:51820 interface, [2001:db8::2]:51820 interface, " {
		t.Errorf("with one that is asked for: %s", have)
	}
	s.SetInternal(netip.MustParseAddr("192.168.1.2")) // one of the interfaces'
	if have := look(); have != "192.168.1.2:51820 config, 203.0.113.7:51820 interface, [2001:db8::2]:51820 interface, " {
		t.Errorf("with one of the interfaces': %s", have)
	}
	s.SetInternal(netip.Addr{})
	if have := look(); have != all {
		t.Errorf("afterwards: %s", have)
	}
}
