package events

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func repairClock() *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RepairClock{RepairClock: &skeinv1.RepairClock{}}}
}

// clockHistory is a cluster whose log ran years ahead and was set back.
func clockHistory(t *testing.T) *world {
	w := newWorld(t)
	w.must(today(createCluster("10.4.0.0/16", "a")))
	w.must(createToken("1", 10, false))
	p := pool("p", 2, "10.64.0.0/28")
	p.CooldownSeconds = 30
	w.must(createPool(p))
	w.must(allocate("a", "p", 1))
	w.now = w.now.Add(20 * 365 * 24 * time.Hour)
	w.must(createToken("2", 10, false))
	w.must(admit("b", "2", func(a *skeinv1.AdmitNode) { a.Node.MaxSchema, a.Node.Server = SchemaMax, true }))
	w.must(admit("c", "2"))
	w.must(release("a", "p", 0))
	w.must(revoke(id("c")))
	w.now = start.Add(time.Hour)
	w.must(withID("r", repairClock()))
	return w
}

// After a repair the log's time is the leader's, nothing that is stored lies beyond it, and what expires does.
func TestRepairedClock(t *testing.T) {
	w := clockHistory(t)
	if now := time.Unix(0, w.s.Time()).UTC(); !now.Equal(w.now) {
		t.Fatalf("the log's time is %s, want %s", now, w.now)
	}
	p := w.s.Proto()
	created, ended := w.s.Token(tokenID("1")), w.s.Token(tokenID("2"))
	if at := time.Unix(0, created.GetExpiresAt()).UTC(); !at.Before(start.Add(2 * time.Hour)) {
		t.Errorf("a token of before the jump expires at %s", at)
	}
	if at := time.Unix(0, ended.GetExpiresAt()).UTC(); !at.Equal(w.now.Add(time.Hour)) {
		t.Errorf("a token for an hour, of the years ahead, expires at %s, now is %s", at, w.now)
	}
	p.Answers, p.Tokens = nil, nil
	walkTimes(p.ProtoReflect(), func(name protoreflect.Name, at int64) {
		if at > w.s.Time() {
			t.Errorf("%s is %s: beyond the log's time", name, time.Unix(0, at).UTC())
		}
	})
	checkInvariants(t, w.s)
	checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	w.now = w.now.Add(31 * time.Second)
	if a := w.must(allocate("a", "p", 4)); len(a.GetBlocks()) != 4 {
		t.Errorf("31 s after the repair %d blocks of 4 are there: one still rests", len(a.GetBlocks()))
	}
	w.now = w.now.Add(time.Hour)
	w.refused(admit("d", "2"), PermissionDenied, "expired at")
	evs, _, err := w.propose(repairClock())
	if err != nil || len(evs) != 1 { // the world's clock has gone on since the last event
		t.Errorf("a repair gives %v, %v", briefs(evs), err)
	}
	c := withID("again", repairClock())
	w.now = w.now.Add(-time.Second)
	if evs, _, err := w.propose(c); err != nil || len(evs) != 1 || evs[0].GetCommandAnswered() == nil {
		t.Errorf("a repair of a clock that is right gives %v, %v", briefs(evs), err)
	}
	before := w.s.Time()
	w.now = w.now.Add(-1500 * time.Millisecond)
	evs, _, err = w.propose(withID("half a second behind", repairClock()))
	if err != nil || len(evs) != 1 || evs[0].GetTime() < before {
		t.Errorf("a repair by a clock that is behind by less than needs one gives %v, %v: the log's time went back by %s",
			briefs(evs), err, time.Duration(before-w.s.Time()))
	}
}

// A repair changes times and nothing else: the state of before is the one after, but for them.
func TestRepairKeepsEverythingElse(t *testing.T) {
	for name, w := range map[string]*world{"": history(t), "pools": poolHistory(t), "egresses": egressHistory(t)} {
		s := w.s.Clone()
		now := start.UnixNano()
		e := &skeinv1.Event{Index: s.Index() + 1, Time: now, Schema: 4,
			Body: &skeinv1.Event_ClockRepaired{ClockRepaired: &skeinv1.ClockRepaired{Before: s.Time()}}}
		if err := s.Fold(e); err != nil {
			t.Fatal(err)
		}
		before, after := proto.CloneOf(w.s.Proto()), proto.CloneOf(s.Proto())
		before.Index, after.Index = 0, 0
		before.Answers, after.Answers = nil, nil
		clearTimes(before.ProtoReflect())
		clearTimes(after.ProtoReflect())
		if !proto.Equal(before, after) {
			t.Errorf("%s: the repair changed more than times", name)
		}
		checkSame(t, name, s, throughBytes(t, s))
	}
}

// capAll takes every int64 of a state for a time: a field that is none needs another type or a case there.
func TestEveryInt64OfAStateIsATime(t *testing.T) {
	seen := map[protoreflect.FullName]bool{}
	var walk func(protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			name := string(f.Name())
			if f.Kind() == protoreflect.Int64Kind && name != "time" && name != "since" && name != "at" &&
				!strings.HasSuffix(name, "_at") && !strings.HasSuffix(name, "_since") {
				t.Errorf("%s is no time by its name", f.FullName())
			}
			if f.Message() != nil && !f.IsMap() {
				walk(f.Message())
			}
		}
	}
	walk((&skeinv1.State{}).ProtoReflect().Descriptor())
}

func walkTimes(m protoreflect.Message, see func(protoreflect.Name, int64)) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				walkTimes(v.List().Get(i).Message(), see)
			}
		case f.Message() != nil:
			walkTimes(v.Message(), see)
		case f.Kind() == protoreflect.Int64Kind:
			see(f.Name(), v.Int())
		}
		return true
	})
}

func clearTimes(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				clearTimes(v.List().Get(i).Message())
			}
		case f.Message() != nil:
			clearTimes(v.Message())
		case f.Kind() == protoreflect.Int64Kind:
			m.Clear(f)
		}
		return true
	})
}
