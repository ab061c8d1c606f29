package projection_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// withPlainPeer gives a mesh a plain peer that some nodes may carry.
func withPlainPeer(t *testing.T, s *events.State, lifetime time.Duration, carriers ...identity.ID) *skeinv1.PlainPeer {
	t.Helper()
	p := &skeinv1.PlainPeer{Name: "office", PublicKey: slices.Repeat([]byte{1}, 32),
		CarrierKey: slices.Repeat([]byte{2}, 32), AllowedIps: []string{"192.168.8.0/24"}}
	for _, id := range carriers {
		p.Carriers = append(p.Carriers, &skeinv1.PlainCarrier{NodeId: id.String(), Sealed: []byte("sealed")})
	}
	for _, n := range s.Nodes() { // the mesh of these tests is older than plain peers
		if n.GetMaxSchema() < events.SchemaMax {
			decide(t, s,
				&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: n.GetId(),
					MinSchema: 1, MaxSchema: events.SchemaMax}}})
		}
	}
	decide(t, s,
		&skeinv1.Command{Body: &skeinv1.Command_SetPlainPeer{SetPlainPeer: &skeinv1.SetPlainPeer{PlainPeer: p,
			LifetimeNanos: int64(lifetime)}}})
	return s.PlainPeer("office")
}

// A plain peer is reached through the carrier that holds it, and through the first one where none says so; on the
// holder itself it is no
// matter of the tunnel's.
func TestPlainPeersAreReachedThroughTheirHolder(t *testing.T) {
	s, ids := mesh(t, 4)
	p := withPlainPeer(t, s, time.Hour, ids[1], ids[2], ids[0])
	address, network := netip.MustParsePrefix(p.GetIpv4()+"/32"), netip.MustParsePrefix("192.168.8.0/24")
	says := func(term uint64) *skeinv1.Record {
		return &skeinv1.Record{PlainSessions: []*skeinv1.PlainSession{{Peer: p.GetCreatedIndex(), Term: term}}}
	}
	for _, c := range []struct {
		name    string
		records map[identity.ID]*skeinv1.Record
		own     uint64
		now     time.Time
		want    int // of ids; 0: this host; -1: nobody
	}{
		{name: "nobody says", want: 1},
		{name: "one says", records: map[identity.ID]*skeinv1.Record{ids[2]: says(1)}, want: 2},
		{name: "the highest term", records: map[identity.ID]*skeinv1.Record{ids[1]: says(2), ids[2]: says(3)}, want: 2},
		{name: "who is not a carrier", records: map[identity.ID]*skeinv1.Record{ids[3]: says(9)}, want: 1},
		{name: "an earlier peer of that name",
			records: map[identity.ID]*skeinv1.Record{ids[2]: {PlainSessions: []*skeinv1.PlainSession{{Peer: 1,
				Term: 9}}}}, want: 1},
		{name: "this host", records: map[identity.ID]*skeinv1.Record{ids[1]: says(2)}, own: 3, want: 0},
		{name: "this host's record of before", records: map[identity.ID]*skeinv1.Record{ids[0]: says(9),
			ids[2]: says(1)}, want: 2},
		{name: "expired", records: map[identity.ID]*skeinv1.Record{ids[2]: says(1)}, now: time.Unix(0,
			p.GetExpiresAt()), want: -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := input(s, ids)
			in.Plain = projection.Plain{Carrying: true, Now: c.now}
			if c.own > 0 {
				in.Plain.Terms = map[uint64]uint64{p.GetCreatedIndex(): c.own}
			}
			for id, r := range c.records {
				in.Records[id] = r
			}
			spec, refused := projection.Project(in)
			if len(refused) > 0 {
				t.Fatal(refused)
			}
			if !spec.Plain || !spec.Pods.Forward {
				t.Error("a carrier forwards nothing")
			}
			through := -1
			for i, id := range ids {
				peer := spec.WireGuard.Peers[dataplane.Key(s.Node(id).GetWireguardKey())]
				if slices.Contains(peer.AllowedIPs, address) != slices.Contains(peer.AllowedIPs, network) {
					t.Errorf("node %d has a part of the peer: %v", i, peer.AllowedIPs)
				}
				if slices.Contains(peer.AllowedIPs, address) {
					through = i
				}
			}
			marked := slices.ContainsFunc(spec.Targets, func(x netip.Prefix) bool { return x.Contains(address.Addr()) })
			if c.want > 0 && (through != c.want || !marked) || c.want <= 0 && (through != -1 || marked) {
				t.Errorf("it is reached through %d, marked %v; want %d", through, marked, c.want)
			}
			remote := slices.ContainsFunc(spec.Pods.Remote,
				func(n dataplane.Narrow) bool { return n.Prefix == network })
			if remote != (c.want > 0) {
				t.Errorf("the route to its network: %v", remote)
			}
		})
	}
}

// A host keeps its own network, and a member's own word takes nothing of a plain peer's.
func TestPlainPeersAndOtherNetworks(t *testing.T) {
	s, ids := mesh(t, 3)
	withPlainPeer(t, s, 0, ids[1])
	in := input(s, ids)
	in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("192.168.8.0/25")}
	spec, refused := projection.Project(in)
	if len(refused) != 1 || refused[0].Peer != ids[1] || !strings.Contains(refused[0].Reason, "192.168.8.0/25") ||
		slices.ContainsFunc(spec.Targets, in.Host.Connected[0].Overlaps) {
		t.Errorf("refused: %v; targets %v", refused, spec.Targets)
	}
	in = input(s, ids)
	in.Host.RouteNodeAddresses = true
	in.Records[ids[2]] = &skeinv1.Record{NodeAddresses: []string{"192.168.8.0/26"}}
	if _, refused := projection.Project(in); len(refused) != 1 || refused[0].Peer != ids[2] {
		t.Errorf("refused: %v", refused)
	}
}
