package sites_test

import (
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// TestAlike changes each field of a record by itself. The listed fields are those that plans read: a change of one
// makes the records unlike. A change of any other leaves them alike, and then the plans of the member, of leaders of
// its site and of a leader elsewhere have to be the same.
func TestAlike(t *testing.T) {
	read := map[protoreflect.Name]bool{"site": true, "leader_wish": true, "forced_endpoint": true, "candidates": true,
		"role": true, "leads": true, "leader_slot": true, "silent_leaders": true}
	const subject = 2
	v := large(2, 6)
	base := v.records[id(subject)]
	for _, leader := range []int{0, 1, 6, 7} {
		v.records[id(leader)].Leads = 1
	}
	fields := base.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		changed := proto.CloneOf(base)
		change(changed.ProtoReflect(), f)
		if proto.Equal(changed, base) {
			t.Fatalf("%s: not changed", f.Name())
		}
		alike := sites.Alike(base, changed)
		if alike == read[f.Name()] || sites.Alike(changed, base) != alike {
			t.Errorf("%s: alike: %t", f.Name(), alike)
		}
		after := v.clone()
		after.records[id(subject)] = changed
		for _, self := range []int{0, 1, subject, 6} {
			if a, b := shown(v.plan(id(self)), v), shown(after.plan(id(self)), v); alike && !reflect.DeepEqual(a, b) {
				t.Errorf("%s: alike, and the plans of node %d differ:\n%+v\n%+v", f.Name(), self, a, b)
			}
		}
	}
	if sites.Alike(nil, &skeinv1.Record{}) || !sites.Alike(nil, nil) {
		t.Error("no record is like an empty one, or unlike none")
	}
	silent := func(kinds uint32) *skeinv1.Record {
		return &skeinv1.Record{SilentLeaders: []*skeinv1.SilentLeader{{NodeId: "a", Kinds: kinds}}}
	}
	if !sites.Alike(silent(1), silent(1)) || sites.Alike(silent(1), silent(2)) {
		t.Error("what a witness finds is not compared by its values")
	}
}

// change gives a field another value. Where only some values matter to an election, it takes one of these.
func change(r protoreflect.Message, f protoreflect.FieldDescriptor) {
	switch {
	case f.Name() == "role":
		r.Set(f, protoreflect.ValueOfString(sites.RoleRelay))
	case f.Name() == "candidates":
		at := &skeinv1.Candidate{Type: skeinv1.CandidateType_CANDIDATE_TYPE_FORCED, Address: "198.18.0.1:1"}
		r.Mutable(f).List().Append(protoreflect.ValueOfMessage(at.ProtoReflect()))
	case f.IsMap():
		r.Mutable(f).Map().Set(protoreflect.ValueOfString("k").MapKey(), protoreflect.ValueOfString("v"))
	case f.IsList():
		l := r.Mutable(f).List()
		if f.Message() != nil {
			l.Append(l.NewElement())
		} else {
			l.Append(scalar(f))
		}
	case f.Message() != nil:
		r.Set(f, r.NewField(f))
	default:
		r.Set(f, scalar(f))
	}
}

func scalar(f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("other")
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("other"))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(7)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(7)
	}
	return protoreflect.ValueOfInt64(7)
}

// planShown is everything that a plan answers.
type planShown struct {
	site                       string
	elected, forwards, next    bool
	term                       uint64
	leaders                    map[string][]sites.Leader
	guards                     []sites.Guard
	silent                     map[identity.ID]sites.Finding
	ways                       map[identity.ID]sites.Way
	peers, acting, replaceable map[identity.ID]bool
}

func shown(p *sites.Plan, v *view) planShown {
	s := planShown{site: p.Site, elected: p.Elected, forwards: p.Forwards, next: p.Next, term: p.Term, leaders: p.Leaders,
		guards: p.Guards, silent: p.Silent, ways: map[identity.ID]sites.Way{}, peers: map[identity.ID]bool{},
		acting: map[identity.ID]bool{}, replaceable: p.Replaceable()}
	for _, to := range v.ids() {
		s.ways[to], _ = p.Way(to, func(identity.ID) bool { return false })
	}
	for peer := range p.Peers() {
		s.peers[peer] = true
	}
	for leader := range p.Acting() {
		s.acting[leader] = true
	}
	return s
}
