package events

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// clockGood is how near the log's time is to the leader's clock when there is nothing to repair.
const clockGood = time.Second

// repairClock sets the log's time to the command's, which is the leader's clock here and nothing else. With nothing to
// repair the time stays or goes forward: no event but ClockRepaired may be earlier than the one before it.
func (d *decision) repairClock() error {
	off := time.Duration(d.s.Time() - d.c.GetTime())
	switch {
	case off.Abs() > clockGood:
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_ClockRepaired{ClockRepaired: &skeinv1.ClockRepaired{Before: d.s.Time()}}})
	case off > 0:
		d.c = proto.CloneOf(d.c)
		d.c.Time = d.s.Time()
	}
	return nil
}

// capTimes makes every stored time beyond now the present: what was done while the log's time was ahead. A token keeps
// its lifetime, and a freed block begins to rest anew. Remembered answers tell of the past and stay. The state is
// rebuilt, which costs as much as reading a snapshot; nobody repairs a clock often.
func (s *State) capTimes(now int64) {
	p := s.Proto()
	answers := p.Answers
	p.Answers = nil
	p = proto.CloneOf(p)
	for _, t := range p.GetTokens() {
		if ahead := t.GetCreatedAt() - now; ahead > 0 {
			t.ExpiresAt -= ahead
		}
	}
	tokens := p.Tokens
	for _, t := range tokens {
		t.CreatedAt = min(t.GetCreatedAt(), now)
	}
	ends := make([]int64, len(p.GetPlainPeers()))
	for i, v := range p.GetPlainPeers() { // they keep their lifetimes as tokens do
		ends[i] = v.GetExpiresAt()
		if ahead := v.GetCreatedAt() - now; ahead > 0 && ends[i] != 0 {
			ends[i] -= ahead
		}
	}
	p.Tokens = nil // their ends lie beyond now and stay
	capAll(p.ProtoReflect(), now)
	for i, v := range p.GetPlainPeers() {
		v.ExpiresAt = ends[i]
	}
	p.Tokens, p.Answers = tokens, answers
	if rebuilt, err := FromProto(p); err == nil { // it always can: only times differ
		s.content = rebuilt.content
		s.owner.Store(nil)
	}
}

// capAll caps the times of a message and of those in it. Every int64 of a state is a time.
func capAll(m protoreflect.Message, now int64) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				capAll(v.List().Get(i).Message(), now)
			}
		case f.IsList():
		case f.Message() != nil:
			capAll(v.Message(), now)
		case f.Kind() == protoreflect.Int64Kind && v.Int() > now:
			m.Set(f, protoreflect.ValueOfInt64(now))
		}
		return true
	})
}
