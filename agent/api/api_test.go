package api

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// TestOverlapped: no pool may cover an address that a member says is its own.
func TestOverlapped(t *testing.T) {
	r := &skeinv1.Record{
		Candidates: []*skeinv1.Candidate{{Address: "192.168.7.14:51820"}, {Address: "[2001:db8::7]:51820"},
			{Address: "nonsense"}},
		InternalIp:    "10.9.8.7",
		NodeAddresses: []string{"172.20.0.0/24"},
	}
	for p, want := range map[string]string{
		"192.168.0.0/16": "the address 192.168.7.14", "2001:db8::/64": "the address 2001:db8::7",
		"10.9.0.0/16":   "the internal address 10.9.8.7",
		"172.16.0.0/12": "the network 172.20.0.0/24", "172.20.0.128/25": "the network 172.20.0.0/24", "10.64.0.0/16": "",
		"fd01::/64": "",
	} {
		if got := Overlapped(netip.MustParsePrefix(p), r); got != want {
			t.Errorf("%s covers %q, want %q", p, got, want)
		}
	}
}

func TestToldNothing(t *testing.T) {
	for says, err := range map[string]error{
		"node a runs an older version": connect.NewError(connect.CodeUnimplemented, errors.New("x")),
		"node a: not you":              connect.NewError(connect.CodePermissionDenied, errors.New("not you")),
		"node a does not answer: gone": errors.New("gone"),
	} {
		if got := ToldNothing("a", "its peers", "peers", err); !strings.Contains(got.Error(), says) {
			t.Errorf("%v, want %q", got, says)
		}
	}
}
