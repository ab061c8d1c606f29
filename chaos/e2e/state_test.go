package e2e

import (
	"bytes"
	"os"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// damage is a way to spoil a file.
type damage func([]byte) []byte

// cutShort leaves less than the first pages of a database, of which the last are often unused.
func cutShort(b []byte) []byte { return b[:len(b)*3/10] }

func scribbled(b []byte) []byte {
	b = bytes.Clone(b)
	for i := range b {
		if i%7 == 0 {
			b[i] ^= 0x5a
		}
	}
	return b
}

func nonsense([]byte) []byte { return []byte("this is not what was here\n") }

// spoiled runs check with a file of the state directory damaged, and then puts the file back. Whatever
// skein does meanwhile, it must leave the damaged file as it is.
func (s *site) spoiled(name string, how damage, check func()) {
	s.t.Helper()
	path := s.state(name)
	whole, err := os.ReadFile(path)
	if err != nil {
		s.t.Fatal(err)
	}
	bad := how(whole)
	if err := os.WriteFile(path, bad, 0o600); err != nil {
		s.t.Fatal(err)
	}
	check()
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, bad) {
		s.t.Errorf("%s was changed (%v): it should be left for whoever recovers it", path, err)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) stop(p *proc) {
	s.t.Helper()
	s.ok("down", "--purge")
	if exit := p.ends(); exit != 0 {
		s.t.Errorf("exit status %d", exit)
	}
}

func TestDamagedState(t *testing.T) {
	s := newSite(t, "spare", "alone", nil)
	s.stop(s.running("--init"))
	const key = ": restore it from a backup, or move it away to get a new identity and join again"
	for _, c := range []struct {
		file      string
		how       damage
		complaint string
	}{
		{"replica.db", cutShort, "open the replica: {state/replica.db} is damaged (…) and was left as it is: …"},
		{"replica.db", scribbled, "open the replica: {state/replica.db} is damaged (…) and was left as it is: …"},
		{"replica.db", nonsense, "open the replica: {state/replica.db} is damaged (…) and was left as it is: …"},
		{"identity.pem", cutShort, `key file {state/identity.pem} is damaged (want a PEM block "…" of 32 bytes)` + key},
		{"identity.pem", nonsense, `key file {state/identity.pem} is damaged (want a PEM block "…" of 32 bytes)` + key},
		{"wireguard.pem", scribbled, `key file {state/wireguard.pem} is damaged (want a PEM block "…" of 32 bytes)` + key},
		{"gossip.epoch", scribbled, "file is damaged: {state/gossip.epoch}: its checksum does not match: if its first word " +
			"is still a number, write that number plus one with its checksum; else move the file away: …"},
	} {
		s.spoiled(c.file, c.how, func() { s.fails(1, c.complaint, s.upArgs()...) })
	}
	// Without these the agent runs, and says what is missing.
	for _, c := range []struct{ file, subject, message string }{
		{"raft/raft.db", "server", "start the server: …{state/raft/raft.db} is damaged (…) and was left as it is: " +
			"…docs/recovery.md…"},
		{"journal.db", "journal", "journal {state/journal.db}: …; only history is lost by moving the file away: mv …, then " +
			"start again"},
	} {
		for _, how := range []damage{cutShort, scribbled, nonsense} {
			s.spoiled(c.file, how, func() {
				p := s.running()
				s.hasProblem(c.subject, c.message)
				s.stop(p)
			})
		}
	}
	p := s.running() // everything is whole again
	if problems := s.status().GetProblems(); len(problems) > 0 {
		t.Errorf("with its files restored it has problems: %v", problems)
	}
	s.stop(p)
}

func (s *site) hasProblem(subject, message string) {
	s.t.Helper()
	var have []*skeinv1.Problem
	for _, p := range s.status().GetProblems() {
		if p.GetSubject() == subject && s.like(message).MatchString(p.GetMessage()) {
			if out := s.ok("status"); !strings.Contains(out, p.GetMessage()) {
				s.t.Errorf("`skein status` does not tell it:\n%s", out)
			}
			return
		}
		have = append(have, p)
	}
	s.t.Errorf("no problem %q like\n  %s\nhave %v", subject, message, have)
}

func TestDamagedRecords(t *testing.T) {
	s := newSite(t, "spare", "member", nil)
	p := s.running("--join", token(t))
	eventually(t, "it knows other records", func() error {
		if s.status().GetNodesAlive() < 3 {
			return errNotYet
		}
		return nil
	})
	s.stop(p)
	for _, how := range []damage{cutShort, scribbled, nonsense} {
		s.spoiled("gossip.records", how, func() {
			s.fails(1, "start gossip: …file is damaged: {state/gossip.records}: …: it only caches what other nodes say of "+
				"themselves, so move it away and start again (mv …)", s.upArgs()...)
		})
	}
	// The advice holds: without the file the member comes back.
	if err := os.Rename(s.state("gossip.records"), s.state("gossip.records.damaged")); err != nil {
		t.Fatal(err)
	}
	s.stop(s.running())
}

func TestForeignState(t *testing.T) {
	other := newSite(t, "spare", "other", nil)
	p := other.running("--init")
	cluster := other.status().GetClusterId()
	other.stop(p)
	home := onSeed(t, "status", "-o", "json")

	// A token of one cluster with the state of another.
	other.fails(1, "state directory {state} belongs to cluster "+cluster+", the token is of cluster …: use another "+
		"--state-dir, or leave the old cluster first (skein down --purge, then move the directory away)",
		other.upArgs("--join", token(t))...)

	// A replica of one cluster beside an identity of another.
	member := newSite(t, "spare", "stray", nil)
	member.stop(member.running("--join", token(t)))
	b, err := os.ReadFile(other.state("replica.db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(member.state("replica.db"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	member.fails(1, "state directory {state} is of cluster "+cluster+", but its identity key … is not a member's: "+
		"identity.pem or replica.db was replaced; restore the one that belongs to the other, or move the directory away "+
		"and join with a new token", member.upArgs()...)
	if strings.Contains(home, cluster) {
		t.Error("the two clusters are one: this test shows nothing")
	}

	// The replica has lost nothing by that: where it belongs it goes on.
	if err := os.Rename(member.state("replica.db"), other.state("replica.db")); err != nil {
		t.Fatal(err)
	}
	p = other.running()
	if have := other.status().GetClusterId(); have != cluster {
		t.Errorf("it is in cluster %s, was in %s", have, cluster)
	}
	other.stop(p)
}
