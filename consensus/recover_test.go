package consensus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestLostQuorumIsRecovered(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		for i := range 10 {
			c.propose(agent, token(i))
		}
		c.agree()
		survivor, lost := c.nodes[0], c.nodes[1:3]
		for _, n := range lost {
			n.crash()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := agent.client.Propose(ctx, token(10)); !errors.Is(err, ErrUncertain) {
			t.Fatalf("one of three servers answered %v", err)
		}
		survivor.close()
		r, err := Recover(survivor.dir, survivor.id, quiet)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Removed) != 2 || r.Index < agent.replica.State().Index() {
			t.Fatalf("recovered %+v, the agent is at %d", r, agent.replica.State().Index())
		}
		if _, err := os.Stat(filepath.Join(r.Backup, raftFile)); err != nil {
			t.Errorf("no backup: %v", err)
		}
		survivor.start(false)
		a := c.propose(agent, token(11))
		c.agree()
		c.eventually("both lost servers are removed, one after the other", func() error {
			if s := agent.replica.State().Servers(); len(s) != 1 || s[0].NodeId != survivor.id.String() {
				return fmt.Errorf("the servers are %v", s)
			}
			return nil
		})
		c.eventually("the recovery is over", func() error {
			if _, err := os.Stat(filepath.Join(survivor.dir, raftDir, recoveryFile)); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("it is still pending: %v", err)
			}
			return nil
		})
		c.join(c.add("s4", true)) // the way back to three
		c.join(c.add("s5", true))
		c.eventually("three voters again", func() error {
			if n := survivor.raft.voters(); n != 3 {
				return errors.New("not yet")
			}
			return nil
		})
		survivor.crash()
		if b := c.propose(agent, token(12)); b.Index <= a.Index {
			t.Fatalf("index %d came after %d", b.Index, a.Index)
		}
		survivor.start(false)
		c.agree()
	})
}

func TestRecoverNeedsAServersDirectory(t *testing.T) {
	dir := t.TempDir()
	openReplica(t, dir).Close()
	if _, err := Recover(dir, identity.ID{1}, quiet); err == nil || !strings.Contains(err.Error(),
		"run this on a server") {
		t.Fatalf("an agent's directory: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if must(t, err); len(entries) != 1 {
		t.Fatalf("it left %v behind", entries)
	}
}

// An agent that knows more than the servers that were recovered says so and takes nothing from them.
func TestAgentAheadOfRecoveredServersTellsOfTheDifference(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		agent := c.add("agent", false)
		c.join(agent)
		c.agree()
		s.close()
		old := filepath.Join(c.t.TempDir(), "old")
		must(t, copyTree(s.dir, old)) // a backup of the only server
		s.start(false)
		for i := range 5 {
			c.propose(agent, token(i))
		}
		c.agree()
		before := agent.replica.State().Index()
		s.close()
		s.dir = old
		s.start(false)
		for i := range 3 {
			c.propose(s, token(100+i))
		}
		c.eventually("the agent tells", func() error {
			if err := agent.client.Status().Err; !errors.Is(err, ErrDiverged) {
				return errors.Join(errors.New("not yet"), err)
			}
			return nil
		})
		if got := agent.replica.State().Index(); got != before {
			t.Fatalf("the agent went from %d to %d", before, got)
		}
	})
}

// Every damage to Raft's files is harmless or reported by name, and the files are left as they were.
func TestDamagedRaftFilesAreReportedAndLeftAlone(t *testing.T) {
	good := t.TempDir()
	simulate(t, func(t *testing.T, c *cluster) {
		c.tune = func(cfg *ServerConfig) {
			cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingEntries = 10, time.Second, 5
		}
		n := c.add("s1", true)
		n.dir = good
		n.start(true)
		c.create(n)
		for i := range 40 {
			c.propose(n, token(i))
		}
		c.eventually("a snapshot", func() error {
			if n.raft.Stats().SnapshotIndex == 0 {
				return errors.New("none")
			}
			return nil
		})
	})
	seed := newCluster(t)
	id := seed.add("s1", true).id
	seed.nodes = nil
	var files []string
	must(t, filepath.WalkDir(filepath.Join(good, raftDir), func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			rel, _ := filepath.Rel(good, path)
			files = append(files, rel)
		}
		return err
	}))
	reported := make(map[string]int)
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(good, file))
		must(t, err)
		for name, bad := range damages(content) {
			dir := t.TempDir()
			must(t, copyTree(good, dir))
			must(t, os.WriteFile(filepath.Join(dir, file), bad, 0o600))
			must(t, os.WriteFile(filepath.Join(dir, "keep"), nil, 0o600))
			err := startAndStop(dir, id)
			if err == nil {
				continue
			}
			reported[filepath.Base(file)]++
			if !strings.Contains(err.Error(), dir) {
				t.Errorf("%s, %s: the error names no file: %v", file, name, err)
			}
			if after, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !bytes.Equal(after, bad) {
				t.Errorf("%s, %s: the damaged file was changed", file, name)
			}
		}
	}
	for _, name := range []string{raftFile, "state.bin", "meta.json"} {
		if reported[name] < 3 {
			t.Errorf("only %d damages of %s were noticed", reported[name], name)
		}
	}
}

// startAndStop starts a server on files that may be damaged.
func startAndStop(dir string, id identity.ID) error {
	r, err := OpenReplica(dir, quiet)
	if err != nil {
		return err
	}
	defer r.Close()
	n := newNetwork()
	s, err := StartServer(ServerConfig{Dir: dir, ID: id, Dialer: dialer{n, id}, Listener: n.listen(id, identity.ALPNRaft),
		Replica: r, Log: quiet, NoSync: true})
	if err != nil {
		return err
	}
	return s.Shutdown(context.Background())
}

// What docs/recovery.md says of a server whose replica was moved away.
func TestServerComesBackWithoutItsReplica(t *testing.T) {
	for _, servers := range []int{1, 3} {
		simulate(t, func(t *testing.T, c *cluster) {
			c.tune = func(cfg *ServerConfig) {
				cfg.SnapshotThreshold, cfg.SnapshotInterval, cfg.TrailingEntries = 20, time.Second, 5
			}
			c.form(servers)
			for i := range 60 {
				c.propose(c.nodes[0], token(i))
			}
			time.Sleep(10 * time.Second) // virtual: the log is compacted
			c.propose(c.nodes[0], token(100))
			c.agree()
			hash := c.nodes[0].replica.State().Hash()
			for _, n := range c.nodes {
				n.close()
			}
			must(t, os.Rename(filepath.Join(c.nodes[0].dir, replicaFile), filepath.Join(c.nodes[0].dir, "moved")))
			for _, n := range c.nodes {
				n.start(false)
			}
			c.leader()
			c.agree()
			if c.nodes[0].replica.State().Hash() != hash {
				t.Errorf("%d servers: another state came back", servers)
			}
			c.propose(c.nodes[0], token(101))
			c.agree()
		})
	}
}
