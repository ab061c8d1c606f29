package consensus

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// rawStreams is the stream layer of a program that holds a member's key: the library's, without any check of this
// package.
type rawStreams struct {
	dialer
	closed chan struct{}
}

func (r rawStreams) Dial(to raft.ServerAddress, d time.Duration) (net.Conn, error) {
	id, err := identity.ParseID(string(to))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return r.dialer.Dial(ctx, id, identity.ALPNRaft)
}

func (r rawStreams) Accept() (net.Conn, error) { <-r.closed; return nil, net.ErrClosed }
func (r rawStreams) Close() error              { close(r.closed); return nil }
func (r rawStreams) Addr() net.Addr            { return nodeAddr(r.self) }

// forger sends Raft's requests as a node, in any name.
func (n *node) forger() *raft.NetworkTransport {
	n.c.t.Helper()
	tr := raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{Stream: rawStreams{dialer{n.c.net, n.id},
		make(chan struct{})}, MaxPool: 1,
		Timeout: peerTimeout, MsgpackUseNewTimeFormat: true, MaxRPCsInFlight: 1, Logger: newRaftLog(n.c.log)})
	n.c.t.Cleanup(func() { tr.Close() })
	return tr
}

// forgeries are one each of the requests of Raft that end a term or write the log, in a name.
func (c *cluster) forgeries(tr *raft.NetworkTransport, to, as *node) map[string]func() error {
	c.t.Helper()
	leader := c.leader()
	index, term := leader.raft.raft.LastIndex(), leader.raft.raft.CurrentTerm()
	var entry raft.Log
	if err := leader.raft.files.log.GetLog(index, &entry); err != nil {
		c.t.Fatal(err)
	}
	state := leader.replica.State()
	data, err := EncodeBatch(&skeinv1.Batch{Base: state.Index(),
		Events: []*skeinv1.Event{{Index: state.Index() + 1, Time: state.Time(), Schema: 1,
			Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: c.nodes[1].id.String(),
				Reason: "forged"}}}}})
	if err != nil {
		c.t.Fatal(err)
	}
	name := []byte(as.id.String())
	header := raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: name, Addr: name}
	id, address, later := raft.ServerID(to.id.String()), raft.ServerAddress(to.id.String()), term+1000
	return map[string]func() error{
		"entries": func() error {
			r := &raft.AppendEntriesRequest{RPCHeader: header, Term: later, PrevLogEntry: index, PrevLogTerm: entry.Term,
				Entries:           []*raft.Log{{Index: index + 1, Term: later, Type: raft.LogCommand, Data: data}},
				LeaderCommitIndex: index + 1}
			return tr.AppendEntries(id, address, r, &raft.AppendEntriesResponse{})
		},
		"a heartbeat": func() error {
			return tr.AppendEntries(id, address, &raft.AppendEntriesRequest{RPCHeader: header, Term: later},
				&raft.AppendEntriesResponse{})
		},
		"a candidacy": func() error {
			r := &raft.RequestVoteRequest{RPCHeader: header, Term: later, LastLogIndex: index + 1000, LastLogTerm: later,
				LeadershipTransfer: true}
			return tr.RequestVote(id, address, r, &raft.RequestVoteResponse{})
		},
		"a candidacy to be": func() error {
			r := &raft.RequestPreVoteRequest{RPCHeader: header, Term: later, LastLogIndex: index + 1000, LastLogTerm: later}
			return tr.RequestPreVote(id, address, r, &raft.RequestPreVoteResponse{})
		},
		"a snapshot": func() error {
			r := &raft.InstallSnapshotRequest{RPCHeader: header, SnapshotVersion: 1, Term: later, Leader: name,
				LastLogIndex: index + 1, LastLogTerm: later, Size: 1}
			return tr.InstallSnapshot(id, address, r, &raft.InstallSnapshotResponse{}, bytes.NewReader([]byte{1}))
		},
		"an order to stand": func() error {
			return tr.TimeoutNow(id, address, &raft.TimeoutNowRequest{RPCHeader: header}, &raft.TimeoutNowResponse{})
		},
	}
}

// A node without a vote writes nothing into the log, and ends no term, in its own name or another's. A voter does
// neither in another's name. Its heartbeats in its own name pass; otherwise the test would prove nothing.
func TestRaftRequestsInOthersNamesAreRefused(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent, idle := c.add("agent", false), c.add("idle", false)
		c.join(agent)
		c.join(idle)
		c.propose(c.nodes[0],
			&skeinv1.Command{Body: &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: idle.id.String()}}})
		leader := c.leader()
		c.eventually("the server without a vote is in Raft's configuration", func() error {
			for _, v := range leader.raft.raft.GetConfiguration().Configuration().Servers {
				if v.ID == raft.ServerID(idle.id.String()) && v.Suffrage == raft.Nonvoter {
					return nil
				}
			}
			return fmt.Errorf("it is not")
		})
		c.agree()
		term := leader.raft.raft.CurrentTerm()
		var follower, other *node
		for _, n := range c.nodes[:3] {
			if n != leader && follower == nil {
				follower = n
			} else if n != leader {
				other = n
			}
		}
		for name, who := range map[string]struct{ from, as *node }{
			"an agent":                           {agent, agent},
			"an agent, as the leader":            {agent, leader},
			"a server without a vote":            {idle, idle},
			"a server without a vote, as leader": {idle, leader},
			"a voter, as the leader":             {other, leader},
		} {
			tr := who.from.forger()
			for _, to := range []*node{leader, follower} {
				if to == who.as && to == who.from {
					continue
				}
				for what, send := range c.forgeries(tr, to, who.as) {
					if err := send(); err == nil {
						t.Errorf("%s: %s takes %s", name, to.name, what)
					}
				}
			}
		}
		beat := &raft.AppendEntriesRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax,
			ID: []byte(other.id.String()), Addr: []byte(other.id.String())}, Term: 1}
		if err := other.forger().AppendEntries(raft.ServerID(follower.id.String()), raft.ServerAddress(follower.id.String()),
			beat, &raft.AppendEntriesResponse{}); err != nil {
			t.Errorf("a voter in its own name is refused: %v", err)
		}
		c.propose(agent, token(1))
		c.agree()
		if now := leader.raft.raft.CurrentTerm(); now != term || !leader.raft.IsLeader() {
			t.Errorf("term %d is over, this is %d", term, now)
		}
		if r := leader.replica.State().Revoked(c.nodes[1].id); r != nil {
			t.Errorf("the forged event was folded: %v", r)
		}
	})
}

// A server that the log removed, or whose node it revoked, is refused, although Raft's configuration still names it and
// its streams are open.
func TestRemovedServersLoseTheirStreams(t *testing.T) {
	for what, command := range map[string]func(id string) *skeinv1.Command{
		"removed": func(id string) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{NodeId: id,
				Force: true}}}
		},
		"revoked": func(id string) *skeinv1.Command {
			return &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: id, Force: true}}}
		},
	} {
		simulate(t, func(t *testing.T, c *cluster) {
			c.form(3)
			leader := c.leader()
			gone, stays := c.others(leader)[0], c.others(leader)[1]
			name := []byte(gone.id.String())
			beat := func(tr *raft.NetworkTransport) error {
				r := &raft.AppendEntriesRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: name,
					Addr: name}, Term: 1}
				return tr.AppendEntries(raft.ServerID(stays.id.String()), raft.ServerAddress(stays.id.String()), r,
					&raft.AppendEntriesResponse{})
			}
			tr := gone.forger()
			if err := beat(tr); err != nil {
				t.Fatalf("a voter: %v", err)
			}
			leader.raft.health.failed(raft.ServerID(stays.id.String())) // so that Raft's configuration names the other on
			c.propose(leader, command(gone.id.String()))
			c.eventually("the other server knows", func() error {
				if stays.replica.State().Server(gone.id) != nil {
					return fmt.Errorf("not yet")
				}
				return nil
			})
			if err := beat(tr); err == nil {
				t.Errorf("%s: a stream that was open is heard", what)
			}
			if err := beat(tr); err == nil {
				t.Errorf("%s: a new stream is heard", what)
			}
			c.propose(stays, token(1))
		})
	}
}

// A command is decided in its issuer's name and with the leader's time, through whichever server it went. Only voters
// may name an issuer other than themselves.
func TestIssuerIsWhoSentTheCommand(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent, idle := c.add("agent", false), c.add("idle", false)
		c.join(agent)
		c.join(idle)
		c.propose(c.nodes[0],
			&skeinv1.Command{Body: &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: idle.id.String()}}})
		c.agree()
		leader := c.leader()
		follower := c.others(leader)[0]
		ask := func(at, from *node, forwarded bool, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
			cmd.RequestId = NewRequestID()
			cmd.Issuer, cmd.Time, cmd.Entropy = c.nodes[1].id.String(), 1, []byte("mine") // lies, unless a voter hands it on
			r, err := at.service.Propose(WithPeer(t.Context(), from.id), &skeinv1.ProposeRequest{Command: cmd,
				Forwarded: forwarded})
			return r.GetAnswer(), err
		}
		for i, who := range []struct {
			at, from  *node
			forwarded bool
			issuer    *node
		}{
			{leader, agent, false, agent},
			{follower, agent, false, agent},
			{follower, idle, false, idle},
			{leader, follower, true, c.nodes[1]},
		} {
			a, err := ask(who.at, who.from, who.forwarded, token(i))
			if err != nil || a.GetErrorCode() != "" {
				t.Fatalf("%d: %v %v", i, a, err)
			}
			c.agree()
			evs, _, _, err := leader.replica.Events(a.GetIndex()-1, 1)
			if err != nil || len(evs) != 1 || evs[0].GetIssuer() != who.issuer.id.String() {
				t.Errorf("%d: the event is %v, want issuer %s (%v)", i, evs, who.issuer.name, err)
			}
			if at := time.Unix(0, evs[0].GetTime()); time.Since(at) > time.Minute {
				t.Errorf("%d: the event's time is %s: the caller's", i, at)
			}
		}
		for _, from := range []*node{agent, idle} {
			if a, err := ask(leader, from, true, token(9)); connect.CodeOf(err) != connect.CodeFailedPrecondition {
				t.Errorf("%s hands on a command of another: %v %v", from.name, a, err)
			}
		}
		if a := c.propose(leader, token(10)); true {
			if evs, _, _, err := leader.replica.Events(a.GetIndex()-1, 1); err != nil ||
				evs[0].GetIssuer() != leader.id.String() {
				t.Errorf("the leader's own command: %v, %v", evs, err)
			}
		}
	})
}

// Answers to requests that were sent before the proof began prove nothing. So a deposed leader refuses nothing because
// of such answers: the token may exist by now.
func TestDeposedLeaderRefusesNothingByOldAnswers(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		var asked, refused atomic.Int64
		for i := range 16 {
			old := c.leader()
			c.net.delay(ids(c.others(old)...), ids(old), 1500*time.Millisecond)
			time.Sleep(time.Duration(60*i) * time.Millisecond) // virtual
			if !old.raft.IsLeader() {
				c.net.heal()
				c.agree()
				continue
			}
			c.net.cutWay(ids(old), ids(c.others(old)...))
			var all sync.WaitGroup
			for range 300 { // three seconds: an election, and all answers that were on their way
				time.Sleep(10 * time.Millisecond)
				if !slices.ContainsFunc(c.others(old), func(o *node) bool { return o.raft.IsLeader() }) || !old.raft.IsLeader() {
					continue
				}
				all.Go(func() {
					asked.Add(1)
					if _, err := old.raft.Propose(within(t, time.Second), revokeToken(1)); events.CodeOf(err) == events.NotFound {
						refused.Add(1)
					}
				})
			}
			all.Wait()
			c.net.heal()
			c.agree()
		}
		t.Logf("%d commands were proposed to leaders that were deposed", asked.Load())
		if asked.Load() == 0 {
			t.Error("no deposed leader was asked: the test proves nothing")
		}
		if refused.Load() > 0 {
			t.Errorf("a deposed leader refused %d commands", refused.Load())
		}
	})
}
