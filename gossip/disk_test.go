package gossip

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/simtime"
)

func TestNextEpochCounts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "there")
	for want := uint64(1); want < 4; want++ {
		if got, err := NextEpoch(dir); err != nil || got != want {
			t.Fatalf("%d, %v, want %d", got, err, want)
		}
	}
	if err := raiseEpoch(dir, 40); err != nil {
		t.Fatal(err)
	}
	if err := raiseEpoch(dir, 20); err != nil {
		t.Fatal(err)
	}
	if got, err := NextEpoch(dir); err != nil || got != 41 {
		t.Fatalf("%d, %v, want 41", got, err)
	}
	info, err := os.Stat(filepath.Join(dir, epochFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("files left behind: %v, %v", left, err)
	}
}

func TestDamagedFilesAreNamedAndKept(t *testing.T) {
	dir := t.TempDir()
	if _, err := NextEpoch(dir); err != nil {
		t.Fatal(err)
	}
	if err := saveRecords(dir, []*skeinv1.SignedRecord{signed(t, nil)}); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{epochFile, recordsFile} {
		path := filepath.Join(dir, file)
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := range good {
			bad := append([]byte(nil), good...)
			bad[i] ^= 0x20
			if i == len(good)-1 && file == epochFile {
				continue // the line end does not count
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if file == epochFile {
				_, err = NextEpoch(dir)
			} else {
				_, err = loadRecords(dir)
			}
			if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "move") {
				t.Fatalf("byte %d of %s flipped: %v", i, file, err)
			}
			if kept, _ := os.ReadFile(path); string(kept) != string(bad) {
				t.Fatal("a damaged file must be left as it is")
			}
		}
		if err := os.WriteFile(path, good, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := loadRecords(dir); err != nil {
		t.Error(err)
	}
}

func TestDamagedFileStopsTheStart(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, recordsFile), []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := newSimNet(1).join(simKey(0))
	_, err := Start(Config{Self: n.key.ID(), Key: n.key, Roster: newRoster(n.key), Transport: n, Streams: n,
		Packets: n.packets, Keys: gossipKeys(1), Dir: dir})
	if !errors.Is(err, ErrDamaged) {
		t.Fatalf("%v", err)
	}
}

// Records survive a start without other nodes, and disk writes are few however much changes.
func TestRecordsAreKept(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newSim(t, 4, 20)
		defer s.end()
		s.stop(0)
		s.start(0, Config{Dir: dir, Epoch: 2})
		s.formed()
		start := s.nodes[0].g.Stats().DiskWrites
		for i := range 40 {
			s.publish(1+i%3, fmt.Sprintf("change-%d", i))
			time.Sleep(250 * time.Millisecond)
		}
		if n := s.nodes[0].g.Stats().DiskWrites - start; n == 0 || n > 12 {
			t.Errorf("%d disk writes in ten seconds", n)
		}
		s.within(time.Second, "all agree", s.agreed(s.nodes))
		for i := range 4 {
			s.stop(i)
		}
		alone := s.start(0, Config{Dir: dir, Epoch: 3})
		if n := len(alone.g.Records()); n != 4 {
			t.Fatalf("%d records after a start alone, want 4", n)
		}
		if site := alone.g.Records()[simKey(1).ID()].Record.GetSite(); site != "change-39" {
			t.Errorf("site %q", site)
		}
		s.stop(0)
		s.roster.remove(simKey(1).ID())
		alone = s.start(0, Config{Dir: dir, Epoch: 4})
		if _, ok := alone.g.Records()[simKey(1).ID()]; ok {
			t.Error("the record of a node revoked meanwhile came back from disk")
		}
	})
}

// A node's record from before a restart no longer counts for the node itself, on its disk or at others, since its
// addresses may have changed. Others keep it until they get the new one.
func TestOwnRecordOfAFormerRunDoesNotCount(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newSim(t, 3, 23)
		defer s.end()
		s.stop(0)
		s.start(0, Config{Dir: dir, Epoch: 2})
		s.formed()
		self := simKey(0).ID()
		s.stop(0)
		n := s.startSilent(0, Config{Dir: dir, Epoch: 3})
		s.within(10*time.Second, "the others see it again", s.meshed(s.nodes))
		for range 50 { // the others send the node its former record
			if r, ok := n.g.Records()[self]; ok || len(n.g.Records()) != 2 {
				t.Fatalf("of %d records one is its own: %t, of epoch %d", len(n.g.Records()), ok, r.Record.GetEpoch())
			}
			time.Sleep(100 * time.Millisecond)
		}
		if e := s.nodes[1].g.Records()[self].Record.GetEpoch(); e != 2 {
			t.Errorf("another has its record of epoch %d, want 2 until the new one comes", e)
		}
		s.publish(0, "anew")
		s.within(2*time.Second, "its new record is seen", sees(s.nodes, self, "anew"))
		if e := n.g.Records()[self].Record.GetEpoch(); e != 3 {
			t.Errorf("epoch %d, want 3", e)
		}
	})
}

// A node that is killed a moment after it joined knows the others at its next start.
func TestNewNodesAreWrittenDownSoon(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newSim(t, 3, 22)
		defer s.end()
		s.formed()
		s.stop(0)
		s.start(0, Config{Dir: dir, Epoch: 2})
		s.within(time.Minute, "it has heard of all", func() bool { return len(s.nodes[0].g.Records()) == 3 })
		time.Sleep(diskSpacing / newSooner * 3 / 2)
		if records, err := loadRecords(dir); err != nil || len(records) != 3 {
			t.Errorf("%d records on disk, %v; want 3", len(records), err)
		}
	})
}

// The epoch file is lost while the records are not: the node's own record on disk has its epoch.
func TestEpochIsRaisedByOwnRecordOnDisk(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := newSim(t, 2, 21)
		defer s.end()
		s.stop(0)
		s.start(0, Config{Dir: dir, Epoch: 30})
		s.formed()
		s.stop(0)
		s.start(0, Config{Dir: dir, Epoch: 1})
		if e := s.nodes[0].g.Records()[simKey(0).ID()].Record.GetEpoch(); e != 30 {
			t.Errorf("epoch %d, want to go on in 30", e)
		}
		if next, err := NextEpoch(dir); err != nil || next != 31 {
			t.Errorf("next epoch %d, %v, want 31", next, err)
		}
	})
}

// Large files are written less often, and so are slow disks.
func TestWritesAreSpacedByWhatTheyTake(t *testing.T) {
	for _, c := range []struct {
		bytes int
		took  time.Duration
		want  time.Duration
	}{
		{1000, 5 * time.Millisecond, diskSpacing}, {1000, 100 * time.Millisecond, 4 * time.Second},
		{1000, time.Second, diskSlowMax}, {20 * diskRate, time.Second, 21 * diskSpacing},
	} {
		if got := diskWait(c.bytes, c.took); got != c.want {
			t.Errorf("after %d bytes in %s the next write waits %s, want %s", c.bytes, c.took, got, c.want)
		}
	}
}
