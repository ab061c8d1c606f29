package consensus

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
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

// site is a site that is reached through leaders. Each node prefers one of them; the others come after it.
type site struct {
	mu      sync.Mutex
	members []*node
	leading []*node
}

func (s *site) order(n *node) func() []identity.ID {
	if s == nil {
		return nil
	}
	return func() (out []identity.ID) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if place := slices.Index(s.members, n); len(s.leading) > 0 {
			for i := range s.leading {
				out = append(out, s.leading[(i+place)%len(s.leading)].id)
			}
		}
		return out
	}
}

func (s *site) leads(n *node) func() bool {
	if s == nil {
		return nil
	}
	return func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.Contains(s.leading, n)
	}
}

func (s *site) pass(n *node) func(identity.ID) error {
	if s == nil {
		return nil
	}
	return func(peer identity.ID) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !slices.Contains(s.leading, n) || !slices.ContainsFunc(s.members, func(m *node) bool { return m.id == peer }) {
			return errors.New("it does not lead the node's site")
		}
		return nil
	}
}

// lead sets the leaders.
func (s *site) lead(leaders ...*node) {
	s.mu.Lock()
	s.leading = leaders
	s.mu.Unlock()
	for _, n := range s.members {
		if client := n.current(); client != nil {
			client.LeadersChanged()
		}
	}
}

// formSite makes a site of so many nodes, which join one after another; no node leads it yet.
func (c *cluster) formSite(nodes int) *site {
	c.t.Helper()
	s := &site{}
	for i := range nodes {
		n := c.add(fmt.Sprintf("m%d", i+1), false)
		n.site = s
		s.members = append(s.members, n)
	}
	for _, n := range s.members {
		c.join(n)
	}
	return s
}

// follows waits until a node follows one of the others: a leader or a server, as passed says.
func (c *cluster) follows(n *node, passed bool, of ...*node) (who *node) {
	c.t.Helper()
	c.eventually(n.name+" follows whom it should", func() error {
		st := n.client.Status()
		i := slices.IndexFunc(of, func(o *node) bool { return o.id == st.Server })
		if i < 0 || st.Passed != passed || st.Err != nil {
			return fmt.Errorf("it follows %s, passed %t, %v", st.Server, st.Passed, st.Err)
		}
		who = of[i]
		return nil
	})
	return who
}

// has waits until a node has a token's event.
func (c *cluster) has(n *node, i int) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("%s has the event %d", n.name, i), func() error {
		if n.replica.State().Token(tokenID(i)) == nil {
			return errors.New("not yet")
		}
		return nil
	})
}

// The servers stream to the leaders alone, and all nodes have at once what the servers agree on.
func TestSiteHasEventsFromItsLeaders(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		s := c.formSite(6)
		s.lead(s.members[0], s.members[1])
		for _, n := range s.members[:2] {
			c.follows(n, false, c.nodes[:3]...)
		}
		for i, n := range s.members[2:] {
			c.follows(n, true, s.leading[i%2])
		}
		var streams int64
		for _, n := range c.nodes[:3] {
			streams += n.service.subscribers.Load()
		}
		if streams != 2 {
			t.Errorf("the servers have %d subscribers, want the two leaders", streams)
		}
		if a, b := s.leading[0].service.Passing(), s.leading[1].service.Passing(); a != 2 || b != 2 {
			t.Errorf("the leaders pass events on to %d and %d nodes, want 2 each", a, b)
		}
		from := s.members[5].replica.State().Index() + 1
		for i := range 20 {
			c.propose(s.members[5], token(i))
			began := time.Now()
			for _, n := range s.members {
				c.has(n, i)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("event %d took %s to all nodes of the site", i, took)
			}
		}
		c.agree()
		for _, n := range s.members {
			complete(t, n, from)
		}
		time.Sleep(3 * time.Minute) // virtual; audits happen meanwhile
		for i, n := range s.members[2:] {
			c.follows(n, true, s.leading[i%2])
			if err := n.client.Status().Unconfirmed; err != nil {
				t.Errorf("%s could ask no server: %v", n.name, err)
			}
		}
		s.lead() // as in the topology full
		for _, n := range s.members {
			c.follows(n, false, c.nodes[:3]...)
		}
	})
}

// A leader that dies, or falls silent, is left for the next one and then for a server; nothing is lost.
func TestLeaderOfASiteIsLost(t *testing.T) {
	for _, silent := range []bool{false, true} {
		t.Run(fmt.Sprintf("silent=%t", silent), func(t *testing.T) {
			simulate(t, func(t *testing.T, c *cluster) {
				c.form(3)
				s := c.formSite(3)
				s.lead(s.members[0], s.members[1])
				agent := s.members[2]
				c.follows(agent, true, s.leading[0])
				from := agent.replica.State().Index() + 1
				for i, next := range [][]*node{{s.leading[1]}, c.nodes[:3]} {
					if silent {
						c.net.cut(ids(agent), ids(s.leading[i]))
					} else {
						s.leading[i].close()
					}
					ended := time.Now()
					c.propose(c.nodes[0], token(i))
					c.has(agent, i)
					if took := time.Since(ended); took > 4*time.Second {
						t.Errorf("the event came %s after leader %d was lost", took, i)
					}
					c.follows(agent, i == 0, next...)
				}
				if silent {
					c.net.heal()
				} else {
					s.leading[0].start(false)
				}
				c.follows(agent, true, s.leading[0]) // when its backoff is over
				c.propose(c.nodes[0], token(7))
				c.has(agent, 7)
				complete(t, agent, from)
			})
		})
	}
}

// A leader whose server dies follows another one before its site's nodes leave it.
func TestLeaderOfASiteLosesItsServer(t *testing.T) {
	for _, silent := range []bool{false, true} {
		simulate(t, func(t *testing.T, c *cluster) {
			c.form(3)
			s := c.formSite(4)
			s.lead(s.members[0])
			for _, n := range s.members[1:] {
				c.follows(n, true, s.members[0])
			}
			server := c.followed(s.members[0])
			if silent {
				c.net.cut(ids(s.members[0]), ids(server))
			} else {
				server.crash()
			}
			c.propose(c.others(server)[0], token(1))
			for _, n := range s.members {
				c.has(n, 1)
			}
			for _, n := range s.members[1:] {
				c.follows(n, true, s.members[0])
			}
		})
	}
}

// Nodes of other sites, and nodes without a leader, get nothing from a node that is not a server. Each node has one
// stream.
func TestWhoGetsEventsFromALeader(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.formSite(2)
		other := c.add("other", false)
		c.join(other)
		s.lead(s.members[0])
		leader, member := s.members[0], s.members[1]
		c.follows(member, true, leader)
		ask := func(from, to *node) error {
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			stream, err := from.conns.Cluster(to.id).Subscribe(ctx,
				&skeinv1.SubscribeRequest{After: from.replica.State().Index()})
			if err != nil {
				return err
			}
			defer stream.Close()
			if stream.Receive() {
				return nil
			}
			return stream.Err()
		}
		for name, who := range map[string]struct{ from, to *node }{
			"a node of another site": {other, leader}, "a node asks one that does not lead": {leader, member},
			"one that is in no site": {member, other},
		} {
			if err := ask(who.from, who.to); connect.CodeOf(err) != connect.CodeUnavailable {
				t.Errorf("%s: %v", name, err)
			}
		}
		for range 5 {
			if err := ask(member, leader); err != nil {
				t.Errorf("a member of the site: %v", err)
			}
		}
		c.eventually("the member has lost its own stream by that", func() error {
			member.client.mu.Lock()
			defer member.client.mu.Unlock()
			if member.client.backoffs[leader.id].fails == 0 {
				return errors.New("not yet")
			}
			return nil
		})
		c.follows(member, false, c.nodes[0]) // while the leader is in backoff
		c.follows(member, true, leader)
		if n := leader.service.Passing(); n != 1 {
			t.Errorf("the leader has %d streams of one node", n)
		}
		c.agree()
		c.propose(c.nodes[0], revokeNode(member))
		c.eventually("a revoked node's stream ends", func() error {
			if n := leader.service.Passing(); n != 0 {
				return fmt.Errorf("%d streams", n)
			}
			return nil
		})
		if proto.Equal(member.replica.State().GossipKeys(), c.nodes[0].replica.State().GossipKeys()) {
			t.Error("the revoked node has the new gossip key")
		}
	})
}

// The event that revokes a node comes with a new gossip key, and one checkpoint covers both. So a leader sends a
// revoked node nothing more, whatever checkpoint the leader has.
func TestRevokedNodeGetsNothingMoreByALeader(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.formSite(2)
		s.lead(s.members[0])
		leader, member := s.members[0], s.members[1]
		c.agree()
		at := leader.replica.State().Index()
		c.propose(c.nodes[0], revokeNode(member))
		c.eventually("the leader has the event and a checkpoint for it", func() error {
			if p, _ := leader.client.Proof(); p.GetIndex() == at || leader.replica.State().Revoked(member.id) == nil {
				return errors.New("not yet")
			}
			return nil
		})
		service := NewService(ServiceConfig{Self: leader.id, Replica: leader.replica, Log: c.log,
			Pass: func(identity.ID) error { return nil }, Proof: leader.client.Proof})
		err := service.pass(t.Context(), member.id, at, func(m *skeinv1.SubscribeResponse) error {
			return fmt.Errorf("the node was sent %v", m)
		})
		if connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Error(err)
		}
	})
}

// hostile answers subscriptions in a leader's place, as a program that holds its key.
type hostile struct {
	skeinv1connect.UnimplementedClusterServiceHandler
	serve func(ctx context.Context, after uint64, send func(*skeinv1.SubscribeResponse) error) error
	mu    sync.Mutex
	asked int
}

func (h *hostile) Subscribe(ctx context.Context, r *skeinv1.SubscribeRequest,
	out *connect.ServerStream[skeinv1.SubscribeResponse]) error {
	h.mu.Lock()
	h.asked++
	h.mu.Unlock()
	return h.serve(ctx, r.GetAfter(), out.Send)
}

func (h *hostile) times() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// turn replaces a leader's service with that of a hostile program.
func (n *node) turn(h *hostile) {
	n.http.Close()
	n.rpc.Close()
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewClusterServiceHandler(h))
	n.http, n.rpc = NewHTTPServer(mux, n.c.log), n.c.net.listen(n.id, identity.ALPNRPC)
	go n.http.Serve(PlainListener(n.rpc))
}

func batchOf(base uint64, evs ...*skeinv1.Event) *skeinv1.SubscribeResponse_Batch {
	return &skeinv1.SubscribeResponse_Batch{Batch: &skeinv1.Batch{Base: base, Events: evs}}
}

// nothingAfter is a leader's message without an event after an index, with its checkpoint unless that is beyond the
// index.
func nothingAfter(index uint64, p *skeinv1.Checkpoint) *skeinv1.SubscribeResponse {
	if p.GetIndex() > index {
		p = nil
	}
	return &skeinv1.SubscribeResponse{Checkpoint: p,
		Body: &skeinv1.SubscribeResponse_Heartbeat_{Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{}}}
}

// until calls a function each second until the stream ends.
func until(ctx context.Context, f func() error) error {
	for ctx.Err() == nil {
		if err := f(); err != nil {
			return err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
	return ctx.Err()
}

// A leader sends what no server has agreed on. A node of its site keeps its state, gets what the servers agree on from
// a server within a bound, and does not follow the leader again at once.
func TestHostileLeaderOfASite(t *testing.T) {
	type scene struct {
		c      *cluster
		leader *node
	}
	proof := func(s scene) *skeinv1.Checkpoint { p, _ := s.leader.client.Proof(); return p }
	revoke := func(s scene, index uint64) *skeinv1.Event {
		return &skeinv1.Event{Index: index, Time: s.leader.replica.State().Time(), Schema: 1,
			Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: s.c.nodes[0].id.String(),
				Reason: "forged"}}}
	}
	once := func(f func(s scene, after uint64) *skeinv1.SubscribeResponse) func(scene, context.Context, uint64,
		func(*skeinv1.SubscribeResponse) error) error {
		return func(s scene, ctx context.Context, after uint64, send func(*skeinv1.SubscribeResponse) error) error {
			if err := send(f(s, after)); err != nil {
				return err
			}
			<-ctx.Done()
			return ctx.Err()
		}
	}
	// signed is a checkpoint for what follows on a state, signed by the given key.
	signed := func(s scene, key *identity.Key, cluster string, evs ...*skeinv1.Event) *skeinv1.Checkpoint {
		next := s.leader.replica.State().Clone()
		for _, e := range evs {
			if err := next.Fold(e); err != nil {
				s.c.t.Error(err)
			}
		}
		hash := next.Hash()
		p := &skeinv1.Checkpoint{Server: key.ID().String(), Index: next.Index(), Hash: hash[:], Time: time.Now().UnixNano()}
		p.Signature = key.Sign(checkpointText(cluster, p))
		return p
	}
	for name, x := range map[string]struct {
		serve func(s scene, ctx context.Context, after uint64, send func(*skeinv1.SubscribeResponse) error) error
		bound time.Duration
		lied  bool // as soon as it is asked, so that nothing else makes the agent leave it before
	}{
		"an event of its own with an honest checkpoint": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			return &skeinv1.SubscribeResponse{Body: batchOf(after, revoke(s, after+1)), Checkpoint: proof(s)}
		}), lied: true},
		"a checkpoint that it has signed itself": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			e := revoke(s, after+1)
			return &skeinv1.SubscribeResponse{Body: batchOf(after, e), Checkpoint: signed(s, s.leader.key, testCluster, e)}
		})},
		"a checkpoint in a server's name": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			e := revoke(s, after+1)
			p := signed(s, s.leader.key, testCluster, e)
			p.Server = s.c.nodes[0].id.String()
			return &skeinv1.SubscribeResponse{Body: batchOf(after, e), Checkpoint: p}
		})},
		"another cluster's checkpoint by the same server": {serve: once(func(s scene,
			after uint64) *skeinv1.SubscribeResponse {
			e := revoke(s, after+1)
			return &skeinv1.SubscribeResponse{Body: batchOf(after, e), Checkpoint: signed(s, s.c.nodes[0].key,
				"ff"+testCluster[2:], e)}
		})},
		"a checkpoint whose hash was changed": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			e := revoke(s, after+1)
			p := proto.CloneOf(proof(s))
			q := signed(s, s.leader.key, testCluster, e)
			p.Index, p.Hash = q.Index, q.Hash
			return &skeinv1.SubscribeResponse{Body: batchOf(after, e), Checkpoint: p}
		})},
		"a true event, and another in place of the next": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			return until(ctx, func() error {
				p := proof(s)
				if p.GetIndex() < after+2 {
					return send(nothingAfter(after, p))
				}
				evs, _, _, _ := s.leader.replica.Events(after, int(p.GetIndex()-after))
				evs[len(evs)-1] = revoke(s, evs[len(evs)-1].Index)
				return send(&skeinv1.SubscribeResponse{Body: batchOf(after, evs...), Checkpoint: p})
			})
		}},
		"events in another order": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			return until(ctx, func() error {
				p := proof(s)
				if p.GetIndex() < after+2 {
					return send(nothingAfter(after, p))
				}
				evs, _, _, _ := s.leader.replica.Events(after, int(p.GetIndex()-after))
				a, b := proto.CloneOf(evs[0]), proto.CloneOf(evs[1])
				a.Index, b.Index = b.Index, a.Index
				return send(&skeinv1.SubscribeResponse{Body: batchOf(after, append([]*skeinv1.Event{b, a}, evs[2:]...)...),
					Checkpoint: p})
			})
		}},
		"an event of a schema that nobody knows": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			return &skeinv1.SubscribeResponse{Body: batchOf(after, &skeinv1.Event{Index: after + 1, Schema: events.SchemaMax +
				1}), Checkpoint: signed(s, s.c.nodes[0].key, "other")}
		})},
		"an event with nothing in it": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			return until(ctx, func() error {
				p := proof(s)
				if p.GetIndex() <= after {
					return send(nothingAfter(after, p))
				}
				var evs []*skeinv1.Event
				for i := after + 1; i <= p.GetIndex(); i++ {
					evs = append(evs, &skeinv1.Event{Index: i, Schema: 1,
						Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{}}})
				}
				return send(&skeinv1.SubscribeResponse{Body: batchOf(after, evs...), Checkpoint: p})
			})
		}},
		"a state, with an honest checkpoint": {serve: once(func(s scene, after uint64) *skeinv1.SubscribeResponse {
			return &skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Snapshot{
				Snapshot: s.leader.replica.State().Proto()}, Checkpoint: proof(s)}
		}), lied: true},
		"events for ever, without a checkpoint": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			for i := after; ctx.Err() == nil; i++ {
				if err := send(&skeinv1.SubscribeResponse{Body: batchOf(i, revoke(s, i+1))}); err != nil {
					return err
				}
			}
			return ctx.Err()
		}, lied: true},
		"nothing new, with the last checkpoint again and again": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			old := proof(s)
			return until(ctx, func() error {
				return send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{
					Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{}}, Checkpoint: old})
			})
		}, bound: freshFor},
		"heartbeats without a checkpoint": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			return until(ctx, func() error {
				return send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{
					Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{Index: 1 << 40}}})
			})
		}, bound: freshFor},
		"everything true, and half a minute late": {serve: func(s scene, ctx context.Context, after uint64,
			send func(*skeinv1.SubscribeResponse) error) error {
			var kept []*skeinv1.Checkpoint
			return until(ctx, func() error {
				if kept = append(kept, proof(s)); len(kept) <= 30 {
					p := kept[0]
					if len(kept) > 1 { // it has kept these from before, so that none is shown twice
						p = proto.CloneOf(p)
						p.Time -= int64(30*time.Second) - int64(len(kept))*int64(time.Second)
						p.Signature = s.c.nodes[0].key.Sign(checkpointText(testCluster, p))
						if s.c.nodes[0].id.String() != p.GetServer() {
							p.Server = s.c.nodes[0].id.String()
							p.Signature = s.c.nodes[0].key.Sign(checkpointText(testCluster, p))
						}
					}
					return send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{
						Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{}}, Checkpoint: p})
				}
				return send(&skeinv1.SubscribeResponse{Body: &skeinv1.SubscribeResponse_Heartbeat_{
					Heartbeat: &skeinv1.SubscribeResponse_Heartbeat{}}, Checkpoint: kept[len(kept)-30]})
			})
		}, bound: freshFor + auditSoon},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(t *testing.T, c *cluster) {
				c.form(3)
				s := c.formSite(2)
				leader, agent := s.members[0], s.members[1]
				forgery := scene{c, leader}
				h := &hostile{}
				h.serve = func(ctx context.Context, after uint64, send func(*skeinv1.SubscribeResponse) error) error {
					return x.serve(forgery, ctx, after, send)
				}
				c.agree()
				s.lead(leader)
				c.follows(agent, true, leader)
				from := agent.replica.State().Index() + 1
				leader.turn(h)
				c.eventually("the agent asks the leader again, which has turned", func() error {
					if h.times() == 0 {
						return errors.New("it does not")
					}
					return nil
				})
				began := time.Now()
				c.propose(c.nodes[0], token(1))
				c.propose(c.nodes[0], token(2))
				c.has(agent, 2)
				if n := agent.client.Forged(); x.lied && n == 0 {
					t.Error("the agent did not see that the leader lied")
				}
				if took := time.Since(began); took > x.bound+2*time.Second {
					t.Errorf("the agent had what the servers agreed on after %s", took)
				}
				c.follows(agent, false, c.nodes[:3]...)
				c.agree()
				complete(t, agent, from)
				if agent.replica.State().Revoked(c.nodes[0].id) != nil {
					t.Error("a forged event was folded")
				}
				asked := h.times()
				time.Sleep(30 * time.Second) // virtual
				if again := h.times() - asked; x.lied && again > 0 || again > 3 {
					t.Errorf("it asked the leader %d times more within half a minute", again)
				}
				c.propose(c.nodes[0], token(3))
				c.has(agent, 3)
			})
		})
	}
}

func TestOrderOfSources(t *testing.T) {
	now := time.Now()
	a, b, x, y := identity.ID{1}, identity.ID{2}, identity.ID{8}, identity.ID{9}
	later, past := backoff{until: now.Add(time.Minute)}, backoff{until: now.Add(-time.Minute)}
	for name, v := range map[string]struct {
		leaders, servers []identity.ID
		backoffs         map[identity.ID]backoff
		want             []source
	}{
		"servers alone": {nil, []identity.ID{x, y}, nil, []source{{x, false}, {y, false}}},
		"leaders first": {[]identity.ID{a, b}, []identity.ID{x}, nil,
			[]source{{a, true}, {b, true}, {x, false}}},
		"one in backoff": {[]identity.ID{a, b}, []identity.ID{x}, map[identity.ID]backoff{a: later, b: past},
			[]source{{b, true}, {x, false}}},
		"a server leads": {[]identity.ID{y, a}, []identity.ID{x, y}, nil,
			[]source{{y, false}, {a, true}, {x, false}}},
		"a server leads, and in backoff": {[]identity.ID{y}, []identity.ID{x, y}, map[identity.ID]backoff{y: later},
			[]source{{x, false}, {y, false}}},
	} {
		if have := order(v.leaders, v.servers, v.backoffs, now); !slices.Equal(have, v.want) {
			t.Errorf("%s: %v, want %v", name, have, v.want)
		}
	}
}

func TestWhenASourceIsLeft(t *testing.T) {
	now := time.Now()
	a, b, x := identity.ID{1}, identity.ID{2}, identity.ID{9}
	soon, later := now.Add(time.Second), now.Add(time.Minute)
	for name, v := range map[string]struct {
		current  source
		leaders  []identity.ID
		backoffs map[identity.ID]backoff
		want     time.Time
	}{
		"a server, and nobody leads": {source{x, false}, nil, nil, time.Time{}},
		"a server, and one leads":    {source{x, false}, []identity.ID{a}, nil, now},
		"a server, and leaders are in backoff": {source{x, false}, []identity.ID{a, b},
			map[identity.ID]backoff{a: {until: later},
				b: {until: soon}}, soon},
		"the best leader": {source{a, true}, []identity.ID{a, b}, nil, time.Time{}},
		"the next one, the best in backoff": {source{b, true}, []identity.ID{a, b},
			map[identity.ID]backoff{a: {until: later}}, later},
		"one that leads no more": {source{b, true}, []identity.ID{a},
			map[identity.ID]backoff{a: {until: later}}, now},
		"nobody leads any more":     {source{b, true}, nil, nil, now},
		"a leader that is a server": {source{x, false}, []identity.ID{x, a}, nil, time.Time{}},
	} {
		if have := moveAt(v.current, v.leaders, v.backoffs, now); !have.Equal(v.want) {
			t.Errorf("%s: in %s, want %s", name, have.Sub(now), v.want.Sub(now))
		}
	}
}

func TestBackoffOfALeaderGrows(t *testing.T) {
	now := time.Now()
	var d backoff
	for i, want := range []time.Duration{10, 20, 40, 80, 160, 300, 300, 300, 300, 300} {
		if d = d.after(errStale, time.Second, now); d.until.Sub(now) != want*time.Second {
			t.Errorf("failure %d: %s, want %ds", i, d.until.Sub(now), want)
		}
	}
	if d = d.after(errStale, backoffReset, now); d.until.Sub(now) != backoffMin {
		t.Errorf("after it was followed for long: %s", d.until.Sub(now))
	}
	if d = d.after(fmt.Errorf("%w: x", errForged), time.Hour, now); d.until.Sub(now) != backoffForged {
		t.Errorf("after it lied: %s", d.until.Sub(now))
	}
}

func TestFreshness(t *testing.T) {
	s, other := identity.ID{1}, identity.ID{2}
	const at = int64(1_800_000_000_000_000_000)
	sec := func(n int64) int64 { return at + n*int64(time.Second) }
	var f freshness
	for i, v := range []struct {
		server identity.ID
		at     int64
		local  time.Duration
		fresh  bool
		stale  bool
	}{
		{s, sec(0), 0, true, false},                      // the server's clock is not known, so the age is not
		{s, sec(0), time.Second, false, false},           // it came before
		{s, sec(-1), 2 * time.Second, false, false},      // an older one
		{other, sec(-900), 2 * time.Second, true, false}, // another server's clock
		{s, sec(3), 3 * time.Second, true, false},
	} {
		if fresh, err := f.judge(v.server, v.at, v.local); fresh != v.fresh || errors.Is(err, errStale) != v.stale {
			t.Errorf("%d: fresh %t, %v", i, fresh, err)
		}
	}
	if f.knows(s) {
		t.Error("it says that it knows a clock that it has not seen")
	}
	f.heard(s, sec(100), 10*time.Second) // from the server itself: the checkpoint at 3 s was late
	if fresh, err := f.judge(s, sec(101), 11*time.Second); !fresh || err != nil {
		t.Errorf("a new one: %t, %v", fresh, err)
	}
	if fresh, err := f.judge(s, sec(103), 19*time.Second); !fresh || err != nil {
		t.Errorf("one that is six seconds old: %t, %v", fresh, err)
	}
	if fresh, err := f.judge(s, sec(104), 22*time.Second); fresh || !errors.Is(err, errStale) {
		t.Errorf("one that is eight seconds old: %t, %v", fresh, err)
	}
	if f.knows(s) {
		t.Error("it goes on with a clock that may have been set")
	}
	f.heard(s, sec(-3600), 23*time.Second) // the clock was set back
	if fresh, err := f.judge(s, sec(-3599), 24*time.Second); !fresh || err != nil {
		t.Errorf("after the clock was set back: %t, %v", fresh, err)
	}
}

// A checkpoint with any field changed is refused.
func TestCheckpointsAreSignedAsAWhole(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		state := s.replica.State()
		p := signCheckpoint(s.key, state, s.id.String(), time.Now())
		if by, err := verifyCheckpoint(state, p); err != nil || by != s.id {
			t.Fatalf("%s, %v", by, err)
		}
		for name, change := range map[string]func(*skeinv1.Checkpoint){
			"index": func(p *skeinv1.Checkpoint) { p.Index++ }, "hash": func(p *skeinv1.Checkpoint) { p.Hash[3] ^= 1 },
			"a shorter hash":                   func(p *skeinv1.Checkpoint) { p.Hash = p.Hash[:31] },
			"time":                             func(p *skeinv1.Checkpoint) { p.Time++ },
			"leader":                           func(p *skeinv1.Checkpoint) { p.Leader = "" },
			"no signature":                     func(p *skeinv1.Checkpoint) { p.Signature = nil },
			"server":                           func(p *skeinv1.Checkpoint) { p.Server = "0000000000000001" },
			"no server":                        func(p *skeinv1.Checkpoint) { p.Server = "" },
			"the same server, spelt otherwise": func(p *skeinv1.Checkpoint) { p.Server = "0x" + p.Server },
			"a byte from one field to the next": func(p *skeinv1.Checkpoint) {
				p.Hash, p.Leader = append(p.Hash, p.Leader[0]), p.Leader[1:]
			},
		} {
			q := proto.CloneOf(p)
			change(q)
			if _, err := verifyCheckpoint(state, q); !errors.Is(err, errUnsigned) {
				t.Errorf("another %s: %v", name, err)
			}
		}
	})
}
