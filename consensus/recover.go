package consensus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const recoveryFile = "recovery.json" // beside the Raft log, from a recovery until its leader has logged the removals

// Recovery is what Recover did.
type Recovery struct {
	At      time.Time `json:"at"`
	Server  string    `json:"server"`  // the only voter now
	Index   uint64    `json:"index"`   // last event that survived
	Removed []string  `json:"removed"` // servers that will be removed from the agreed state
	Backup  string    `json:"backup"`  // copy of the Raft folder as it was
}

// Recover makes this server the only voter of its cluster, after a majority of the servers is lost for
// good. The server must be stopped. Events that only the lost servers knew are gone; events that this
// server knew and that were not committed become so. When the server starts next it leads alone and
// logs that the others are removed. They must never be started again with their old state directories.
func Recover(dir string, self identity.ID, log *slog.Logger) (*Recovery, error) {
	folder := filepath.Join(dir, raftDir)
	if _, err := os.Stat(filepath.Join(folder, raftFile)); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = errNoRaft
		}
		return nil, fmt.Errorf("recover from %s: %w: run this on a server", folder, err)
	}
	replica, err := OpenReplica(dir, log)
	if err != nil {
		return nil, err
	}
	defer replica.Close()
	files, err := openRaftFiles(dir, newRaftLog(log), false)
	if err != nil {
		return nil, err
	}
	defer files.close()
	now := time.Now().UTC()
	out := &Recovery{At: now, Server: self.String(), Backup: folder + ".before-recovery-" + now.Format("20060102T150405Z")}
	if err := copyTree(folder, out.Backup); err != nil {
		return nil, fmt.Errorf("back up the Raft folder: %w", err)
	}
	if err := replica.makeLazy(); err != nil {
		return nil, err
	}
	machine := &fsm{replica: replica, log: log, newest: true}
	if err := rewriteRaft(files, machine, self, log); err != nil {
		return nil, fmt.Errorf("recover %s: %w; the folder as it was is in %s", folder, err, out.Backup)
	}
	state := replica.State()
	out.Index = state.Index()
	for _, s := range state.Servers() {
		if s.NodeId != self.String() {
			out.Removed = append(out.Removed, s.NodeId)
		}
	}
	if err := writeRecovery(folder, out); err != nil {
		return nil, err
	}
	log.Warn("this server is the only voter of its cluster now; never start the others again with their old state "+
		"directories",
		"server", self, "index", out.Index, "removed", out.Removed, "backup", out.Backup)
	return out, nil
}

// rewriteRaft replays the whole log and starts it anew from one snapshot with this server as only voter.
func rewriteRaft(files *raftFiles, machine *fsm, self identity.ID, log *slog.Logger) error {
	id := raft.ServerID(self.String())
	rc := raft.DefaultConfig()
	rc.LocalID, rc.Logger = id, newRaftLog(log)
	address, transport := raft.NewInmemTransport(raft.ServerAddress(id))
	defer transport.Close()
	err := guard(func() error {
		return raft.RecoverCluster(rc, machine, files.log, files.log, files.snaps, transport,
			raft.Configuration{Servers: []raft.Server{{ID: id, Address: address, Suffrage: raft.Voter}}})
	})
	if halted := machine.halted.Load(); err == nil && halted != nil {
		err = *halted
	}
	return err
}

func writeRecovery(folder string, r *Recovery) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(filepath.Join(folder, recoveryFile), append(b, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("note the recovery: %w", err)
	}
	return nil
}

// finishRecovery makes the agreed state say what the recovery did. It is repeated at every start of a
// leadership until it has worked.
func (t *term) finishRecovery(ctx context.Context) error {
	path := filepath.Join(t.server.cfg.Dir, raftDir, recoveryFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var r Recovery
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	self := t.server.cfg.ID.String()
	// it may have been a non-voter; the last voter cannot be removed
	_, _ = t.propose(ctx, &skeinv1.Command{Issuer: self,
		Body: &skeinv1.Command_PromoteServer{PromoteServer: &skeinv1.PromoteServer{NodeId: self}}})
	for _, id := range r.Removed {
		_, err := t.propose(ctx, &skeinv1.Command{Issuer: self,
			Body: &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{
				NodeId: id, Force: true, Reason: "quorum lost; recovered on " + r.Server + " at " + r.At.Format(time.RFC3339),
			}}})
		if err != nil {
			return fmt.Errorf("remove server %s: %w", id, err)
		}
	}
	t.log.Warn("the recovery is complete: the other servers are removed from the agreed state", "removed", r.Removed)
	if err := os.Rename(path, path+".done"); err != nil {
		return fmt.Errorf("finish the recovery: %w", err)
	}
	return nil
}

// copyTree copies a folder of plain files, durably.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o700)
		}
		return copyFile(path, filepath.Join(to, rel))
	})
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
	}()
	if _, err = io.Copy(out, in); err != nil {
		return err
	}
	return out.Sync()
}
