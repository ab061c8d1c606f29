package agent

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

func podEntry(at int64, what, pod string) *skeinv1.JournalEntry {
	return &skeinv1.JournalEntry{Time: at, Body: &skeinv1.JournalEntry_PodAddress{PodAddress: &skeinv1.PodAddress{
		What: what, Ipv4: "10.64.0.5", Namespace: "web", Pod: pod, ContainerId: "c-" + pod, Interface: "eth0",
	}}}
}

// TestHolders: one address went from pod to pod; journal and what is held now are put together without a pod being
// there twice.
func TestHolders(t *testing.T) {
	entries := []*skeinv1.JournalEntry{
		podEntry(10, "given", "a"), podEntry(20, "taken-back", "a"), podEntry(25, "taken-back", "a"),
		podEntry(30, "given", "b"), podEntry(40, "leaked", "b"), podEntry(50, "given", "c"),
	}
	lease := func(pod string, since, until int64) ipam.Lease {
		l := ipam.Lease{Key: ipam.Key{ContainerID: "c-" + pod, Interface: "eth0"}, Namespace: "web", Pod: pod,
			IPv4: netip.MustParseAddr("10.64.0.5"), Since: time.Unix(0, since)}
		if until != 0 {
			l.Until = time.Unix(0, until)
		}
		return l
	}
	want := func(pod string, since, until int64, state string) *skeinv1.Holder {
		return &skeinv1.Holder{Namespace: "web", Pod: pod, ContainerId: "c-" + pod, Interface: "eth0", Ipv4: "10.64.0.5",
			Since: since, Until: until, State: state}
	}
	got := holders(entries, []ipam.Lease{lease("b", 30, 40), lease("c", 50, 0)})
	if d := cmp.Diff([]*skeinv1.Holder{want("a", 10, 20, "resting"), want("b", 30, 40, "resting"),
		want("c", 50, 0, "used")}, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
	// The journal is bounded: what is held is told without it.
	got = holders(nil, []ipam.Lease{lease("c", 50, 0)})
	if d := cmp.Diff([]*skeinv1.Holder{want("c", 50, 0, "used")}, got, protocmp.Transform()); d != "" {
		t.Error(d)
	}
}

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
		if got := overlapped(netip.MustParsePrefix(p), r); got != want {
			t.Errorf("%s covers %q, want %q", p, got, want)
		}
	}
}

// TestWhoOfPodCIDR: an address that another CNI gives is of the pods of a node, by the event that said so last.
func TestWhoOfPodCIDR(t *testing.T) {
	s := events.NewState()
	key := []byte(strings.Repeat("k", 32))
	for i, c := range []*skeinv1.Command{
		{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
			ClusterId: "000102030405060708090a0b0c0d0e0f",
			FirstNode: &skeinv1.NewNode{Name: "dc1", IdentityKey: key, WireguardKey: key, MinSchema: events.SchemaMin,
				MaxSchema: events.SchemaMax},
			Settings: &skeinv1.Settings{PodRanges: []string{"10.244.0.0/16"}}}}},
		nil,
	} {
		if c == nil {
			c = &skeinv1.Command{Body: &skeinv1.Command_SetPodCidrs{SetPodCidrs: &skeinv1.SetPodCidrs{
				NodeId:   s.Nodes()[0].GetId(),
				PodCidrs: &skeinv1.PodCidrs{KubernetesNode: "node1", Cidrs: []string{"10.244.1.0/24"}}}}}
		}
		c.Time, c.Entropy = int64(i+1), make([]byte, 64)
		evs, _, err := events.Decide(s, c)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
			w := who(s, netip.MustParseAddr("10.244.1.7"))
			name, line := concerns(s, e, w, 0)
			if set := e.GetPodCidrsSet() != nil; (name == "pod_cidrs_set") != set || set &&
				line != "10.244.1.0/24 became the pod CIDR of node dc1" {
				t.Errorf("%v is told as %q %q", e, name, line)
			}
		}
	}
	w := who(s, netip.MustParseAddr("10.244.1.7"))
	if w.GetKind() != "pod-cidr" || w.GetNode() != "dc1" || !strings.Contains(w.GetSays(), "10.244.1.0/24, the pod CIDR "+
		"of dc1 (Kubernetes Node node1)") {
		t.Errorf("it is %v", w)
	}
	if w := who(s, netip.MustParseAddr("10.244.2.7")); w.GetKind() != "unknown" {
		t.Errorf("an address beside it is %v", w)
	}
}

func TestWhoNeedsOneMomentOfThePast(t *testing.T) {
	h := newHost(t, "dc1")
	w := newWorld(t, h)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	a.phase.Store(PhaseRunning)
	for _, c := range []struct {
		request *skeinv1.WhoRequest
		want    string
	}{
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtTime: time.Now().Add(time.Hour).UnixNano()}, "still to come"},
		{&skeinv1.WhoRequest{Address: "10.4.0.1", AtIndex: 1, AtTime: 1}, "want one of them"},
	} {
		_, err := (api{a: a}).Who(t.Context(), c.request)
		if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %v, want %q", c.request, err, c.want)
		}
	}
}
