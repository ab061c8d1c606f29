package consensus

import (
	"os"
	"testing"

	"github.com/hashicorp/raft"
)

// Once Raft has a snapshot it may forget the entries before it. After a power cut, which takes what is unsynced along,
// the replica must have them.
func TestSnapshotPutsTheReplicaOnDiskFirst(t *testing.T) {
	dir := t.TempDir()
	r := openReplica(t, dir)
	must(t, r.makeLazy())
	h, b := newHistory(t)
	f := &fsm{replica: r, log: r.log}
	for _, b := range []*raft.Log{{Index: 1, Data: sealed(t, b)}, {Index: 2, Data: sealed(t, h.tokens(3))}} {
		if err := f.Apply(b); err != nil {
			t.Fatal(err)
		}
	}
	s, err := f.Snapshot()
	must(t, err)
	sink, err := raft.NewInmemSnapshotStore().Create(raft.SnapshotVersionMax, 2, 1, raft.Configuration{}, 0, nil)
	must(t, err)
	must(t, s.Persist(sink))
	kill(r)
	for i := range 2 {
		must(t, os.Remove(spillPath(r.path, i)))
	}
	if got := openReplica(t, dir).State(); got.Hash() != h.state.Hash() {
		t.Errorf("after a snapshot and a power cut the replica is at %d, want %d", got.Index(), h.state.Index())
	}
}
