package agent

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/joining"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// noWay is a control net without other nodes.
type noWay struct{}

func (noWay) Dial(_ context.Context, id identity.ID, _ string) (net.Conn, error) {
	return nil, errors.New("no way to node " + id.String())
}

// newSeed is an agent whose own server is the only one of a cluster, with a token for one use.
func newSeed(t *testing.T, h host, w *world) *Agent {
	t.Helper()
	a, _ := newSeedAndServer(t, h, w)
	return a
}

func newSeedAndServer(t *testing.T, h host, w *world) (*Agent, *consensus.Server) {
	t.Helper()
	dir := t.TempDir()
	r, err := consensus.OpenReplica(dir, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, err := consensus.StartServer(consensus.ServerConfig{Dir: dir, ID: h.key.ID(), Dialer: noWay{}, Listener: l,
		Replica: r, Log: quiet(), Bootstrap: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Shutdown(context.Background()) })
	a := newTestAgent(h, events.NewState())
	a.replica = r
	a.client = consensus.NewClient(consensus.ClientConfig{Self: a.id, Replica: r, Dialer: noWay{},
		Local: func() *consensus.Server {
			return s
		}, Log: quiet()})
	first := h.node(t)
	first.Server = true
	a.mustPropose(t,
		&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{ClusterId: testCluster,
			OverlayIpv4: "10.4.0.0/16", FirstNode: first}}})
	a.mustPropose(t, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: testTokenID, SecretHash: w.admission(h).GetAdmitNode().GetTokenSecretHash(),
		LifetimeNanos: int64(time.Hour), Uses: 1}}})
	a.roster.Update(r.State())
	w.state = r.State()
	newGossip(t, a, w)
	return a, s
}

func (a *Agent) mustPropose(t *testing.T, c *skeinv1.Command) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := a.client.Propose(ctx, c); err != nil {
		t.Fatal(err)
	}
}

// Request IDs are in the journal and the log: the ID of an admission that was answered tells neither a stranger nor the
// node that was revoked since anything, least of all the state with its gossip keys.
func TestRequestIDOfAnAdmissionAdmitsNobody(t *testing.T) {
	server, node, stranger := newHost(t, "a"), newHost(t, "b"), newHost(t, "x")
	w := newWorld(t, server)
	a := newSeed(t, server, w)
	ask := func(h host, change func(*skeinv1.JoinRequest)) (*skeinv1.JoinResponse, error) {
		r := &skeinv1.JoinRequest{ClusterId: testCluster, TokenId: testTokenID, TokenSecret: testSecret, Node: h.node(t),
			RequestId: strings.Repeat("5", 32)}
		change(r)
		return a.admit(t.Context(), r, h.key.ID())
	}
	same := func(*skeinv1.JoinRequest) {}
	answer, err := ask(node, same)
	if err != nil || answer.GetNode().GetName() != "b" || len(answer.GetState().GetGossipKeys().GetPrimary()) != 32 {
		t.Fatalf("the joiner is answered %v, %v", answer.GetNode(), err)
	}
	if again, err := ask(node, same); err != nil || again.GetNode().GetId() != answer.GetNode().GetId() {
		t.Errorf("a joiner whose answer was lost is answered %v, %v", again.GetNode(), err)
	}
	refused := func(who string, h host, words string, change func(*skeinv1.JoinRequest)) {
		t.Helper()
		answer, err := ask(h, change)
		var no *events.Error
		if answer != nil || !errors.As(err, &no) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s is answered with a state at index %d and %d bytes of gossip key, %v; want a refusal with %q",
				who, answer.GetState().GetIndex(), len(answer.GetState().GetGossipKeys().GetPrimary()), err, words)
		}
	}
	refused("a stranger with the request ID and no token", stranger, "is for cluster",
		func(r *skeinv1.JoinRequest) { r.ClusterId, r.TokenSecret = "whatever", []byte("wrong") })
	refused("a stranger with a wrong secret", stranger, "is wrong or was revoked",
		func(r *skeinv1.JoinRequest) { r.TokenSecret = []byte("wrong") })
	refused("a stranger with the used-up token", stranger, "is used up", same)
	refused("the member with a wrong secret", node, "is wrong or was revoked",
		func(r *skeinv1.JoinRequest) { r.TokenSecret = []byte("wrong") })
	a.mustPropose(t,
		&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: node.key.ID().String(),
			Reason: "stolen"}}})
	refused("the node that was revoked", node, "was revoked", same)
}

// Whatever a leader answers, the seed gives the state to nobody who is no live member in its own replica.
func TestStateIsForTheAdmittedNodeAlone(t *testing.T) {
	server, node, gone, stranger := newHost(t, "a"), newHost(t, "b"), newHost(t, "c"), newHost(t, "x")
	w := newWorld(t, server, node, gone)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
		NodeId: gone.key.ID().String(), Reason: "stolen"}}})
	a := newTestAgent(server, w.state)
	a.replica = newReplica(t, w)
	answer := func(h host) *skeinv1.Answer { return &skeinv1.Answer{Node: &skeinv1.Node{Id: h.key.ID().String()}} }
	if err := a.checkAdmitted(node.key.ID(), answer(node)); err != nil {
		t.Errorf("a member: %v", err)
	}
	for name, c := range map[string]struct {
		peer   host
		answer *skeinv1.Answer
		code   events.Code
	}{
		"a stranger":                      {stranger, answer(stranger), events.PermissionDenied},
		"a stranger, by another's answer": {stranger, answer(node), events.PermissionDenied},
		"a member, by another's answer":   {node, answer(server), events.PermissionDenied},
		"a revoked node":                  {gone, answer(gone), joining.CodeRevoked},
	} {
		if err := a.checkAdmitted(c.peer.key.ID(), c.answer); events.CodeOf(err) != c.code {
			t.Errorf("%s: %v", name, err)
		}
	}
}
