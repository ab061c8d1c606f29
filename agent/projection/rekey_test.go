package projection_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/identity"
)

// A member that changes its key is a peer under both keys. Its addresses are led to the one of its device, and move
// from one to the other in one step, whichever way they go.
func TestRekey(t *testing.T) {
	in, ids := remembered(t)
	var last projection.Last
	id, next := ids[1], dataplane.Key{7}
	agreed := dataplane.Key(in.State.Node(id).GetWireguardKey())
	before, _, _ := last.Project(in)
	want := before.WireGuard.Peers[agreed]
	if len(want.AllowedIPs) == 0 {
		t.Fatal("the member has no addresses")
	}
	for _, c := range []struct {
		name          string
		rekeys        map[identity.ID]projection.Rekey
		device, other dataplane.Key
	}{
		{"prepared", map[identity.ID]projection.Rekey{id: {To: next}}, agreed, next},
		{"switched", map[identity.ID]projection.Rekey{id: {To: next, Switched: true}}, next, agreed},
		{"agreed", nil, agreed, dataplane.Key{}},
	} {
		in.Rekeys = c.rekeys
		for _, at := range []string{"198.18.0.1:51820", "198.18.0.2:51820"} { // the second one by redirect alone
			in.Endpoints = map[identity.ID]projection.Endpoint{id: {Addr: netip.MustParseAddrPort(at), Proven: true}}
			spec, _, _ := last.Project(in)
			p := spec.WireGuard.Peers[c.device]
			if !slices.Equal(p.AllowedIPs, want.AllowedIPs) || p.Endpoint.String() != at || p.Keepalive != 5*time.Second {
				t.Errorf("%s: the device's key has %v", c.name, p)
			}
			o, has := spec.WireGuard.Peers[c.other]
			if has != !c.other.IsZero() || len(o.AllowedIPs) > 0 || has && (o.Endpoint.String() != at || o.Keepalive != 0) {
				t.Errorf("%s: the other key has %v, %v", c.name, o, has)
			}
			if has && o.PresharedKey != want.PresharedKey {
				t.Errorf("%s: another preshared key", c.name)
			}
			now, _ := wireguard.Want(spec.WireGuard)
			then, _ := wireguard.Want(before.WireGuard)
			ops := wireguard.Diff(now, then, wireguard.Options{Prune: true})
			for _, op := range ops {
				if op.Peer != nil && len(op.Peer.Lose) > 0 {
					t.Errorf("%s: addresses are nobody's for a moment: %v", c.name, ops)
				}
			}
			before = spec
		}
	}
}
