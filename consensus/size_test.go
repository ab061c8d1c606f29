package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// A state that could not be read again is not written in the place of one that can. The server goes on: its events are
// on disk, it comes back with them, and once the state is smaller everything is as before.
func TestStateThatIsTooLargeIsNotWritten(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	h, b := newHistory(t)
	must(t, r.Apply(b))
	must(t, r.Apply(h.batch(&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
		Settings: &skeinv1.Settings{ArchiveMaxEvents: 1000}, Fields: []string{"archive_max_events"}}}})))
	for range 600 { // well above the limit of the archive: there are checkpoints now
		must(t, r.Apply(h.tokens(1)))
	}
	points, first := len(r.store.checkpoints), r.firstAvailable()
	if points == 0 {
		t.Fatal("there is no checkpoint")
	}
	r.most, r.store.most = h.state.Size()-1, h.state.Size()-1
	for range 600 {
		must(t, r.Apply(h.tokens(1)))
	}
	if err := r.Problem(); !errors.Is(err, ErrTooLarge) || !strings.Contains(err.Error(), "docs/recovery.md") {
		t.Fatalf("the problem is %v", err)
	}
	if len(r.store.checkpoints) != points || r.firstAvailable() != first {
		t.Fatalf("%d checkpoints from %d on, there were %d from %d on", len(r.store.checkpoints),
			r.firstAvailable(), points, first)
	}

	f := &fsm{replica: r, log: r.log}
	f.at.Store(r.State().Index())
	snap, err := f.Snapshot()
	must(t, err)
	snaps := raft.NewInmemSnapshotStore()
	sink, err := snaps.Create(raft.SnapshotVersionMax, 2, 1, raft.Configuration{}, 0, nil)
	must(t, err)
	if err := snap.Persist(sink); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("a Raft snapshot: %v", err)
	}
	must(t, r.Close())

	r = openReplica(t, dir)
	if r.State().Hash() != h.state.Hash() || r.Problem() != nil {
		t.Fatalf("it comes back at %d, want %d; problem %v", r.State().Index(), h.state.Index(), r.Problem())
	}
	for range 300 {
		must(t, r.Apply(h.tokens(1)))
	}
	if r.firstAvailable() == first {
		t.Fatal("nothing is dropped from the archive although the state can be written again")
	}
}

func TestEncodeStateRefusesWhatDecodeStateDoes(t *testing.T) {
	h, _ := newHistory(t)
	h.tokens(20)
	good, err := encodeState(h.state, h.state.Size()+sealHeader)
	must(t, err)
	if len(good) != h.state.Size()+sealHeader {
		t.Fatalf("%d bytes are written, %d were measured", len(good), h.state.Size()+sealHeader)
	}
	if _, err := encodeState(h.state, len(good)-1); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("one byte too many: %v", err)
	}
	if events.MaxStateBytes > maxSentState || maxSentState > maxStateBytes {
		t.Fatalf("the leader makes states of %d bytes, %d are sent and %d read", events.MaxStateBytes,
			maxSentState, maxStateBytes)
	}
}

// hugeState is one that no message holds, as an earlier version's leader could make it.
func hugeState(t *testing.T) *events.State {
	p := &skeinv1.State{Index: 9, Cluster: &skeinv1.Cluster{Id: testCluster}, Pools: []*skeinv1.Pool{{
		Name: "p", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/24"}}, CreatedIndex: 1,
	}}, Blocks: []*skeinv1.Block{{Pool: "p", Ipv4: "10.64.0.0/32", Index: 2,
		Reason: string(bytes.Repeat([]byte("x"), maxSentState))}}}
	s, err := events.FromProto(p)
	must(t, err)
	return s
}

func TestStateThatIsTooLargeIsNotSent(t *testing.T) {
	s := hugeState(t)
	if err := sent(s); connect.CodeOf(err) != connect.CodeResourceExhausted || !strings.Contains(err.Error(),
		"it has 63 MiB, and a message holds 63 MiB: make it smaller") {
		t.Fatalf("sent: %v", err)
	}
	if err := CheckSent(events.NewState()); err != nil {
		t.Fatal(err)
	}
}

// Events of large pools go in portions that a message holds.
func TestPortion(t *testing.T) {
	var evs []*skeinv1.Event
	for i := range 100 {
		evs = append(evs, &skeinv1.Event{Index: uint64(i + 1), RequestId: fmt.Sprintf("%0*d", 1<<10, i)})
	}
	one := proto.Size(evs[0])
	for most, want := range map[int]int{0: 1, one: 1, 2*one - 1: 1, 2 * one: 2, 50 * one: 50, 1000 * one: 100} {
		if n := len(portion(evs, most)); n != want {
			t.Errorf("%d events fit into %d bytes, want %d", n, most, want)
		}
	}
	if Portion(nil) != nil {
		t.Error("nothing has portions")
	}
}
