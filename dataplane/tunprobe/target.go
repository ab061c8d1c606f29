package tunprobe

import (
	"fmt"
	"net/netip"
	"strings"
)

// Target is what is asked: by TCP at Port, or where that is 0 by an ICMP echo.
type Target struct {
	Addr netip.Addr
	Port uint16
}

// ParseTarget reads "icmp:ADDRESS" or "tcp:ADDRESS:PORT" with IPv6 addresses in brackets before a port.
func ParseTarget(s string) (Target, error) {
	kind, rest, _ := strings.Cut(s, ":")
	var t Target
	switch kind {
	case "icmp":
		a, err := netip.ParseAddr(rest)
		if err != nil {
			return t, fmt.Errorf("probe target %q: want icmp:ADDRESS: %w", s, err)
		}
		t.Addr = a
	case "tcp":
		a, err := netip.ParseAddrPort(rest)
		if err != nil {
			return t, fmt.Errorf("probe target %q: want tcp:ADDRESS:PORT: %w", s, err)
		}
		if a.Port() == 0 {
			return t, fmt.Errorf("probe target %q: want a port from 1 to 65535", s)
		}
		t.Addr, t.Port = a.Addr(), a.Port()
	default:
		return t, fmt.Errorf("probe target %q: want icmp:ADDRESS or tcp:ADDRESS:PORT", s)
	}
	if a := t.Addr; a.Zone() != "" || a.Is4In6() || !a.IsGlobalUnicast() {
		return t, fmt.Errorf("probe target %q: want the unicast address of a host, not %s", s, a)
	}
	return t, nil
}

// String is the text that ParseTarget reads.
func (t Target) String() string {
	if t.Port == 0 {
		return "icmp:" + t.Addr.String()
	}
	return "tcp:" + netip.AddrPortFrom(t.Addr, t.Port).String()
}
