package projection_test

import (
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// mesh is a state with n nodes n0, n1, … and their IDs.
func mesh(t testing.TB, n int) (*events.State, []identity.ID) {
	t.Helper()
	s := events.NewState()
	var ids []identity.ID
	node := func(i int) *skeinv1.NewNode {
		seed := sha256.Sum256(binary.BigEndian.AppendUint32([]byte("node"), uint32(i)))
		k := identity.KeyFromSeed(seed[:])
		ids = append(ids, k.ID())
		wg := sha256.Sum256(seed[:])
		return &skeinv1.NewNode{Name: "n" + itoa(i), IdentityKey: k.Public(), WireguardKey: wg[:],
			MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
	}
	entropy := make([]byte, 64)
	do := func(c *skeinv1.Command) {
		t.Helper()
		c.Time, c.Entropy = 1e18, entropy
		evs, _, err := events.Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	do(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "000102030405060708090a0b0c0d0e0f", FirstNode: node(0)}}})
	hash := sha256.Sum256([]byte("secret"))
	do(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: "0011223344556677",
		SecretHash: hash[:], LifetimeNanos: int64(time.Hour), Uses: 10000}}})
	for i := 1; i < n; i++ {
		do(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
			Node: node(i), TokenId: "0011223344556677", TokenSecretHash: hash[:],
			ClusterId: "000102030405060708090a0b0c0d0e0f"}}})
	}
	return s, ids
}

func itoa(i int) string {
	if i < 10 {
		return string(rune('0' + i))
	}
	return itoa(i/10) + string(rune('0'+i%10))
}

func input(s *events.State, ids []identity.ID) projection.Input {
	return projection.Input{
		Self: ids[0], State: s, Complete: true,
		Records:   map[identity.ID]*skeinv1.Record{},
		Endpoints: map[identity.ID]projection.Endpoint{},
		Host:      projection.Host{Link: "skein0", Port: 51820, Keepalive: 25 * time.Second},
	}
}

func TestGolden(t *testing.T) {
	s, ids := mesh(t, 4)
	in := input(s, ids)
	in.Endpoints[ids[1]] = projection.Endpoint{Addr: netip.MustParseAddrPort("198.18.0.1:51820"), Proven: true}
	in.Endpoints[ids[2]] = projection.Endpoint{Addr: netip.MustParseAddrPort("127.0.0.1:40001")}
	in.Host.RouteNodeAddresses = true
	in.Records[ids[1]] = &skeinv1.Record{NodeAddresses: []string{"192.168.7.0/24"}}
	spec, refused := projection.Project(in)
	if len(refused) > 0 {
		t.Fatal(refused)
	}
	checkGolden(t, s, spec, "testdata/spec.golden")
}

// checkGolden compares a Spec, as people read it, with a file.
func checkGolden(t *testing.T, s *events.State, spec dataplane.Spec, file string) {
	t.Helper()
	have := projection.Text(spec, func(k dataplane.Key) string {
		for _, n := range s.Nodes() {
			if dataplane.Key(n.GetWireguardKey()) == k {
				return n.GetName()
			}
		}
		return "?"
	})
	if *update {
		if err := os.WriteFile(file, []byte(have), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || have != string(want) {
		t.Fatalf("%v\nhave:\n%s\nwant:\n%s", err, have, want)
	}
}

// A member must not draw traffic that is not its own: public destinations, the overlay, a range that
// another node has, or everything.
func TestRefusesWhatIsNotANodesOwn(t *testing.T) {
	s, ids := mesh(t, 3)
	for _, c := range []struct{ address, want string }{
		{"0.0.0.0/0", "not private"},
		{"::/0", "not private"},
		{"8.8.8.0/24", "not private"},
		{"10.0.0.0/7", "not private"},
		{"8.0.0.0/5", "not private"},
		{"10.4.0.0/24", "overlaps 10.4.0.0/16"},
		{"10.0.0.0/8", "overlaps 10.4.0.0/16"},
		{"192.168.1.1/24", "without host bits"},
		{"nonsense", "not a prefix"},
		{"fd00:102:304::/64", "overlaps fd00:102:304::/64"},
		{"192.168.9.0/25", "overlaps 192.168.9.0/24"},
	} {
		in := input(s, ids)
		in.Host.RouteNodeAddresses = true
		// The node with the lower ID is asked first; give it the range the other one must not get.
		first, second := ids[1], ids[2]
		if second.String() < first.String() {
			first, second = second, first
		}
		in.Records[first] = &skeinv1.Record{NodeAddresses: []string{"192.168.9.0/24"}}
		in.Records[second] = &skeinv1.Record{NodeAddresses: []string{c.address}}
		spec, refused := projection.Project(in)
		if len(refused) != 1 || refused[0].Peer != second || !strings.Contains(refused[0].Reason, c.want) {
			t.Errorf("%s: have %v, want a refusal with %q", c.address, refused, c.want)
		}
		for _, p := range spec.WireGuard.Peers {
			for _, a := range p.AllowedIPs {
				if a.String() == c.address {
					t.Errorf("%s was granted", c.address)
				}
			}
		}
	}
}

// Both ends of a pair have the same preshared key, and no other pair has it.
func TestPresharedKeysAreOfAPair(t *testing.T) {
	s, ids := mesh(t, 4)
	wg := map[dataplane.Key]identity.ID{}
	for _, n := range s.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			t.Fatal(err)
		}
		wg[dataplane.Key(n.GetWireguardKey())] = id
	}
	keys := map[[2]identity.ID]dataplane.Key{}
	for _, self := range ids {
		in := input(s, ids)
		in.Self = self
		spec, _ := projection.Project(in)
		if len(spec.WireGuard.Peers) != len(ids)-1 {
			t.Fatalf("%d peers, want everybody else", len(spec.WireGuard.Peers))
		}
		for k, p := range spec.WireGuard.Peers {
			keys[[2]identity.ID{self, wg[k]}] = p.PresharedKey
		}
	}
	owner := map[dataplane.Key][2]identity.ID{}
	for pair, k := range keys {
		if k != keys[[2]identity.ID{pair[1], pair[0]}] || k.IsZero() {
			t.Errorf("the ends %s and %s have different preshared keys", pair[0], pair[1])
		}
		if other, ok := owner[k]; ok && other != [2]identity.ID{pair[1], pair[0]} {
			t.Errorf("pairs %v and %v share a preshared key", pair, other)
		}
		owner[k] = pair
	}
}

// A peer that cannot be projected is left out; the others are not.
func TestOneBadPeerIsLeftOut(t *testing.T) {
	s, ids := mesh(t, 3)
	bad := &skeinv1.Node{Id: "ffffffffffffff00", Name: "bad", IdentityKey: make([]byte, 32), WireguardKey: []byte("short"),
		Ipv4: "10.4.9.9", AdmittedIndex: s.Index() + 1}
	if err := s.Fold(&skeinv1.Event{Index: s.Index() + 1, Time: s.Time(), Schema: 1,
		Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: bad}}}); err != nil {
		t.Fatal(err)
	}
	bad = &skeinv1.Node{Id: "0000000000000001", Name: "worse", IdentityKey: make([]byte, 32),
		WireguardKey: []byte("shorter"), Ipv4: "10.4.9.8", AdmittedIndex: s.Index() + 1}
	if err := s.Fold(&skeinv1.Event{Index: s.Index() + 1, Time: s.Time(), Schema: 1,
		Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: bad}}}); err != nil {
		t.Fatal(err)
	}
	in := input(s, ids)
	in.Complete = false
	spec, refused := projection.Project(in)
	if len(refused) != 2 || len(spec.WireGuard.Peers) != 2 || len(spec.Link.Addresses) != 2 {
		t.Errorf("refused %v, %d peers, addresses %v", refused, len(spec.WireGuard.Peers), spec.Link.Addresses)
	}
	if spec.Complete {
		t.Error("what is not complete was projected as complete")
	}
}

func TestNodeAddressesNeedTheSetting(t *testing.T) {
	s, ids := mesh(t, 2)
	in := input(s, ids)
	in.Records[ids[1]] = &skeinv1.Record{NodeAddresses: []string{"192.168.7.0/24"}}
	spec, _ := projection.Project(in)
	for _, target := range spec.Targets {
		if target.Addr().Is4() && !target.IsSingleIP() {
			t.Fatalf("%s is routed without being asked for", target)
		}
	}
}

func BenchmarkProject1000(b *testing.B) {
	s, ids := mesh(b, 1001)
	in := input(s, ids)
	for i, id := range ids[1:] {
		in.Endpoints[id] = projection.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8),
			byte(i)}), 51820), Proven: true}
		in.Records[id] = &skeinv1.Record{}
	}
	for b.Loop() {
		if spec, _ := projection.Project(in); len(spec.WireGuard.Peers) != 1000 {
			b.Fatal(len(spec.WireGuard.Peers))
		}
	}
}

func TestKeepalive(t *testing.T) {
	s, ids := mesh(t, 2)
	peer, there := ids[1], netip.MustParseAddrPort("198.18.0.1:51820")
	for _, c := range []struct {
		name      string
		own, want time.Duration
		endpoint  projection.Endpoint
		handshake bool
		asked     time.Duration
	}{
		{name: "behind a NAT", own: 20 * time.Second, want: 20 * time.Second,
			endpoint: projection.Endpoint{Addr: there, Proven: true}},
		{name: "public", endpoint: projection.Endpoint{Addr: there, Proven: true}},
		{name: "over a relay", own: 20 * time.Second, endpoint: projection.Endpoint{Addr: there, Relayed: true}},
		{name: "over a relay, asked for", own: 20 * time.Second, asked: 15 * time.Second, want: 15 * time.Second,
			endpoint: projection.Endpoint{Addr: there, Relayed: true}},
		{name: "over a relay, asked for, while direct paths are probed", own: 20 * time.Second, asked: 15 * time.Second,
			endpoint: projection.Endpoint{Addr: there}},
		{name: "over a relay, to one that remembers a session", want: 25 * time.Second,
			endpoint: projection.Endpoint{Addr: there}, handshake: true},
		{name: "public, to one that remembers a session", want: 25 * time.Second, endpoint: projection.Endpoint{Addr: there,
			Proven: true}, handshake: true},
		{name: "no path yet", own: 20 * time.Second, want: dataplane.KeepaliveAsItIs, handshake: true},
	} {
		in := input(s, ids)
		in.Host.AskedKeepalive = c.asked
		in.Host.Keepalive, in.Endpoints[peer], in.WantHandshake = c.own, c.endpoint, map[identity.ID]bool{peer: c.handshake}
		spec, _ := projection.Project(in)
		for _, p := range spec.WireGuard.Peers {
			if p.Keepalive != c.want {
				t.Errorf("%s: keepalive %s, want %s", c.name, p.Keepalive, c.want)
			}
		}
	}
}

// Hops are among what people read: whom they lead to by whom, and whose packets may come.
func TestTextTellsOfHops(t *testing.T) {
	addr, pfx := netip.MustParseAddr, netip.MustParsePrefix
	have := projection.Text(dataplane.Spec{Hops: dataplane.Hops{
		Self: addr("10.4.0.1"), Own: []netip.Prefix{pfx("10.4.0.1/32")},
		Routes: []dataplane.HopRoute{{Prefix: pfx("10.4.0.2/32"), Via: addr("10.4.0.2"), Last: true},
			{Prefix: pfx("10.4.8.0/24"), Via: addr("10.4.0.3")}},
		Guards: []dataplane.HopGuard{{From: addr("10.4.0.3"), Sources: []netip.Prefix{pfx("10.4.8.0/24"),
			pfx("fd00:8::/64")}}},
	}}, func(dataplane.Key) string { return "?" })
	for _, want := range []string{"own source 10.4.0.1/32\n", "hop 10.4.0.2/32 from 10.4.0.1 via 10.4.0.2 of others' " +
		"packets\n",
		"hop 10.4.8.0/24 from 10.4.0.1 via 10.4.0.3\n", "hop to 10.4.0.1 from 10.4.0.3 allowed 10.4.8.0/24 fd00:8::/64\n"} {
		if !strings.Contains(have, want) {
			t.Errorf("%q is not in\n%s", want, have)
		}
	}
}
