package events

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const clusterID = "00112233445566778899aabbccddeeff"

// start is the leader's clock at the first command; every command is a second later than the last.
var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// world is a leader without a network: it decides, folds, and keeps the log.
type world struct {
	t   testing.TB
	s   *State
	log []*skeinv1.Event
	now time.Time
	n   int
}

func newWorld(t testing.TB) *world { return &world{t: t, s: NewState(), now: start} }

// newCluster is a world whose cluster has one node, "a", and a token "1".
func newCluster(t testing.TB) *world {
	w := newWorld(t)
	w.must(createCluster("10.4.0.0/16", "a"))
	w.must(createToken("1", 1000, false))
	return w
}

// propose completes the command as a leader does, decides it and folds what follows.
func (w *world) propose(c *skeinv1.Command) ([]*skeinv1.Event, *skeinv1.Answer, error) {
	w.t.Helper()
	w.now = w.now.Add(time.Second)
	w.n++
	c.Time = w.now.UnixNano()
	c.Entropy = entropy(w.n)
	before := w.s.Hash()
	evs, a, err := Decide(w.s, c)
	if w.s.Hash() != before {
		w.t.Fatal("Decide changed the state")
	}
	for _, e := range evs {
		if err := w.s.Fold(e); err != nil {
			w.t.Fatalf("fold %v: %v", e, err)
		}
	}
	w.log = append(w.log, evs...)
	return evs, a, err
}

// must proposes a command that is not refused.
func (w *world) must(c *skeinv1.Command) *skeinv1.Answer {
	w.t.Helper()
	_, a, err := w.propose(c)
	if err != nil {
		w.t.Fatalf("%v: %v", c, err)
	}
	return a
}

func (w *world) id(name string) string {
	w.t.Helper()
	n := w.s.NodeByName(name)
	if n == nil {
		w.t.Fatalf("no node %q", name)
	}
	return n.GetId()
}

func entropy(n int) []byte {
	h := sha256.Sum256(fmt.Append(nil, "entropy ", n))
	return append(h[:], h[:]...)
}

func key(purpose, name string) []byte {
	h := sha256.Sum256([]byte(purpose + " " + name))
	return h[:]
}

func idOf(name string) identity.ID { return identity.IDOf(key("identity", name)) }

func tokenID(name string) string { return hex.EncodeToString(key("token", name)[:8]) }

// newNode folds schema 1, as the first version did: the golden files of its history must stay as they are.
func newNode(name string) *skeinv1.NewNode {
	return &skeinv1.NewNode{
		Name: name, IdentityKey: key("identity", name), WireguardKey: key("wireguard", name),
		Labels: map[string]string{"site": "dc", "rack": "r1"}, MinSchema: SchemaMin, MaxSchema: 1,
	}
}

func createCluster(overlay, first string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: clusterID, OverlayIpv4: overlay, FirstNode: newNode(first),
	}}}
}

// createToken makes a token for servers, or for agents.
func createToken(name string, uses uint32, agentsOnly bool) *skeinv1.Command {
	role := RoleServer
	if agentsOnly {
		role = RoleAgent
	}
	return &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: tokenID(name), SecretHash: key("secret", name), LifetimeNanos: int64(time.Hour), Uses: uses, Role: string(role),
	}}}
}

func admit(name, token string, change ...func(*skeinv1.AdmitNode)) *skeinv1.Command {
	a := &skeinv1.AdmitNode{Node: newNode(name), TokenId: tokenID(token), TokenSecretHash: key("secret", token),
		ClusterId: clusterID}
	for _, f := range change {
		f(a)
	}
	return &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: a}}
}

func asServer(a *skeinv1.AdmitNode) { a.Node.Server = true }

func revoke(id string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: id,
		Reason: "stolen"}}}
}

func promote(id string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_PromoteServer{PromoteServer: &skeinv1.PromoteServer{NodeId: id}}}
}

func withID(id string, c *skeinv1.Command) *skeinv1.Command {
	c.RequestId = id
	return c
}

// checkSame demands that two states are the same in content and hash.
func checkSame(t interface {
	Helper()
	Fatalf(string, ...any)
}, what string, want, have *State) {
	t.Helper()
	a, b := want.Proto(), have.Proto()
	if !proto.Equal(a, b) {
		t.Fatalf("%s: the states differ:\n%v", what, Diff(want, have))
	}
	if !bytes.Equal(Canonical(a), Canonical(b)) {
		t.Fatalf("%s: equal states have other canonical bytes", what)
	}
	if want.sizes != have.sizes || want.Size() != proto.Size(a) || have.Size() != proto.Size(b) {
		t.Fatalf("%s: the sizes are kept as %v and %v, %d and %d bytes in all; written they have %d and %d", what, want.sizes,
			have.sizes, want.Size(), have.Size(), proto.Size(a), proto.Size(b))
	}
	if want.Hash() != have.Hash() {
		t.Fatalf("%s: equal states have other hashes", what)
	}
}

func changeNode(name, newName string, labels map[string]string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
		NodeId: idOf(name).String(), Name: newName, Labels: labels, SetLabels: labels != nil,
	}}}
}

func rotateKey(name, k string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{
		NodeId: idOf(name).String(), WireguardKey: key("wireguard", k),
	}}}
}

func changeSettings(s *skeinv1.Settings, fields ...string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{Settings: s,
		Fields: fields}}}
}

func addServer(id string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: id}}}
}

func removeServer(id string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{NodeId: id,
		Reason: "tired"}}}
}

func revokeToken(name string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{TokenId: tokenID(name)}}}
}

func rotateGossip() *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RotateGossipKey{RotateGossipKey: &skeinv1.RotateGossipKey{}}}
}

// brief is an event in a few words.
func brief(e *skeinv1.Event) string {
	r := e.ProtoReflect()
	f := r.WhichOneof(r.Descriptor().Oneofs().ByName("body"))
	words := []string{string(r.Get(f).Message().Descriptor().Name())}
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_NodeAdmitted:
		words = append(words, b.NodeAdmitted.GetNode().GetName(), b.NodeAdmitted.GetNode().GetIpv4())
	case *skeinv1.Event_NodeChanged:
		words = append(words, b.NodeChanged.GetNode().GetName())
	case *skeinv1.Event_TokenUsed:
		words = append(words, b.TokenUsed.GetTokenId())
	case *skeinv1.Event_TokenRevoked:
		words = append(words, b.TokenRevoked.GetTokenId())
	case *skeinv1.Event_NodeRevoked:
		words = append(words, b.NodeRevoked.GetReason())
	case *skeinv1.Event_ServerRemoved:
		words = append(words, b.ServerRemoved.GetReason())
	case *skeinv1.Event_PoolCreated:
		words = append(words, b.PoolCreated.GetPool().GetName())
	case *skeinv1.Event_PoolChanged:
		words = append(words, b.PoolChanged.GetPool().GetName(), b.PoolChanged.GetChange())
	case *skeinv1.Event_PoolRemoved:
		words = append(words, b.PoolRemoved.GetName())
	case *skeinv1.Event_BlockAllocated:
		words = append(words, blockName(b.BlockAllocated.GetBlock()), b.BlockAllocated.GetBlock().GetNodeId())
	case *skeinv1.Event_BlockReserved:
		words = append(words, blockName(b.BlockReserved.GetBlock()), b.BlockReserved.GetBlock().GetReason())
	case *skeinv1.Event_BlockReleased:
		words = append(words, fmt.Sprint(b.BlockReleased.GetPool(), "/", b.BlockReleased.GetNumber()),
			b.BlockReleased.GetReason())
	case *skeinv1.Event_AddressReserved:
		words = append(words, staticAddr(b.AddressReserved.GetAddress()).String(), b.AddressReserved.GetAddress().GetPod())
	case *skeinv1.Event_AddressClaimed:
		words = append(words, b.AddressClaimed.GetAddress(), b.AddressClaimed.GetNodeId())
	case *skeinv1.Event_AddressReleased:
		words = append(words, b.AddressReleased.GetAddress())
	case *skeinv1.Event_GrantSet:
		words = append(words, b.GrantSet.GetGrant().GetNamespace(), fmt.Sprint(b.GrantSet.GetGrant().GetAddresses()))
	case *skeinv1.Event_EgressDefined:
		words = append(words, refOf(b.EgressDefined.GetEgress()).String())
	case *skeinv1.Event_EgressChanged:
		words = append(words, refOf(b.EgressChanged.GetEgress()).String(), b.EgressChanged.GetChange())
	case *skeinv1.Event_EgressRemoved:
		words = append(words, egressRef{b.EgressRemoved.GetNamespace(), b.EgressRemoved.GetName()}.String())
	case *skeinv1.Event_SlotAssigned:
		words = append(words, briefSlot(b.SlotAssigned.GetSlot()))
	case *skeinv1.Event_SlotMoved:
		words = append(words, briefSlot(b.SlotMoved.GetSlot()))
	case *skeinv1.Event_SlotReleased:
		words = append(words, briefSlot(b.SlotReleased.GetSlot()))
	case *skeinv1.Event_CommandAnswered:
		words = append(words, e.GetRequestId())
	}
	return strings.Join(words, " ")
}

func hexOf(b []byte) string { return hex.EncodeToString(b) }

func base64Of(b []byte) string { return base64.StdEncoding.EncodeToString(b) }
