package egress

import (
	"context"
	"errors"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
)

// A small Raft for the simulation: terms, votes, a log, proof of leadership. The world's lock guards all of it.
// Messages use the world's network, and those for a paused server wait in its socket.

const (
	simElection  = 600 * time.Millisecond
	simHeartbeat = 60 * time.Millisecond
)

type entry struct {
	term    uint64
	request string
	command *skeinv1.Command // nil: the term begins
}

type server struct {
	*process
	n      int
	term   uint64
	voted  int
	leads  bool
	log    []entry // never written to, only replaced or appended to by its leader
	commit int
	heard  time.Time // from a leader
	rests  time.Time // stands not before

	seq     uint64
	acked   map[int]uint64 // newest request of this term that the peer answered
	ackedAt map[int]time.Time
	match   map[int]int

	applied        int
	view           View
	answers        map[string]uint64 // request: index; 0: refused
	changed        chan struct{}     // closed at any change
	slotController *SlotController
	end            context.CancelFunc // of the term
}

func (s *server) note() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// follow makes it a follower of a term. Locked.
func (s *server) follow(term uint64) {
	if term > s.term {
		s.term, s.voted = term, -1
	}
	if s.leads {
		s.leads, s.slotController = false, nil
		s.end()
	}
	s.note()
}

func (s *server) run(ctx context.Context) {
	w := s.w
	turn := time.Duration(s.n) * 150 * time.Millisecond
	for ctx.Err() == nil {
		time.Sleep(simHeartbeat / 3)
		s.gate()
		w.mu.Lock()
		now := time.Now()
		switch {
		case s.leads:
			if now.Sub(s.majorityAt()) > simElection {
				s.follow(s.term)
			} else {
				s.replicate()
			}
		case now.Sub(s.heard) > simElection+turn && now.After(s.rests):
			s.stand()
		}
		w.mu.Unlock()
	}
}

func (s *server) majorityAt() time.Time {
	at := []time.Time{time.Now()}
	for _, o := range s.w.servers {
		if o != s {
			at = append(at, s.ackedAt[o.n])
		}
	}
	slices.SortFunc(at, time.Time.Compare)
	return at[len(at)/2]
}

// replicate sends the log to all. Locked.
func (s *server) replicate() uint64 {
	s.seq++
	seq, term, log, commit := s.seq, s.term, s.log, s.commit
	for _, o := range s.w.servers {
		if o != s {
			s.w.send(s.process, o.process, func() { o.append(s, term, seq, log, commit) })
		}
	}
	return seq
}

func (s *server) append(from *server, term, seq uint64, log []entry, commit int) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	now := s.term
	if term >= s.term {
		if term > s.term || s.leads {
			s.follow(term)
		}
		now, s.heard = term, time.Now()
		if n := len(s.log); n < len(log) || n == 0 || s.log[n-1].term != term {
			s.log = log
		}
		s.commit = max(s.commit, min(commit, len(s.log)))
		s.apply()
	}
	matched := len(log)
	s.w.send(s.process, from.process, func() { from.answer(s.n, term, now, seq, matched) })
}

func (s *server) answer(peer int, asked, term, seq uint64, matched int) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	switch {
	case term > s.term:
		s.follow(term)
	case s.leads && asked == s.term && term == s.term:
		s.acked[peer] = max(s.acked[peer], seq)
		s.match[peer] = max(s.match[peer], matched)
		s.ackedAt[peer] = time.Now()
		all := []int{len(s.log)}
		for _, o := range s.w.servers {
			if o != s {
				all = append(all, s.match[o.n])
			}
		}
		slices.Sort(all)
		if n := all[(len(all)-1)/2]; n > s.commit && s.log[n-1].term == s.term {
			s.commit = n
			s.apply()
		}
		s.note()
	}
}

// stand asks for votes. Locked.
func (s *server) stand() {
	s.follow(s.term + 1)
	s.voted, s.rests = s.n, time.Now().Add(simElection/2+time.Duration(s.w.rand.Int64N(int64(simElection))))
	term, votes, last, length := s.term, 1, s.lastTerm(), len(s.log)
	for _, o := range s.w.servers {
		if o == s {
			continue
		}
		s.w.send(s.process, o.process, func() {
			s.w.mu.Lock()
			defer s.w.mu.Unlock()
			if term < o.term || time.Since(o.heard) < simElection && !o.leads && o.term < term {
				return
			}
			if term > o.term {
				o.follow(term)
			}
			if o.voted != -1 && o.voted != s.n || o.lastTerm() > last || o.lastTerm() == last && len(o.log) > length {
				return
			}
			o.voted, o.rests = s.n, time.Now().Add(simElection)
			s.w.send(o.process, s.process, func() {
				s.w.mu.Lock()
				defer s.w.mu.Unlock()
				if votes++; votes == 2 && s.term == term && !s.leads {
					s.lead()
				}
			})
		})
	}
}

func (s *server) lastTerm() uint64 {
	if len(s.log) == 0 {
		return 0
	}
	return s.log[len(s.log)-1].term
}

// lead begins a term. Locked.
func (s *server) lead() {
	s.leads, s.acked, s.match, s.ackedAt = true, map[int]uint64{}, map[int]int{}, map[int]time.Time{}
	for _, o := range s.w.servers {
		s.ackedAt[o.n] = time.Now()
	}
	s.log = append(slices.Clip(s.log), entry{term: s.term})
	index := len(s.log)
	s.replicate()
	s.w.terms++
	ctx, cancel := context.WithCancel(s.w.ctx)
	s.end = cancel
	lead := &simLead{s: s, term: s.term}
	go func() {
		if !lead.wait(ctx, func() bool { return s.commit >= index }) {
			return
		}
		s.gate()
		since := s.now()
		k := NewSlotController(SlotControllerConfig{Lead: lead, Since: since, View: s.viewNow, Wait: s.waitView, Now: s.now,
			Log:  s.w.log,
			Site: func(n *skeinv1.Node) string { return n.GetLabels()["site"] }})
		s.w.mutateController(k)
		s.w.mu.Lock()
		if s.leads && s.term == lead.term {
			s.slotController = k
		}
		s.w.mu.Unlock()
		k.Run(ctx)
	}()
}

func (s *server) viewNow() View {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	return s.view
}

func (s *server) waitView(ctx context.Context, index uint64) error {
	for {
		s.w.mu.Lock()
		changed, at := s.changed, s.view.Index
		s.w.mu.Unlock()
		if at > index {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// apply folds what is committed. Locked.
func (s *server) apply() {
	for ; s.applied < s.commit; s.applied++ {
		e := s.log[s.applied]
		if e.command == nil {
			continue
		}
		if _, again := s.answers[e.request]; !again {
			s.answers[e.request] = s.fold(e.command)
		}
	}
	s.note()
}

// fold changes the view and returns its index; 0: refused.
func (s *server) fold(c *skeinv1.Command) uint64 {
	v := s.view
	v.Index++
	var number int
	var epoch uint64
	next := &skeinv1.EgressSlot{}
	switch b := c.GetBody().(type) {
	case *skeinv1.Command_DrainNode:
		v.Nodes = slices.Clone(v.Nodes)
		for i, n := range v.Nodes {
			if n.Id == b.DrainNode.NodeId {
				v.Nodes[i] = proto.CloneOf(n)
				v.Nodes[i].Draining = b.DrainNode.Draining
			}
		}
		s.view = v
		return v.Index
	case *skeinv1.Command_AssignSlot:
		a := b.AssignSlot
		number, epoch = slices.IndexFunc(v.Slots, func(x *skeinv1.EgressSlot) bool {
			return x.Name == a.Name && x.Number == a.Number
		}), a.Epoch
		next.NodeId, next.Planned, next.Reason = a.NodeId, a.Planned, a.Reason
	case *skeinv1.Command_ReleaseSlot:
		a := b.ReleaseSlot
		number, epoch = slices.IndexFunc(v.Slots, func(x *skeinv1.EgressSlot) bool {
			return x.Name == a.Name && x.Number == a.Number
		}), a.Epoch
		next.Reason = a.Reason
	}
	if number < 0 || v.Slots[number].Epoch != epoch {
		return 0
	}
	old := v.Slots[number]
	next.Namespace, next.Name, next.Number, next.Epoch, next.FromNodeId = old.Namespace, old.Name, old.Number,
		v.Index, old.NodeId
	next.LeaseMillis, next.FormerLeaseMillis = 1200, 1200
	v.Slots = slices.Clone(v.Slots)
	v.Slots[number] = next
	s.view = v
	return v.Index
}

// simLead is a term, for the slot controller.
type simLead struct {
	s    *server
	term uint64
}

// wait waits for a condition while the term lasts.
func (l *simLead) wait(ctx context.Context, f func() bool) bool {
	for {
		l.s.w.mu.Lock()
		changed, ok, over := l.s.changed, f(), !l.s.leads || l.s.term != l.term
		l.s.w.mu.Unlock()
		if over {
			return false
		}
		if ok {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (l *simLead) Verify(ctx context.Context) error {
	s := l.s
	s.stumble()
	if s.w.mutation == "no proof of leadership" {
		return nil
	}
	s.w.mu.Lock()
	if !s.leads || s.term != l.term {
		s.w.mu.Unlock()
		return &consensus.NotLeaderError{}
	}
	began := s.seq
	s.replicate()
	s.w.mu.Unlock()
	if !l.wait(ctx, func() bool {
		for _, seq := range s.acked {
			if seq > began {
				return true
			}
		}
		return false
	}) {
		return &consensus.NotLeaderError{}
	}
	s.stumble()
	return nil
}

func (l *simLead) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	s := l.s
	s.stumble()
	s.w.mu.Lock()
	if !s.leads || s.term != l.term {
		s.w.mu.Unlock()
		return nil, &consensus.NotLeaderError{}
	}
	s.log = append(slices.Clip(s.log), entry{s.term, c.RequestId, c})
	s.replicate()
	s.w.mu.Unlock()
	var index uint64
	if !l.wait(ctx, func() bool { var ok bool; index, ok = s.answers[c.RequestId]; return ok }) {
		return nil, errors.Join(consensus.ErrUncertain, ctx.Err())
	}
	s.stumble()
	if index == 0 {
		return nil, &events.Error{Code: events.FailedPrecondition, Message: "the slot is in another epoch"}
	}
	return &skeinv1.Answer{Index: index}, nil
}
