package consensus

import (
	"context"
	"errors"
	"math"
	"testing"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

func TestWhoMayProposeWhat(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		agent, admin := c.add("agent", false), c.add("admin", false)
		c.join(agent)
		c.join(admin)
		c.propose(c.nodes[0],
			&skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: agent.id.String()}}})
		c.agree()
		server, stranger := c.nodes[0].id, identity.ID{9}
		create := &skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{}}}
		promote := &skeinv1.Command{Body: &skeinv1.Command_PromoteServer{PromoteServer: &skeinv1.PromoteServer{
			NodeId: server.String()}}}
		rotate := func(id identity.ID) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{
				NodeId: id.String(), WireguardKey: make([]byte, 32)}}}
		}
		for name, q := range map[string]struct {
			from      identity.ID
			command   *skeinv1.Command
			forwarded bool
			code      connect.Code // of the RPC
			refusal   events.Code  // of the command
		}{
			"nobody":                   {identity.ID{}, token(1), false, connect.CodeUnauthenticated, ""},
			"a stranger may try later": {stranger, token(1), false, connect.CodeUnavailable, ""},
			"an agent makes a token":   {agent.id, token(2), false, 0, events.PermissionDenied},
			"an admin makes a token":   {admin.id, token(2), false, 0, ""},
			"an admin promotes":        {admin.id, promote, false, 0, events.PermissionDenied},
			"a second cluster":         {server, create, false, 0, events.PermissionDenied},
			"an agent promotes":        {agent.id, promote, false, 0, events.PermissionDenied},
			"a server promotes":        {server, promote, false, 0, ""},
			"another's key":            {agent.id, rotate(server), false, 0, events.PermissionDenied},
			"an agent takes a block of another": {agent.id, releaseCommand("default", server.String(), blocks(1)), false, 0,
				events.PermissionDenied},
			"an agent gives back its own": {agent.id, releaseCommand("default", agent.id.String(), blocks(1)), false, 0,
				events.NotFound},
			"a server asks for an agent": {server, releaseCommand("default", agent.id.String(), blocks(1)), false, 0,
				events.NotFound},
			"an agent forwards":              {agent.id, token(3), true, connect.CodeFailedPrecondition, ""},
			"no request ID, no command":      {agent.id, nil, false, connect.CodeInvalidArgument, ""},
			"a command that is not possible": {agent.id, rotate(agent.id), false, 0, events.InvalidArgument},
		} {
			ctx := context.Background()
			if !q.from.IsZero() {
				ctx = WithPeer(ctx, q.from)
			}
			if q.command != nil {
				q.command.RequestId = NewRequestID()
				q.command.Issuer = server.String() // a lie that the service does not believe
			}
			r, err := c.nodes[0].service.Propose(ctx, &skeinv1.ProposeRequest{Command: q.command, Forwarded: q.forwarded})
			if code := connect.CodeOf(err); (err != nil || q.code != 0) && code != q.code {
				t.Errorf("%s: %v, want %s", name, err, q.code)
			}
			if got := events.Code(r.GetAnswer().GetErrorCode()); got != q.refusal {
				t.Errorf("%s: refused as %q (%s), want %q", name, got, r.GetAnswer().GetErrorMessage(), q.refusal)
			}
		}
	})
}

func TestReadsFromAServersArchive(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		agent := c.add("agent", false)
		c.join(agent)
		for i := range 5 {
			c.propose(agent, token(i))
		}
		c.agree()
		evs, first, last, err := agent.client.ReadEvents(context.Background(), 0, 3)
		if err != nil || first != 1 || len(evs) != 3 || evs[0].Index != 1 || last != agent.replica.State().Index() {
			t.Fatalf("%d events of %d..%d, %v", len(evs), first, last, err)
		}
		for at := uint64(1); at <= last; at++ {
			mine, err := agent.client.ReadState(context.Background(), at)
			if err != nil {
				t.Fatal(err)
			}
			if theirs, err := c.nodes[0].replica.At(at); err != nil || theirs.Hash() != mine.Hash() {
				t.Fatalf("state at %d differs (%v)", at, err)
			}
		}
		if _, err := agent.client.ReadState(context.Background(), last+100); err == nil {
			t.Fatal("a state of the future was read")
		}
		ctx := WithPeer(context.Background(), agent.id)
		r, err := c.nodes[0].service.ReadEvents(ctx, &skeinv1.ReadEventsRequest{After: math.MaxUint64})
		if err != nil || len(r.Events) != 0 || r.Last != last {
			t.Fatalf("the range: %v, %v", r, err)
		}
	})
}

// Missing events are not reported as gone while a server that may have them does not answer.
func TestReadsWhileTheArchiveIsAway(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		for i := range 5 {
			c.propose(c.nodes[0], token(i))
		}
		agent := c.add("agent", false)
		c.join(agent)
		c.agree()
		here, first, _, err := agent.replica.Events(0, 3)
		if err != nil || first <= 1 {
			t.Fatalf("the agent has the events from %d on, %v", first, err)
		}
		c.nodes[0].crash()
		evs, from, _, err := agent.client.ReadEvents(context.Background(), 0, 3)
		if !errors.Is(err, ErrUnanswered) || from != first || len(evs) != len(here) {
			t.Errorf("%d events from %d on, %v; want the %d here, and that a server did not answer", len(evs), from, err,
				len(here))
		}
	})
}

// TestWithdrawnRole: the leader checks the role when it decides. So a withdrawn role is gone for commands that are on
// their way then, whichever server got them.
func TestWithdrawnRole(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		admin := c.add("admin", false)
		c.join(admin)
		c.agree()
		c.propose(admin, token(1))
		withdraw := &skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: admin.id.String()}}}
		if _, err := c.leader().decide(context.Background(), withdraw); err != nil {
			t.Fatal(err)
		}
		for i, n := range c.nodes[:3] { // at once: followers may not have heard of it
			cmd := token(10 + i)
			cmd.RequestId = NewRequestID()
			r, err := n.service.Propose(WithPeer(context.Background(), admin.id), &skeinv1.ProposeRequest{Command: cmd})
			if code := events.Code(r.GetAnswer().GetErrorCode()); err != nil || code != events.PermissionDenied {
				t.Errorf("by %s: %q, %v", n.name, code, err)
			}
		}
		if st := c.leader().replica.State(); st.Token(tokenID(1)) == nil || st.Token(tokenID(10)) != nil {
			t.Error("what was decided before the withdrawal is gone, or something was decided after it")
		}
	})
}
