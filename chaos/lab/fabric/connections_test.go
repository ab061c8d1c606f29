package fabric

import "testing"

// A router tracks what passes it, and both ways of counting say so.
func TestConnections(t *testing.T) {
	p := raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "y", NAT: None}, {Name: "site", NAT: PortRestrictedCone}},
		HostSpec{"x1", "x"}, HostSpec{"y1", "y"}, HostSpec{"h1", "site"}, HostSpec{"h2", "site"})
	s, h := p.servers(t), p.socket(t, "h1", false, 51820)
	ns := Router(p.Lab, "site")
	before, err := Connections(ns)
	if err != nil {
		t.Fatal(err)
	}
	contacted := len(s.mappings(t, h))
	after, err := Connections(ns)
	if err != nil {
		t.Fatal(err)
	}
	if after < before+contacted {
		t.Errorf("%d connections became %d when a host spoke to %d servers", before, after, contacted)
	}
	if n, err := listed(ns); err != nil || n != after {
		t.Errorf("the kernel lists %d connections (%v) and counts %d", n, err, after)
	}
}
