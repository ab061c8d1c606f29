package agent

import (
	"net/netip"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// A member cannot have another node send packets to that node's own networks.
func TestFilterTestsGoToPublicAddressesOnly(t *testing.T) {
	for _, to := range []string{"10.0.0.7:53", "192.168.1.1:53", "172.16.9.9:1", "100.64.0.1:1", "127.0.0.1:3478",
		"[::1]:3478", "169.254.169.254:80",
		"[fe80::1]:53", "[fd00::1]:53", "[::ffff:10.0.0.7]:53", "0.0.0.0:1", "224.0.0.1:5353", "255.255.255.255:9",
		"198.51.100.7:0"} {
		if filterTestTarget(netip.MustParseAddrPort(to)) == nil {
			t.Errorf("%s is allowed", to)
		}
	}
	for _, to := range []string{"198.51.100.7:40000", "[2001:db8::7]:51820", "198.18.2.1:1024"} {
		if err := filterTestTarget(netip.MustParseAddrPort(to)); err != nil {
			t.Errorf("%s: %v", to, err)
		}
	}
	r := &skeinv1.FilterTestRequest{Address: "10.0.0.7:53", TransactionId: make([]byte, 12)}
	err := (&Agent{}).answerFilterTest(t.Context(), identity.ID{}, r)
	if want := "filter test: 10.0.0.7:53 is not a public address and port"; err == nil || err.Error() != want {
		t.Errorf("the RPC: %v, want %q", err, want)
	}
}
