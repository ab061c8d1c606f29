package egress

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func anyone(identity.ID, netip.Addr) error { return nil }

func list(generation uint64, clients ...*skeinv1.EgressClient) *skeinv1.SyncEgressClientsRequest {
	return &skeinv1.SyncEgressClientsRequest{Namespace: "x", Name: "a", Epoch: 1, Generation: generation, Clients: clients}
}

func pod(key, ip string) *skeinv1.EgressClient { return &skeinv1.EgressClient{Key: key, Ipv4: ip} }

func keys(cs []Client) (out []string) {
	for _, c := range cs {
		out = append(out, c.Key)
	}
	return out
}

// Coil #227: a pod ended, its address went to a pod on another node, and the delayed report of the first one's end
// removed the live pod's tunnel.
func TestReusedAddressNeverRemovesALiveClient(t *testing.T) {
	first, second := nodeID(1), nodeID(2)
	owner := first
	allowed := func(id identity.ID, _ netip.Addr) error {
		if id != owner {
			return errors.New("the address is another node's")
		}
		return nil
	}
	r := NewRegistry()
	sync := func(from identity.ID, q *skeinv1.SyncEgressClientsRequest) {
		t.Helper()
		if _, _, err := r.Sync(from, q, allowed); err != nil {
			t.Fatal(err)
		}
	}
	sync(first, list(1, pod("n/old", "10.1.0.5"), pod("n/stays", "10.1.0.6")))
	owner = second
	sync(second, list(1, pod("n/new", "10.1.0.5"))) // before the first node's news
	if got := keys(r.Clients(allowed)); !reflect.DeepEqual(got, []string{"n/new"}) {
		t.Fatalf("installed: %v", got)
	}
	sync(first, list(2)) // late
	if got := keys(r.Clients(allowed)); !reflect.DeepEqual(got, []string{"n/new"}) {
		t.Errorf("the late news left %v", got)
	}
	// The same on one node: the new pod's list arrives, then the old one again.
	sync(second, list(3, pod("n/newest", "10.1.0.5")))
	sync(second, list(2, pod("n/new", "10.1.0.5")))
	if got := keys(r.Clients(allowed)); !reflect.DeepEqual(got, []string{"n/newest"}) {
		t.Errorf("an older list left %v", got)
	}
}

func TestRegistryTakesWholeLists(t *testing.T) {
	r, a, b := NewRegistry(), nodeID(1), nodeID(2)
	for i, c := range []struct {
		from    identity.ID
		q       *skeinv1.SyncEgressClientsRequest
		changed bool
		refused int
		want    []string
	}{
		{a, list(1, pod("1", "10.0.0.1")), true, 0, []string{"1"}},
		{a, list(2, pod("1", "10.0.0.1")), false, 0, []string{"1"}},
		{b, list(1, pod("2", "10.0.0.2"), pod("3", "10.0.0.2")), true, 1, []string{"1", "2"}},
		{a, list(3, pod("", "10.0.0.3"), pod("4", "no"), pod("5", ""), pod("6", "224.0.0.1"), &skeinv1.EgressClient{Key: "7",
			Ipv6: "10.0.0.7"}), true, 5, []string{"2"}},
		{a, &skeinv1.SyncEgressClientsRequest{Epoch: 2, Generation: 1,
			Clients: []*skeinv1.EgressClient{{Key: "8", Ipv6: "fd00::8"}}}, true, 0, []string{"8", "2"}},
		{a, list(99, pod("9", "10.0.0.9")), false, 0, []string{"8", "2"}}, // of the agent before
		{b, list(2, pod("8", "10.0.0.8")), true, 0, []string{"8", "8"}},
	} {
		changed, refused, err := r.Sync(c.from, c.q, anyone)
		if got := keys(r.Clients(anyone)); err != nil || changed != c.changed || len(refused) != c.refused ||
			!reflect.DeepEqual(got, c.want) {
			t.Errorf("%d: changed %t, refused %v, have %v, %v", i, changed, refused, got, err)
		}
	}
	data, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	again, err := DecodeRegistry(data)
	if err != nil || !reflect.DeepEqual(again.Clients(anyone), r.Clients(anyone)) {
		t.Errorf("after the file: %v, %v", again, err)
	}
	if !r.Members(func(id identity.ID) bool { return id == b }) || r.Heard(a) || !r.Heard(b) ||
		len(r.Clients(anyone)) != 1 {
		t.Error("a node that is not a member is remembered")
	}
}

func FuzzDecodeRegistry(f *testing.F) {
	r := NewRegistry()
	r.Sync(nodeID(1), list(1, pod("1", "10.0.0.1")), anyone)
	data, _ := r.Encode()
	f.Add(data)
	f.Add([]byte(registryMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		if r, err := DecodeRegistry(data); err == nil {
			if again, err := r.Encode(); err != nil {
				t.Error(err)
			} else if _, err := DecodeRegistry(again); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestFlowsByOtherSlots: a client may have flows by other slots than its own. An invalid list of these is refused for
// that client. Each slot of a client counts towards the limit, so that a node cannot make gateways create unlimited
// tunnels.
func TestFlowsByOtherSlots(t *testing.T) {
	first := nodeID(1)
	r := NewRegistry()
	with := func(key, ip string, slot uint32, also ...uint32) *skeinv1.EgressClient {
		return &skeinv1.EgressClient{Key: key, Ipv4: ip, Slot: slot, Also: also}
	}
	_, refused, err := r.Sync(first, list(1, with("a", "10.0.0.1", 1, 0, 2), with("b", "10.0.0.2", 1, 2, 0),
		with("c", "10.0.0.3", 1, 1)), anyone)
	if err != nil || len(refused) != 2 || refused[0].GetKey() != "b" || refused[1].GetKey() != "c" {
		t.Fatalf("refused %v, %v", refused, err)
	}
	b, err := r.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if r, err = DecodeRegistry(b); err != nil {
		t.Fatal(err)
	}
	if got := r.Clients(anyone); len(got) != 1 || !reflect.DeepEqual(got[0].Also, []int{0, 2}) {
		t.Errorf("after a start: %+v", got)
	}
	if changed, _, err := r.Sync(first, list(2, with("a", "10.0.0.1", 1, 0)), anyone); !changed || err != nil {
		t.Errorf("it has no flows by slot 2 any more: changed %v, %v", changed, err)
	}
	e := &skeinv1.Egress{Namespace: "x", Name: "a", Destinations: []string{"0.0.0.0/0"},
		Endpoints: []*skeinv1.EgressAddress{{Ipv4: "10.9.0.1"}, {Ipv4: "10.9.0.2"}}}
	spec := PlanGateway(GatewayInput{Egress: e, Number: 1, MTU: 1420,
		Clients: []Client{{Key: "a", IPv4: netip.MustParseAddr("10.0.0.1"), Slot: 1, Also: []int{0, 2}}}})
	if len(spec.Clients) != 1 || !reflect.DeepEqual(spec.Clients[0].Also, []int{0}) {
		t.Errorf("there is no slot 2: %+v", spec.Clients)
	}
	var many []*skeinv1.EgressClient
	for i := range maxClients/2 + 1 {
		many = append(many, with("k", netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}).String(), 1, 0))
	}
	if _, _, err := r.Sync(first, list(3, many...), anyone); err == nil {
		t.Errorf("%d clients with two slots each are taken", len(many))
	}
}
