package consensus

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// strayed gives a node that is down events that the servers do not have, as after a recovery from an older state.
func (n *node) strayed(events int) (at uint64) {
	n.c.t.Helper()
	r, err := OpenReplica(n.dir, n.c.log)
	if err != nil {
		n.c.t.Fatal(err)
	}
	state := r.State()
	b := &skeinv1.Batch{Base: state.Index()}
	for i := range events {
		b.Events = append(b.Events, &skeinv1.Event{Index: state.Index() + 1 + uint64(i), Time: state.Time(), Schema: 1,
			Body: &skeinv1.Event_TokenCreated{
				TokenCreated: &skeinv1.TokenCreated{Token: &skeinv1.Token{Id: tokenID(900 + i), SecretHash: make([]byte, 32),
					ExpiresAt: state.Time(), Uses: 1, UsesLeft: 1}}}})
	}
	must(n.c.t, r.Apply(b))
	must(n.c.t, r.Close())
	return state.Index() + uint64(events)
}

// An agent has events that were lost with the servers. Whether the recovered server is behind the agent, level with it,
// or ahead when the agent comes back: the agent gets no event of the other history on top of its own, and reports it.
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

// startTelling starts the node with a client that reports whether its history differs.
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

// A follower is served if its state at its index has the server's hash. If the server does not know the hash there, the
// follower gets a whole state. An earlier version, which sends no hash, is served as before.
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
			stream, err := conns.Cluster(s.id).Subscribe(within(t, 10*time.Second),
				&skeinv1.SubscribeRequest{After: q.after, Hash: q.hash})
			must(t, err)
			got := uint64(0)
			for got == 0 && stream.Receive() {
				if m := stream.Msg(); m.GetBatch() != nil {
					got = m.GetBatch().GetBase() + 1
				}
			}
			if err := stream.Err(); got == 0 && (err == nil || q.code == 0 || connect.CodeOf(err) != q.code) ||
				got != 0 && q.code != 0 {
				t.Errorf("%s: events from %d, %v", name, got, err)
			}
			stream.Close()
			conns.Close()
		}
		if err := s.replica.SameHistory(s.id, s.replica.State().Index()+100, hash[:]); !errors.Is(err, ErrGone) {
			t.Errorf("an index of the future: %v", err)
		}
	})
}

func TestPastIsBounded(t *testing.T) {
	var p past
	for i := range uint64(3 * maxPast) {
		p.note(i, [32]byte{byte(i)})
		p.note(i, [32]byte{1, 2, 3}) // the first one noted stays
	}
	const newest, oldest = 3*maxPast - 1, 2 * maxPast
	for i := range uint64(3 * maxLooked) { // requested hashes displace only each other
		p.noteLooked(i, [32]byte{byte(i), 1})
	}
	if n, l := p.newest, p.looked; len(n.at) != maxPast || len(n.order) != maxPast || len(l.at) != maxLooked ||
		len(l.order) != maxLooked {
		t.Errorf("%d hashes, %d indexes; %d that were looked up, %d indexes", len(n.at), len(n.order), len(l.at),
			len(l.order))
	}
	for index, want := range map[uint64][32]byte{newest: {byte(newest & 255)}, oldest: {byte(oldest & 255)},
		3*maxLooked - 1: {byte((3*maxLooked - 1) & 255), 1}} {
		if h, ok := p.at(index); !ok || h != want {
			t.Errorf("index %d: %x, %v; want %x", index, h[:2], ok, want[:2])
		}
	}
	p.forget()
	for _, index := range []uint64{newest, 3*maxLooked - 1} {
		if _, ok := p.at(index); ok {
			t.Errorf("index %d is not forgotten", index)
		}
	}
}

// The archive is read for a member once at a time, and then not for lookEvery. Other members are not affected, nor is
// the same member where the hash is in memory.
func TestTheArchiveIsReadSeldomForEachMember(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s := c.nodes[0]
		for i := range 30 {
			c.propose(s, token(i))
		}
		hashAt := func(index uint64) []byte {
			state, err := s.replica.At(index)
			must(t, err)
			h := state.Hash()
			return h[:]
		}
		hostile, honest := identity.ID{1}, identity.ID{2}
		newest := s.replica.State().Index()
		s.replica.past.forget()
		s.replica.past.note(newest, [32]byte(hashAt(newest)))
		ask := func(who identity.ID, index uint64, want error) {
			t.Helper()
			if err := s.replica.SameHistory(who, index, hashAt(index)); !errors.Is(err, want) {
				t.Errorf("node %s at index %d of %d: %v, want %v", who, index, newest, err, want)
			}
		}
		ask(hostile, 9, nil)
		for index := uint64(10); index < 30; index++ {
			ask(hostile, index, ErrTooSoon)
		}
		ask(hostile, 9, nil) // it is in memory now
		ask(hostile, newest, nil)
		ask(honest, 20, nil)
		time.Sleep(lookEvery - time.Millisecond) // virtual
		ask(hostile, 21, ErrTooSoon)
		time.Sleep(time.Millisecond) // virtual
		ask(hostile, 21, nil)
		if n := len(s.replica.past.looked.at); n != 3 {
			t.Errorf("the archive was read %d times, want 3", n)
		}
		done, ok := s.replica.past.look(honest)
		if !ok {
			t.Fatal("an honest member is told to wait")
		}
		time.Sleep(time.Hour) // virtual; many others come before it
		if _, ok := s.replica.past.look(honest); ok {
			t.Error("the archive is read twice for one member")
		}
		done()
		time.Sleep(lookEvery) // virtual
		ask(hostile, 22, nil)
		if n := len(s.replica.past.looks); n != 1 {
			t.Errorf("%d members are remembered, and one has asked of late", n)
		}
	})
}

// A follower that asks again at another index too soon is not refused: its stream begins, and brings the events as soon
// as its hash can be compared.
func TestAFollowerWaitsForItsComparison(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(1)
		s, agent := c.nodes[0], c.add("agent", false)
		c.join(agent)
		for i := range 30 {
			c.propose(s, token(i))
		}
		c.agree()
		agent.close()
		s.replica.past.forget()
		began := time.Now()
		for _, index := range []uint64{9, 10} {
			state, err := s.replica.At(index)
			must(t, err)
			hash := state.Hash()
			conns := NewConns(dialer{c.net, agent.id})
			stream, err := conns.Cluster(s.id).Subscribe(within(t, 10*time.Second),
				&skeinv1.SubscribeRequest{After: index, Hash: hash[:]})
			must(t, err)
			first := time.Duration(-1)
			for stream.Receive() {
				if first < 0 {
					first = time.Since(began)
				}
				if b := stream.Msg().GetBatch(); b != nil {
					if b.GetBase() != index {
						t.Errorf("the events after %d begin after %d", index, b.GetBase())
					}
					break
				}
			}
			if stream.Err() != nil || first > time.Second {
				t.Errorf("after index %d the first message comes in %s, %v", index, first, stream.Err())
			}
			stream.Close()
			conns.Close()
		}
		if took := time.Since(began); took < lookEvery || took > lookEvery+2*heartbeatEvery {
			t.Errorf("the second comparison took %s", took)
		}
	})
}
