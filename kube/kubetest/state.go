// Package kubetest makes agreed states for tests of Kubernetes' part.
package kubetest

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// Log decides and folds, as a leader does.
type Log struct {
	t     testing.TB
	State *events.State
	n     uint64
}

// New is the log of a cluster with one node, "a", whose labels are gateway=yes.
func New(t testing.TB) *Log {
	t.Helper()
	l := &Log{t: t, State: events.NewState()}
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "00112233445566778899aabbccddeeff", OverlayIpv4: "10.4.0.0/16", FirstNode: node("a", 1),
	}}})
	return l
}

func node(name string, key byte) *skeinv1.NewNode {
	k := strings.Repeat(string('A'+rune(key)), 32)
	return &skeinv1.NewNode{
		Name:         name,
		IdentityKey:  []byte(k),
		WireguardKey: []byte(strings.ToLower(k)),
		Labels:       map[string]string{"gateway": "yes"},
		MaxSchema:    events.SchemaMax,
	}
}

// Give decides a command and folds what follows.
func (l *Log) Give(c *skeinv1.Command) error {
	l.n++
	c.Time = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).UnixNano() + int64(l.n)
	c.Entropy = make([]byte, 64)
	binary.BigEndian.PutUint64(c.Entropy, l.n)
	evs, _, err := events.Decide(l.State, c)
	for _, e := range evs {
		if err := l.State.Fold(e); err != nil {
			l.t.Fatal(err)
		}
	}
	return err
}

func (l *Log) must(c *skeinv1.Command) {
	l.t.Helper()
	if err := l.Give(c); err != nil {
		l.t.Fatal(err)
	}
}

// Admit adds members with the role of agents, and returns the IDs of all, "a" first.
func (l *Log) Admit(names ...string) []identity.ID {
	l.t.Helper()
	const token, cluster = "00000000000000a1", "00112233445566778899aabbccddeeff"
	hash := sha256.Sum256([]byte("secret"))
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: token, SecretHash: hash[:], LifetimeNanos: int64(time.Hour), Uses: uint32(len(names)),
		Role: string(events.RoleAgent),
	}}})
	for i, name := range names {
		l.must(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
			Node: node(name, byte(i+2)), TokenId: token, TokenSecretHash: hash[:], ClusterId: cluster,
		}}})
	}
	var ids []identity.ID
	for _, name := range append([]string{"a"}, names...) {
		id, err := identity.ParseID(l.State.NodeByName(name).GetId())
		if err != nil {
			l.t.Fatal(err)
		}
		ids = append(ids, id)
	}
	return ids
}

// AdmitKey adds a member whose keys the test has, and returns its ID.
func (l *Log) AdmitKey(name string, key, wireGuard []byte) identity.ID {
	l.t.Helper()
	const token = "00000000000000a2"
	hash := sha256.Sum256([]byte("secret"))
	l.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: token, SecretHash: hash[:], LifetimeNanos: int64(time.Hour), Uses: 1, Role: string(events.RoleAgent),
	}}})
	l.must(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
		Node:    &skeinv1.NewNode{Name: name, IdentityKey: key, WireguardKey: wireGuard, MaxSchema: events.SchemaMax},
		TokenId: token, TokenSecretHash: hash[:], ClusterId: l.State.Cluster().GetId(),
	}}})
	return identity.IDOf(key)
}
