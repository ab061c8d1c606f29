package agent

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

// nowhere is a control net that reaches nobody.
type nowhere struct{ closed chan struct{} }

var errNowhere = errors.New("nobody is there")

func (nowhere) SendPacket(identity.ID, []byte) error { return errNowhere }
func (nowhere) Dial(context.Context, identity.ID, string) (net.Conn, error) {
	return nil, errNowhere
}
func (n nowhere) Accept() (net.Conn, error) { <-n.closed; return nil, net.ErrClosed }
func (n nowhere) Close() error              { close(n.closed); return nil }
func (nowhere) Addr() net.Addr              { return &net.TCPAddr{} }

func TestRecordIsPublished(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h)
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.replica = replica
		defer a.withGossip(t, h.key, w.state)()
		published := func() *skeinv1.Record { return a.gossip.Records()[a.id].Record }
		seq := func() uint64 { return published().GetSeq() }

		a.publish()
		first := published()
		if first.GetVersion() != a.opts.Version || len(first.GetWireguardKey()) != 32 || len(first.GetStateHash()) != 0 {
			t.Errorf("the first record is %v", first)
		}
		for range 50 { // an agent that idles says nothing
			time.Sleep(100 * time.Millisecond)
			a.publish()
		}
		quietSeq := seq()
		if quietSeq > first.GetSeq()+1 || published().GetAppliedIndex() != w.state.Index() ||
			len(published().GetStateHash()) != 16 {
			t.Errorf("after five quiet seconds the record is number %d, was %d: %v", quietSeq, first.GetSeq(), published())
		}

		// What paths depend on goes out at once.
		a.netcheck.Store(&candidate.Result{NATReport: candidate.NATReport{NAT: skeinv1.NatType_NAT_TYPE_SYMMETRIC}})
		a.publish()
		if seq() != quietSeq+1 || published().GetNatType() != skeinv1.NatType_NAT_TYPE_SYMMETRIC {
			t.Errorf("a new NAT type is not published at once: %v", published())
		}

		// A busy log is not: its index waits until it rests.
		before := seq()
		for i := range 30 {
			if i == 0 {
				w.must(w.admission(other))
			} else {
				w.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
					Id: testTokenID[:14] + string(rune('a'+i/16)) + "0123456789abcdef"[i%16:][:1], SecretHash: testSecret,
					LifetimeNanos: int64(time.Hour), Uses: 1,
				}}})
			}
			a.loop.state = w.state
			a.publish()
			time.Sleep(100 * time.Millisecond)
		}
		if seq() != before || published().GetAppliedIndex() == w.state.Index() {
			t.Errorf("thirty events made %d records", seq()-before)
		}
		time.Sleep(5 * time.Second) // so long that the index rests
		a.publish()
		if seq() != before+1 || published().GetAppliedIndex() != w.state.Index() {
			t.Errorf("the index at rest is %d, the record says %d", w.state.Index(), published().GetAppliedIndex())
		}
	})
}

func TestCheckHash(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h, other)
	a := newTestAgent(h, w.state)
	a.loop.state = w.state
	index, id := w.state.Index(), other.key.ID()
	good := a.loop.own.HashAt(w.state)
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: good})
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index + 100, StateHash: []byte("of the future...")})
	if l := a.problems.list(); len(l) != 0 {
		t.Errorf("equal states are a problem: %v", l)
	}
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: []byte("another history.")})
	l := a.problems.list()
	if len(l) != 1 || l[0].GetSubject() != "state of b" || l[0].GetSeverity() != failure || l[0].GetAdvice() == "" {
		t.Errorf("a different state is told as %v", l)
	}
	a.checkHash(id, &skeinv1.Record{AppliedIndex: index, StateHash: good})
	if l := a.problems.list(); len(l) != 0 {
		t.Errorf("it stays a problem: %v", l)
	}
}
