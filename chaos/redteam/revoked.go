package redteam

import (
	"context"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func revoked() []Attempt {
	at := func(name, alpn string) Attempt {
		return Attempt{Name: name, From: Revoked, Guard: Roster, Judge: given,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				c, err := f.exile.front(ctx, relayNode, alpn)
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				defer c.Close()
				_, _ = c.Write(frame(frameConnect, idBytes(f.id(victim))))
				seen.hear(c, alpn)
				return seen, nil
			}}
	}
	stream := func(name, alpn string) Attempt {
		return Attempt{Name: name, From: Revoked, Guard: Roster, Judge: given,
			Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
				p := f.person(f.exile.key, f.exile.wg, f.mallory.ns, true) // even where the tunnel is
				c, err := p.Dial(ctx, f.id(relayNode), alpn)
				if err != nil {
					return Seen{Refusal: err.Error()}, nil
				}
				defer c.Close()
				_, _ = c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"))
				seen.hear(c, alpn)
				return seen, nil
			}}
	}
	return []Attempt{
		at("open a session with the relay", identity.ALPNRelay),
		at("have the relay join a stream to a member", identity.ALPNSplice),
		stream("open a control stream for RPC", identity.ALPNRPC),
		stream("open a control stream for Raft", identity.ALPNRaft),
		stream("open a control stream for gossip", identity.ALPNGossip),
		{Name: "ask for the log at the port for joiners", From: Revoked, Guard: Roster, Judge: admitted,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				r, err := f.exile.request(&skeinv1.JoinToken{ClusterId: f.members.GetCluster().GetId()}, "exile")
				if err != nil {
					return Seen{}, err
				}
				r.MemberIndex = 1
				return f.joinAs(ctx, f.exile, r)
			}},
		{Name: "join again with a new token and the old identity", From: Revoked, Guard: Tokens, Judge: admitted,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				token, err := f.token(ctx, 1)
				if err != nil {
					return Seen{}, err
				}
				r, err := f.exile.request(token, "exile-again")
				if err != nil {
					return Seen{}, err
				}
				return f.joinAs(ctx, f.exile, r)
			}},
		{Name: "repeat the request that once admitted it", From: Revoked, Guard: RequestIDs, Judge: admitted,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.joinAs(ctx, f.exile, f.exile.joined)
			}},
		recordFrom("have a member spread its record", func(f *Field) *person { return f.exile }),
		{Name: "be kept in a subscription that was open when it was revoked", From: Revoked, Guard: Roster, Judge: given,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				return f.keepSubscription(ctx, relayNode, "")
			}},
	}
}

// recordFrom has the attacker's other member hand over a record of somebody who is not a member any more.
func recordFrom(name string, who func(*Field) *person) Attempt {
	return Attempt{Name: name, From: Revoked, Guard: Signatures, Judge: given,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			p := who(f)
			s, err := signed(p, &skeinv1.Record{NodeId: p.id(), Epoch: 1 << 41, Seq: 1, Site: forgedSite})
			if err != nil {
				return seen, err
			}
			if seen.Refusal, err = f.puppet.push(ctx, relayNode, s); err != nil {
				return seen, err
			}
			pause.For(ctx, 200*time.Millisecond)
			r, err := f.api(relayNode).Nodes(ctx, &skeinv1.NodesRequest{})
			for _, n := range r.GetNodes() {
				if n.GetRecord().GetNodeId() == p.id() {
					seen.Given = append(seen.Given, "its record is taken")
				}
			}
			return seen, err
		}}
}

// keepSubscription revokes a member that listens to the log at a node, changes something, and looks whether the member
// still hears. With a site, the log has the member in it, and it sits where a tunnel is: a relay would end its stream.
func (f *Field) keepSubscription(ctx context.Context, at, site string) (seen Seen, err error) {
	p, err := f.newcomer(stranger)
	if err != nil {
		return seen, err
	}
	name := "leaver-" + p.id()[:6]
	if err := p.enrol(ctx, name); err != nil {
		return seen, err
	}
	if site != "" {
		p.ns, p.tunnel = f.mallory.ns, true
		if err := f.setNode(ctx, name, &skeinv1.NodeSettings{SiteSet: true, Site: site}, "site"); err != nil {
			return seen, err
		}
	}
	listening, stop := context.WithTimeout(ctx, 2*patience)
	defer stop()
	var s *connect.ServerStreamForClient[skeinv1.SubscribeResponse]
	err = until(ctx, patience, func() (err error) { // the node that the stream goes to hears of a new member in a moment
		if s, err = p.cluster(at).Subscribe(listening,
			&skeinv1.SubscribeRequest{After: f.members.GetIndex()}); err == nil && !s.Receive() {
			err = fmt.Errorf("the subscription does not begin: %w", s.Err())
		}
		return err
	})
	if err != nil {
		return seen, err
	}
	defer s.Close()
	before, err := f.log(ctx)
	if err != nil {
		return seen, err
	}
	if _, err := f.api(relayNode).RevokeNode(ctx,
		&skeinv1.RevokeNodeRequest{Node: p.id(), Reason: "red team"}); err != nil {
		return seen, err
	}
	pause.For(ctx, 1500*time.Millisecond) // each second the server looks at who listens
	state, err := f.log(ctx)
	if err != nil {
		return seen, err
	}
	if _, err := f.api(relayNode).CreateToken(ctx,
		&skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Hour)}); err != nil {
		return seen, err
	}
	for s.Receive() {
		for _, e := range s.Msg().GetBatch().GetEvents() {
			if e.GetIndex() > before.GetIndex() && e.GetGossipKeyRotated() != nil {
				seen.Given = append(seen.Given, "the gossip key that was made when it was revoked")
			}
			if e.GetIndex() > state.GetIndex() {
				seen.Given = append(seen.Given, "events that were decided after its revocation")
			}
		}
	}
	if s.Err() != nil {
		seen.Refusal = s.Err().Error()
	}
	return seen, nil
}
