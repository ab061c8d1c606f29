package consensus

import (
	"cmp"
	"encoding/json"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// gather takes what is new in the log from whoever has it. A node that was away too long goes on from a snapshot and
// has lost what was before it.
func (s *allocStorm) gather() {
	for _, n := range s.c.nodes {
		if !n.running() {
			continue
		}
		evs, first, _, err := n.replica.Events(uint64(len(s.log)), 1<<20)
		if err != nil {
			s.t.Fatal(err)
		}
		if first <= uint64(len(s.log))+1 {
			s.log = append(s.log, evs...)
		}
	}
}

// collect holds what all nodes have against the log.
func (s *allocStorm) collect() {
	s.gather()
	s.last = s.c.nodes[0].replica.State()
	if s.last.Index() != uint64(len(s.log)) {
		s.t.Fatalf("the log that was gathered has %d events of %d", len(s.log), s.last.Index())
	}
	for _, n := range s.c.nodes {
		s.compare(n)
	}
}

// compare holds a node's archive and states against the log.
func (s *allocStorm) compare(n *node) {
	evs, first, last, err := n.replica.Events(0, 1<<20)
	if err != nil {
		s.t.Fatal(err)
	}
	for i, e := range evs {
		if !proto.Equal(e, s.log[first-1+uint64(i)]) {
			s.t.Errorf("%s: event %d is another than elsewhere", n.name, e.GetIndex())
			break
		}
	}
	first = min(first, last) // behind a snapshot of the newest state no event is kept yet
	for _, at := range []uint64{first, (first + last) / 2, last} {
		state, err := n.replica.At(at)
		if err != nil {
			s.t.Errorf("%s at %d: %v", n.name, at, err)
		} else if again := replay(s.t, events.NewState(), s.log[:at]); again.Hash() != state.Hash() {
			s.t.Errorf("%s at %d differs from a replay:\n%v", n.name, at, events.Diff(again, state))
		}
	}
}

func replay(t testing.TB, s *events.State, log []*skeinv1.Event) *events.State {
	t.Helper()
	for _, e := range log {
		if err := s.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *allocStorm) check() {
	r := &historyReport{Seed: s.seed, Events: len(s.log), Faults: s.faults, Virtual: s.virtual.Seconds()}
	decided := make(map[string]int64)
	book := newLedger()
	for _, e := range s.log {
		decided[e.GetRequestId()] = e.GetTime()
		book.read(e)
	}
	for _, f := range append(book.faults, book.compare(s.last)...) {
		s.t.Error("audit of the log: " + f)
	}
	for _, at := range []int{len(s.log) / 3, len(s.log) * 2 / 3} {
		b, err := proto.Marshal(replay(s.t, events.NewState(), s.log[:at]).Proto())
		p := &skeinv1.State{}
		if err == nil {
			err = proto.Unmarshal(b, p)
		}
		snapshot, err2 := events.FromProto(p)
		if err = errors.Join(err, err2); err != nil {
			s.t.Fatal(err)
		}
		if again := replay(s.t, snapshot, s.log[at:]); again.Hash() != s.last.Hash() {
			s.t.Errorf("a snapshot at %d with its tail leads to another state:\n%v", at, events.Diff(s.last, again))
		}
	}
	histories, err := s.histories(decided)
	if err != nil {
		s.t.Error(err)
	}
	for _, q := range s.requests {
		r.Sent += len(q.sent)
		if answered, _, _ := q.outcome(); len(answered) > 0 && q.ask.do != look {
			s.acknowledged(q, answered[0].answer)
		}
	}
	checkHistories(s.t, s.models(), histories, r)
	if r.Operations < 300 || r.Unknown == 0 || r.Refused == 0 {
		s.t.Errorf("%d operations, %d unknown, %d refused: the run says nothing", r.Operations, r.Unknown, r.Refused)
	}
	line, _ := json.Marshal(r)
	s.t.Logf("history: %s", line)
}

// acknowledged checks that what a client was told is in the log, where it was told, and says what it was told.
func (s *allocStorm) acknowledged(q *request, a *skeinv1.Answer) {
	if at := a.GetIndex(); at == 0 || at > uint64(len(s.log)) || s.log[at-1].GetRequestId() != q.id {
		s.t.Errorf("request %s (%s) was answered with index %d of %d, which is not its own", q.id,
			describe(q.ask, got{}), at, len(s.log))
	}
	for _, b := range a.GetBlocks() {
		v4, v6 := blockPrefixes(s.last.Pool(b.GetPool()), b.GetNumber())
		owner := s.owners[q.ask.node]
		by := s.log[b.GetIndex()-1] // what became of the block by the time of a retry is another matter
		given := cmp.Or(by.GetBlockAllocated().GetBlock(), by.GetBlockReserved().GetBlock())
		if b.GetIpv4() != v4 || b.GetIpv6() != v6 || b.GetPool() != q.objects[0] || given.GetNumber() != b.GetNumber() ||
			given.GetNodeId() != owner ||
			b.GetNodeId() != owner && b.GetNodeId() != "" {
			s.t.Errorf("request %s (%s) got block %v, and %d is %s %s", q.id, describe(q.ask, got{}), b, b.GetNumber(), v4, v6)
		}
	}
	if q.ask.do == grant && int(a.GetGrant().GetAddresses()) != q.ask.amount {
		s.t.Errorf("request %s (%s) was granted %v", q.id, describe(q.ask, got{}), a.GetGrant())
	}
}
