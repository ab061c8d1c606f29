package agent

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

func sizedState(t *testing.T, n int) *events.State {
	t.Helper()
	st, err := events.FromProto(&skeinv1.State{Index: 9, Cluster: &skeinv1.Cluster{Id: strings.Repeat("1", 32)},
		Pools: []*skeinv1.Pool{{
			Name: "p", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/24"}}, CreatedIndex: 1,
			Allowed: slices.Repeat([]string{strings.Repeat("x", 250)}, n/253+1),
		}}})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestSizeProblem(t *testing.T) {
	for _, c := range []struct {
		bytes    int
		err      error
		severity string
		words    string
	}{
		{1 << 20, nil, "", ""},
		{7 << 20, nil, warning, "1 pools take 7.0 of 8 MiB of the agreed state"},
		{63 << 20, nil, failure, "a message holds 63 MiB: make it smaller, see docs/recovery.md; nodes that are far behind " +
			"cannot follow, and none can join"},
		{1 << 20, errors.New("it cannot be written"), failure, "it cannot be written"},
	} {
		severity, message, advice := sizeProblem(sizedState(t, c.bytes), c.err)
		if severity != c.severity || !strings.Contains(message, c.words) || (severity == "") != (advice == "") {
			t.Errorf("%d bytes, %v: %s %q %q", c.bytes, c.err, severity, message, advice)
		}
	}
}

func TestHoldbackText(t *testing.T) {
	p := &skeinv1.State{Index: 1}
	for i, high := range []uint32{events.SchemaMax, 1, events.SchemaMax + 1} {
		id := fmt.Sprintf("%016x", i+1)
		p.Nodes = append(p.Nodes, &skeinv1.Node{Id: id, Name: fmt.Sprint("n", i), MaxSchema: high})
		p.Servers = append(p.Servers, &skeinv1.Server{NodeId: id})
	}
	p.Nodes = append(p.Nodes, &skeinv1.Node{Id: fmt.Sprintf("%016x", 9), Name: "agent", MaxSchema: 1})
	st, err := events.FromProto(p)
	if err != nil {
		t.Fatal(err)
	}
	if have, want := holdbackText(st), fmt.Sprintf("server n1 folds event schemas up to 1, this version up to %d",
		events.SchemaMax); have != want {
		t.Errorf("have %q, want %q", have, want)
	}
	if have := holdbackText(events.NewState()); have != "" {
		t.Errorf("without servers: %q", have)
	}
}

// TestFitting: a joiner gets the records that a message holds beside the state, those first that it needs most.
func TestFitting(t *testing.T) {
	self, server, other := identity.ID{9}, identity.ID{7}, identity.ID{1}
	st, err := events.FromProto(&skeinv1.State{Index: 1, Nodes: []*skeinv1.Node{{Id: server.String(), Name: "s"}},
		Servers: []*skeinv1.Server{{NodeId: server.String()}}})
	if err != nil {
		t.Fatal(err)
	}
	records := map[identity.ID]gossip.Entry{}
	for i, id := range []identity.ID{self, server, other} {
		records[id] = gossip.Entry{Signed: &skeinv1.SignedRecord{Record: []byte(strings.Repeat(string(rune('a'+i)), 100))}}
	}
	one := 8 + proto.Size(records[self].Signed)
	for most, want := range map[int]string{0: "", -5: "", one: "a", 3*one - 1: "ab", 3 * one: "abc", 1 << 20: "abc"} {
		have := ""
		for _, r := range fitting(self, st, records, most) {
			have += string(r.GetRecord()[0])
		}
		if have != want {
			t.Errorf("%d bytes hold %q, want %q", most, have, want)
		}
	}
}
