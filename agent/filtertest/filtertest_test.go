package filtertest

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate/portmap"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
)

// A member cannot have another node send packets to that node's own networks.
func TestAnswersGoToPublicAddressesOnly(t *testing.T) {
	for _, to := range []string{"10.0.0.7:53", "192.168.1.1:53", "172.16.9.9:1", "100.64.0.1:1", "127.0.0.1:3478",
		"[::1]:3478", "169.254.169.254:80",
		"[fe80::1]:53", "[fd00::1]:53", "[::ffff:10.0.0.7]:53", "0.0.0.0:1", "224.0.0.1:5353", "255.255.255.255:9",
		"198.51.100.7:0"} {
		if checkTarget(netip.MustParseAddrPort(to)) == nil {
			t.Errorf("%s is allowed", to)
		}
	}
	for _, to := range []string{"198.51.100.7:40000", "[2001:db8::7]:51820", "198.18.2.1:1024"} {
		if err := checkTarget(netip.MustParseAddrPort(to)); err != nil {
			t.Errorf("%s: %v", to, err)
		}
	}
	none := Tests{Server: func() *stunserver.Server { return nil }}
	for _, c := range []struct{ address, want string }{
		{"10.0.0.7:53", "filter test: 10.0.0.7:53 is not a public address and port"},
		{"home", `filter test: address "home" or transaction ID of 12 bytes is malformed`},
		{"198.51.100.7:40000", "this node answers no STUN"},
	} {
		r := &skeinv1.FilterTestRequest{Address: c.address, TransactionId: make([]byte, 12)}
		if err := none.Answer(t.Context(), identity.ID{}, r); err == nil || err.Error() != c.want {
			t.Errorf("%s: %v, want %q", c.address, err, c.want)
		}
	}
}

// network is what other nodes do: those in sends have their packets arrive, those in refuses cannot be asked.
type network struct {
	helpers        []identity.ID
	sends, refuses map[identity.ID]bool
	asked          []identity.ID
	opened         int
	heard          chan struct{}
}

func (n *network) tests() Tests {
	return Tests{
		Helpers: func() []identity.ID { return n.helpers },
		Ask: func(_ context.Context, id identity.ID, _ *skeinv1.FilterTestRequest) error {
			n.asked = append(n.asked, id)
			if n.refuses[id] {
				return errors.New("it answers no STUN")
			}
			if n.sends[id] {
				close(n.heard)
			}
			return nil
		},
		Await: func([12]byte) (<-chan struct{}, func()) {
			n.opened, n.heard = n.opened+1, make(chan struct{})
			return n.heard, func() { n.opened-- }
		},
	}
}

// A packet that arrives proves that the router forwards the port; if none of two nodes' packets arrives, it does not;
// and if no node could be asked, nothing is known.
func TestProve(t *testing.T) {
	a, b, c := identity.ID{1}, identity.ID{2}, identity.ID{3}
	yes := func(ids ...identity.ID) map[identity.ID]bool {
		m := map[identity.ID]bool{}
		for _, id := range ids {
			m[id] = true
		}
		return m
	}
	for what, v := range map[string]struct {
		network
		want  portmap.Proof
		asked int
	}{
		"the first arrives":          {network{helpers: []identity.ID{a, b, c}, sends: yes(a)}, portmap.Proven, 1},
		"only the second's arrive":   {network{helpers: []identity.ID{a, b, c}, sends: yes(b)}, portmap.Proven, 3},
		"no more than two are asked": {network{helpers: []identity.ID{a, b, c}, sends: yes(c)}, portmap.Disproven, 4},
		"who refuses does not count": {network{helpers: []identity.ID{a, b, c}, refuses: yes(a), sends: yes(c)},
			portmap.Proven, 5},
		"all refuse":           {network{helpers: []identity.ID{a, b}, refuses: yes(a, b)}, portmap.Unproven, 4},
		"there is nobody else": {network{}, portmap.Unproven, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			n := v.network
			if have := n.tests().Prove(t.Context(), netip.MustParseAddrPort("198.51.100.7:4000")); have != v.want {
				t.Errorf("%s: %v, want %v", what, have, v.want)
			}
			if len(n.asked) != v.asked || n.opened != 0 {
				t.Errorf("%s: asked %d times, want %d; %d answers are still awaited", what, len(n.asked), v.asked, n.opened)
			}
		})
	}
}

// The next node is asked when one refuses, and the error names why each did.
func TestDelegate(t *testing.T) {
	a, b := identity.ID{1}, identity.ID{2}
	to := netip.MustParseAddrPort("198.51.100.7:4000")
	n := &network{helpers: []identity.ID{a, b}, refuses: map[identity.ID]bool{a: true}}
	if err := n.tests().Delegate(t.Context(), to, [12]byte{}); err != nil || len(n.asked) != 2 {
		t.Errorf("%v after %d requests", err, len(n.asked))
	}
	n.refuses[b] = true
	err := n.tests().Delegate(t.Context(), to, [12]byte{})
	if err == nil || !strings.Contains(err.Error(), "it answers no STUN") ||
		!strings.Contains(err.Error(), "no other public node could answer") {
		t.Errorf("nobody answers: %v", err)
	}
}
