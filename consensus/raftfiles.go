package consensus

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
)

const (
	raftDir      = "raft"
	raftFile     = "raft.db"
	keepSnaps    = 2
	cacheEntries = 128 // newest log entries in memory, for followers that lag a little

	raftNext = "if other servers have a quorum, revoke this node, move its state directory away and join again; " +
		"if this was the only server, restore the file from a backup (docs/recovery.md)"
	divergedNext = "the servers were recovered from one that knew less than this node; " +
		"stop this node, move replica.db (on a server also the folder raft) away and start it again (docs/recovery.md)"
)

// raftFiles is what Raft keeps on disk.
type raftFiles struct {
	log   *raftboltdb.BoltStore
	snaps *raft.FileSnapshotStore
}

// openRaftFiles checks and opens the Raft log and snapshots below a state directory.
func openRaftFiles(dir string, log hclog.Logger, noSync bool) (*raftFiles, error) {
	dir = filepath.Join(dir, raftDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the Raft folder: %w", err)
	}
	path := filepath.Join(dir, raftFile)
	if err := checkBolt(path, raftNext, checkRaftPair); err != nil {
		return nil, fmt.Errorf("open the Raft log: %w", err)
	}
	var f raftFiles
	err := guard(func() (err error) {
		f.log, err = raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: boltOptions(), NoSync: noSync,
			MsgpackUseNewTimeFormat: true})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open the Raft log: %w", boltError(path, raftNext, err))
	}
	if f.snaps, err = raft.NewFileSnapshotStoreWithLogger(dir, keepSnaps, log); err == nil {
		err = f.checkSnapshots(dir)
	}
	if err != nil {
		f.log.Close()
		return nil, fmt.Errorf("open the Raft snapshots: %w", err)
	}
	return &f, nil
}

// checkRaftPair decodes one pair of the log file; entries of ours carry a checksum.
func checkRaftPair(bucket, k, v []byte) error {
	if !bytes.Equal(bucket, []byte("logs")) {
		return nil
	}
	index, err := keyIndex(k)
	if err != nil {
		return err
	}
	var l raft.Log
	if err := codec.NewDecoder(bytes.NewReader(v), new(codec.MsgpackHandle)).Decode(&l); err != nil {
		return fmt.Errorf("entry %d: %w", index, err)
	}
	if l.Index != index {
		return fmt.Errorf("entry %d is stored as %d", l.Index, index)
	}
	if l.Type == raft.LogCommand {
		if _, err := openBatch(l.Data); err != nil {
			return fmt.Errorf("entry %d: %w", index, err)
		}
	}
	return nil
}

// checkSnapshots reads every description and the newest snapshot: the library skips those it cannot
// read, and would start with an older one in front of a gap.
func (f *raftFiles) checkSnapshots(dir string) error {
	folder := filepath.Join(dir, "snapshots")
	entries, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() || strings.HasSuffix(e.Name(), ".tmp") {
			continue // what a crash leaves; the library ignores it too
		}
		path := filepath.Join(folder, e.Name(), "meta.json")
		b, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(b, new(raft.SnapshotMeta))
		}
		if err != nil {
			return &fileError{path: path, problem: err.Error(), next: raftNext}
		}
	}
	list, err := f.snaps.List()
	if err != nil || len(list) == 0 {
		return err
	}
	_, in, err := f.snaps.Open(list[0].ID)
	if err == nil {
		defer in.Close()
		var b []byte
		if b, err = io.ReadAll(io.LimitReader(in, maxStateBytes+1)); err == nil {
			_, err = unseal(b)
		}
	}
	if err != nil {
		return &fileError{path: filepath.Join(folder, list[0].ID), problem: err.Error(), next: raftNext}
	}
	return nil
}

func (f *raftFiles) close() error {
	if err := f.log.Close(); err != nil {
		return fmt.Errorf("close the Raft log: %w", err)
	}
	return nil
}

var errNoRaft = errors.New("it holds no Raft log")
