package consensus

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// strayed gives a node that is down events that the servers do not have, as after a recovery from one that knew less.
func (n *node) strayed(events int) (at uint64) {
	n.c.t.Helper()
	r, err := OpenReplica(n.dir, n.c.log)
	if err != nil {
		n.c.t.Fatal(err)
	}
	state := r.State()
	b := &skeinv1.Batch{Base: state.Index()}
	for i := range events {
		b.Events = append(b.Events, &skeinv1.Event{Index: state.Index() + 1 + uint64(i), Time: state.Time(), Schema: 1, Body: &skeinv1.Event_TokenCreated{
			TokenCreated: &skeinv1.TokenCreated{Token: &skeinv1.Token{Id: tokenID(900 + i), SecretHash: make([]byte, 32), ExpiresAt: state.Time(), Uses: 1, UsesLeft: 1}}}})
	}
	must(n.c.t, r.Apply(b))
	must(n.c.t, r.Close())
	return state.Index() + uint64(events)
}

// An agent heard of events that were lost with the servers. Whether the recovered server is behind it, level, or has passed it by
// when the agent comes back, it gets nothing of the other history on top of its own, and says so.
func TestHistoriesAreNotMixed(t *testing.T) {
	for _, lost := range []int{1, 2, 7} {
		for _, when := range []string{"before", "after"} {
			simulate(t, func(t *testing.T, c *cluster) {
				c.form(1)
				s, agent := c.nodes[0], c.add("agent", false)
				c.join(agent)
				c.agree()
				agent.close()
				at := agent.strayed(lost)
				told := make(chan error, 1000)
				if when == "before" {
					agent.startTelling(told)
				}
				for i := range 6 { // two events each
					c.propose(s, token(i))
					time.Sleep(time.Second) // virtual
				}
				if when == "after" {
					agent.startTelling(told)
				}
				c.eventually("the agent says that the histories differ", func() error {
					if err := agent.client.Status().Err; !errors.Is(err, ErrDiverged) {
						return fmt.Errorf("its status is %v", err)
					}
					return nil
				})
				time.Sleep(time.Minute) // virtual
				if index := agent.replica.State().Index(); index != at {
					t.Errorf("%d lost, %s: the agent went from %d to %d", lost, when, at, index)
				}
				if err := <-told; !errors.Is(err, ErrDiverged) {
					t.Errorf("%d lost, %s: it was told %v", lost, when, err)
				}
			})
		}
	}
}

// startTelling starts the node with a client that tells what becomes of its history.
func (n *node) startTelling(told chan<- error) {
	n.c.t.Helper()
	n.diverged = func(err error) {
		if err != nil {
			select {
			case told <- err:
			default:
			}
		}
	}
	n.start(false)
}

// A follower is served if its state at its index has the server's hash, or if nobody can tell, and then by a whole state; an
// earlier version, which sends no hash, as before.
func TestFollowersSendTheirHash(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s, agent := c.nodes[0], c.add("agent", false)
		c.join(agent)
		for i := range 20 {
			c.propose(s, token(i))
		}
		c.agree()
		agent.close()
		middle, err := s.replica.At(s.replica.State().Index() - 7) // between two batches
		must(t, err)
		hash := middle.Hash()
		for name, q := range map[string]struct {
			after uint64
			hash  []byte
			code  connect.Code
		}{
			"nothing yet":          {0, make([]byte, 32), 0},
			"the same":             {middle.Index(), hash[:], 0},
			"another":              {middle.Index(), make([]byte, 32), connect.CodeAborted},
			"the same, one before": {middle.Index() - 1, hash[:], connect.CodeAborted},
			"an earlier version":   {middle.Index(), nil, 0},
		} {
			conns := NewConns(dialer{c.net, agent.id})
			stream, err := conns.Cluster(s.id).Subscribe(within(t, 10*time.Second), &skeinv1.SubscribeRequest{After: q.after, Hash: q.hash})
			must(t, err)
			got := uint64(0)
			for got == 0 && stream.Receive() {
				if m := stream.Msg(); m.GetBatch() != nil {
					got = m.GetBatch().GetBase() + 1
				}
			}
			if err := stream.Err(); got == 0 && (err == nil || q.code == 0 || connect.CodeOf(err) != q.code) || got != 0 && q.code != 0 {
				t.Errorf("%s: events from %d, %v", name, got, err)
			}
			stream.Close()
			conns.Close()
		}
		if err := s.replica.SameHistory(s.replica.State().Index()+100, hash[:]); !errors.Is(err, ErrGone) {
			t.Errorf("an index of the future: %v", err)
		}
	})
}

func TestPastIsBounded(t *testing.T) {
	var p past
	for i := range uint64(3 * maxPast) {
		p.note(i, [32]byte{byte(i)})
		p.note(i, [32]byte{1, 2, 3}) // the first stands
	}
	if len(p.hashes) != maxPast || len(p.order) != maxPast {
		t.Errorf("%d hashes, %d indexes", len(p.hashes), len(p.order))
	}
	if h, ok := p.at(3*maxPast - 1); !ok || h != [32]byte{byte((3*maxPast - 1) & 255)} {
		t.Error("the newest is not there")
	}
	if p.forget(); len(p.hashes) != 0 {
		t.Error("it forgets nothing")
	}
}
