package hostaddr

import (
	"context"
	"net/netip"
	"testing"

	"github.com/skeinmesh/skein/gossip/candidate"
)

// The address that is asked for comes first, beside those of the interfaces, and goes when nobody asks for it any more.
func TestInternalAddress(t *testing.T) {
	s := &Step{Port: 51820}
	look := func() (out string) {
		f := s.Look(context.Background(), candidate.Request{Host: candidate.Host{Addrs: []netip.Addr{netip.MustParseAddr("192.168.1.2")}}})
		for _, c := range f.Candidates {
			out += c.GetAddress() + " " + c.GetSource() + ", "
		}
		return out
	}
	if have := look(); have != "192.168.1.2:51820 interface, " {
		t.Errorf("of the interfaces alone: %s", have)
	}
	s.SetInternal(netip.MustParseAddr("10.0.0.7"))
	if have := look(); have != "10.0.0.7:51820 config, 192.168.1.2:51820 interface, " {
		t.Errorf("with one that is asked for: %s", have)
	}
	s.SetInternal(netip.Addr{})
	if have := look(); have != "192.168.1.2:51820 interface, " {
		t.Errorf("afterwards: %s", have)
	}
}
