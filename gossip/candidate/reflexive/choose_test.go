package reflexive

import (
	"net/netip"
	"strings"
	"testing"
)

func TestDeadServersArePassedOver(t *testing.T) {
	var all []netip.AddrPort
	for i := range 10 {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}), 3478))
	}
	asked := map[netip.AddrPort]bool{}
	for attempt := range 3 {
		chosen := chooseServers(all, nil, attempt)
		if len(chosen) != maxServers {
			t.Errorf("attempt %d asks %v", attempt, chosen)
		}
		for _, s := range chosen {
			asked[s] = true
		}
	}
	if len(asked) != len(all) {
		t.Errorf("three attempts asked %d of %d servers", len(asked), len(all))
	}
	if got := chooseServers(all, map[netip.AddrPort]bool{all[9]: true}, 0); got[0] != all[9] {
		t.Errorf("the one that answers is not asked first: %v", got)
	}
	same := []netip.AddrPort{ap("203.0.113.1:3478"), ap("203.0.113.1:3479"), ap("[2001:db8::1]:3478")}
	if got := chooseServers(same, nil, 0); len(got) != 2 {
		t.Errorf("one address was taken for two servers: %v", got)
	}
}

func TestNewRefusesBadConfiguration(t *testing.T) {
	for want, c := range map[string]Config{
		"port is 0":      {},
		"stunServers":    {Port: 1, Servers: []string{"203.0.113.1:99999"}},
		"port is 70000,": {Port: 70000},
	} {
		c.Socket = &world{}
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", c, err, want)
		}
	}
}
