package consensus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

func (c *cluster) followed(agent *node) (server *node) {
	c.t.Helper()
	c.eventually("the agent follows a server", func() error {
		id := agent.client.Status().Server
		for _, n := range c.nodes {
			if n.id == id && agent.client.Status().Err == nil {
				server = n
				return nil
			}
		}
		return errors.New("none")
	})
	return server
}

// complete checks that the archive has every event from a first one on.
func complete(t *testing.T, n *node, from uint64) {
	t.Helper()
	evs, first, last, err := n.replica.Events(from-1, 1<<20)
	if err != nil || first > from || uint64(len(evs)) != last-from+1 {
		t.Fatalf("%s has %d events of %d..%d, want all from %d (%v)", n.name, len(evs), first, last, from, err)
	}
	for i, e := range evs {
		if e.Index != from+uint64(i) {
			t.Fatalf("%s: event %d at the place of %d", n.name, e.Index, from+uint64(i))
		}
	}
}

func TestSubscriberGoesOnWithAnotherServer(t *testing.T) {
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprintf("silent=%t", silent), func(t *testing.T) {
			simulate(t, func(t *testing.T, c *cluster) {
				c.form(3)
				agent := c.add("agent", false)
				c.join(agent)
				from := agent.replica.State().Index() + 1
				for i := range 6 {
					server := c.followed(agent)
					ended := time.Now()
					if silent {
						c.net.cut(ids(agent), ids(server))
					} else {
						server.crash()
					}
					c.propose(agent, token(i))
					c.eventually("the agent has the new event", func() error {
						if agent.replica.State().Token(tokenID(i)) == nil {
							return errors.New("not yet")
						}
						return nil
					})
					if took := time.Since(ended); took > 6*time.Second {
						t.Errorf("round %d took %s", i, took)
					}
					if silent {
						c.net.heal()
					} else {
						server.start(false)
					}
					c.agree()
				}
				complete(t, agent, from)
			})
		})
	}
}

// A server that loses its role ends its streams with the event that says so, since it learns late of what is agreed
// afterwards.
func TestStreamOfAServerThatIsNoneAnyMore(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		c.propose(c.nodes[0], &skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{
			NodeId: agent.id.String(), Admin: true}}})
		for i := range 2 { // one of them may lead
			server := c.followed(agent)
			c.propose(agent, &skeinv1.Command{Body: &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{
				NodeId: server.id.String(), Force: true}}})
			removed := time.Now()
			c.eventually("the agent knows, and follows another", func() error {
				if agent.replica.State().Server(server.id) != nil || c.followed(agent) == server {
					return errors.New("not yet")
				}
				return nil
			})
			if took := time.Since(removed); took > 3*time.Second {
				t.Errorf("round %d took %s", i, took)
			}
		}
	})
}

func TestAgentThatHearsNoServerKnowsNoLeader(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		knows := func(want bool) func() error {
			return func() error {
				if id, ok := agent.client.Leader(); ok != want || ok && id != c.leader().id {
					return fmt.Errorf("it says %s, %t", id, ok)
				}
				return nil
			}
		}
		c.eventually("the leader is known", knows(true))
		c.net.cut(ids(agent), ids(c.nodes[:3]...))
		c.eventually("no leader is known", knows(false))
		c.net.heal()
		c.eventually("the leader is known again", knows(true))
	})
}

// OnHeartbeat is called for each heartbeat of an agent at rest: as long as it hears of the log, it asks no other
// servers.
func TestAgentAtRestIsToldOfHeartbeats(t *testing.T) {
	type beat struct {
		server identity.ID
		leader string
	}
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		beats := make(chan beat, 1024)
		agent.beat = func(server identity.ID, h *skeinv1.SubscribeResponse_Heartbeat) { beats <- beat{server, h.GetLeader()} }
		c.join(agent)
		for range 60 {
			select {
			case b := <-beats:
				if followed := c.followed(agent).id; b.server != followed || b.leader != c.leader().id.String() {
					t.Fatalf("a heartbeat of %s, leader %s; it follows %s and %s leads", b.server, b.leader, followed, c.leader().id)
				}
			case <-time.After(2 * heartbeatEvery):
				t.Fatalf("told of no heartbeat for %s", 2*heartbeatEvery)
			}
		}
	})
}

func TestAgentResumesFromItsReplicaAndCatchesUp(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		from := agent.replica.State().Index() + 1
		c.agree()
		hash := agent.replica.State().Hash()
		agent.crash()
		for i := range 50 {
			c.propose(c.nodes[0], token(i))
		}
		for _, n := range c.nodes[:3] {
			n.close()
		}
		agent.start(false)
		if agent.replica.State().Hash() != hash {
			t.Fatal("with all servers away the agent does not know what it knew")
		}
		for _, n := range c.nodes[:3] {
			n.start(false)
		}
		c.agree()
		complete(t, agent, from)
	})
}

func TestAgentThatWasAwayTooLongGetsASnapshot(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		agent := c.add("agent", false)
		c.join(agent)
		s := c.nodes[0]
		c.propose(s, &skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
			Settings: &skeinv1.Settings{ArchiveMaxEvents: 1000}, Fields: []string{"archive_max_events"}}}})
		agent.close()
		for i := range 2000 {
			c.propose(s, label(s.id.String(), i))
		}
		must(t, s.replica.Sync())
		if _, first, _, err := s.replica.Events(0, 1); err != nil || first < 500 {
			t.Fatalf("the archive begins at %d (%v): the test needs a shorter one", first, err)
		}
		agent.start(false)
		c.agree()
		if _, first, last, err := agent.replica.Events(0, 1); err != nil || first <= 1 || last != s.replica.State().Index() {
			t.Fatalf("the agent's archive is %d..%d, %v", first, last, err)
		}
		old, err := agent.client.ReadState(context.Background(), s.replica.firstAvailable()+1)
		if err != nil || old.Index() != s.replica.firstAvailable()+1 {
			t.Fatalf("an old state from the server's archive: %v", err)
		}
	})
}

// A server was away while all the servers that it knew were replaced. Raft alone does not let it back, because it does
// not know the new leader. It learns of the leader by following, as agents do.
func TestServerThatWasAwayLearnsOfNewServers(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		away := c.nodes[2]
		away.crash()
		c.join(c.add("s4", true))
		c.join(c.add("s5", true))
		c.eventually("five voters", func() error {
			if n := c.leader().raft.voters(); n != 5 {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		for c.leader() != c.nodes[3] && c.leader() != c.nodes[4] {
			old := c.leader()
			old.close()
			c.leader()
			old.start(false)
			c.agree()
		}
		away.start(false)
		c.propose(c.nodes[0], token(1))
		c.agree()
	})
}

func TestAgentStopsAtAnEventItDoesNotKnow(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		r := openReplica(t, t.TempDir())
		_, b := newHistory(t)
		must(t, r.Apply(b))
		server := c.fakeServer(r.State(), func(out *connect.ServerStream[skeinv1.SubscribeResponse], after uint64) error {
			return out.Send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Batch{Batch: &skeinv1.Batch{
				Base: after, Events: []*skeinv1.Event{{Index: after + 1, Schema: events.SchemaMax + 1}}}}})
		})
		defer server()
		self := identity.ID{1}
		conns := NewConns(dialer{c.net, self})
		defer conns.Close()
		client := NewClient(ClientConfig{Self: self, Replica: r, Conns: conns, Log: quiet})
		if err := client.Follow(context.Background()); !errors.Is(err, events.ErrUnknownEvent) {
			t.Fatalf("it ended with %v", err)
		}
		must(t, r.Close())
	})
}

// fakeServer serves Subscribe in place of a state's only server.
func (c *cluster) fakeServer(state *events.State, f func(*connect.ServerStream[skeinv1.SubscribeResponse],
	uint64) error) (stop func()) {
	id, err := identity.ParseID(state.Servers()[0].NodeId)
	must(c.t, err)
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewClusterServiceHandler(fakeService{f: f}))
	server, l := NewHTTPServer(mux, quiet), c.net.listen(id, identity.ALPNRPC)
	go server.Serve(PlainListener(l))
	return func() { server.Close(); l.Close() }
}

type fakeService struct {
	skeinv1connect.UnimplementedClusterServiceHandler
	f func(*connect.ServerStream[skeinv1.SubscribeResponse], uint64) error
}

func (s fakeService) Subscribe(_ context.Context, r *skeinv1.SubscribeRequest,
	out *connect.ServerStream[skeinv1.SubscribeResponse]) error {
	return s.f(out, r.After)
}

func TestSubscriberThatDoesNotReadIsCut(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		agent := c.add("agent", false)
		c.join(agent)
		agent.stop() // no Follow of its own
		<-agent.ended
		stream, err := agent.conns.Cluster(s.id).Subscribe(context.Background(), &skeinv1.SubscribeRequest{})
		must(t, err)
		defer stream.Close()
		stream.Receive()
		pad := strings.Repeat("x", 60)
		ctx, stop := context.WithCancel(t.Context())
		var writing sync.WaitGroup
		writing.Go(func() {
			for i := range 4000 { // more than all windows and buffers hold
				cmd := label(s.id.String(), i)
				for j := range 20 {
					cmd.GetChangeNode().Labels[fmt.Sprint("pad", j)] = pad
				}
				for {
					_, err := s.decide(ctx, cmd)
					if ctx.Err() != nil {
						return
					}
					if err == nil {
						break
					}
					t.Logf("command %d: %v", i, err)
					time.Sleep(100 * time.Millisecond) // no leader for a moment
				}
			}
		})
		c.eventually("the server cuts it", func() error {
			if n := s.service.subscribers.Load(); n > 0 {
				return fmt.Errorf("%d subscribers", n)
			}
			return nil
		})
		stop()
		writing.Wait()
		agent.ended <- nil
		s.live.Store(nil)
	})
}

func TestRevokedNodeIsCutOff(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		agent := c.add("agent", false)
		c.join(agent)
		c.agree()
		c.followed(agent)
		before := agent.replica.State().GossipKeys()
		c.propose(s, revokeNode(agent))
		c.eventually("it hears of it", func() error {
			if agent.replica.State().Revoked(agent.id) == nil {
				return errors.New("not yet")
			}
			return nil
		})
		c.eventually("its subscription ends", func() error {
			if n := s.service.subscribers.Load(); n > 0 {
				return fmt.Errorf("%d subscribers", n)
			}
			return nil
		})
		_, err := agent.client.Propose(context.Background(), token(1))
		if events.CodeOf(err) != events.PermissionDenied {
			t.Fatalf("a revoked node's command: %v", err)
		}
		if now := agent.replica.State().GossipKeys(); !proto.Equal(before, now) {
			t.Error("a revoked node got the new gossip key")
		}
		if now := s.replica.State().GossipKeys(); proto.Equal(before, now) {
			t.Error("there is no new gossip key")
		}
	})
}

// A lagging server may reach the event among many others, or long after it.
func TestWhatARevokedNodeIsSentLast(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		agent, other := c.add("agent", false), c.add("other", false)
		c.join(agent)
		c.join(other)
		for i := range streamEvents {
			c.propose(s, token(i))
		}
		c.propose(s, revokeNode(other))
		before := s.replica.State().Index()
		c.propose(s, revokeNode(agent))
		revoked := before + 1
		for i := range streamEvents {
			c.propose(s, token(streamEvents+i))
		}
		c.propose(s, &skeinv1.Command{Body: &skeinv1.Command_RotateGossipKey{
			RotateGossipKey: &skeinv1.RotateGossipKey{}}})
		for _, v := range []struct {
			at   uint64
			last uint64 // 0: nothing is sent
		}{
			{before - 3, revoked},
			{before, revoked},
			{revoked - streamEvents, revoked},
			{revoked - streamEvents - 1, 0}, // too far back to be worth it
			{revoked, 0},                    // it has the event: the key comes next
			{revoked + 1, 0},                // as one may claim that knows what is to come
			{s.replica.State().Index() - 1, 0},
			{s.replica.State().Index(), 0},
			{s.replica.State().Index() + 1, 0},
		} {
			last := uint64(0)
			_, err := s.service.sendNews(agent.id, v.at, true, func(m *skeinv1.SubscribeResponse) error {
				for _, e := range m.GetBatch().GetEvents() {
					last = e.GetIndex()
				}
				return nil
			})
			if connect.CodeOf(err) != connect.CodePermissionDenied || last != v.last {
				t.Errorf("after index %d: sent up to %d, want %d: %v", v.at, last, v.last, err)
			}
		}
	})
}

// Raft brings a server the entry that revokes it, with the new gossip key. Another key is made once it gets no more.
func TestRevokedServerHasNoKeyThatIsUsed(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(4)
		var server *node
		for _, n := range c.nodes {
			if n != c.leader() {
				server = n
			}
		}
		leader := c.leader()
		before := leader.replica.State().GossipKeys()
		c.propose(leader, revokeNode(server))
		c.eventually("Raft is without it, and there is another key", func() error {
			now := leader.replica.State().GossipKeys()
			if len(now.GetAccepted()) < 2 || !bytes.Equal(now.GetAccepted()[1], before.GetPrimary()) {
				return fmt.Errorf("%d keys", len(now.GetAccepted()))
			}
			return nil
		})
		key := leader.replica.State().GossipKeys().GetPrimary()
		c.propose(leader, token(1))
		if bytes.Equal(server.replica.State().GossipKeys().GetPrimary(), key) {
			t.Error("the revoked server has the key that is used")
		}
	})
}
