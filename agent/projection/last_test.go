package projection_test

import (
	"net/netip"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// remembered is an input that has something of everything, with a slot that has just moved and a plain peer.
func remembered(t *testing.T) (projection.Input, []identity.ID) {
	s, ids := mesh(t, 4)
	phone := withPlainPeer(t, s, time.Hour, ids[1], ids[2])
	in := input(s, ids)
	in.Host.PrivateKey, in.Host.Keepalive, in.Host.RouteNodeAddresses = identity.WireGuardKey{1}, 5*time.Second, true
	in.Plain.Now = time.Unix(0, phone.GetExpiresAt()-1)
	for i, id := range ids {
		network := netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(i), 0}), 24)
		in.Records[id] = &skeinv1.Record{Site: "home", NodeAddresses: []string{network.String()}}
	}
	in.Endpoints[ids[1]] = projection.Endpoint{Addr: netip.MustParseAddrPort("198.18.0.1:51820"), Proven: true}
	in.Endpoints[ids[3]] = projection.Endpoint{Addr: netip.MustParseAddrPort("127.0.0.1:40003"), Relayed: true}
	return in, ids
}

// TestLastFollowsEveryChange: whatever changes of an input, field by field, what is remembered is not given for it.
func TestLastFollowsEveryChange(t *testing.T) {
	base, ids := remembered(t)
	key := netip.MustParseAddr("10.4.77.7")
	changes := map[string]func(in *projection.Input){
		"Self":          func(in *projection.Input) { in.Self = ids[3] },
		"State":         func(in *projection.Input) { in.State, _ = mesh(t, 3) },
		"Records":       func(in *projection.Input) { in.Records = map[identity.ID]*skeinv1.Record{} },
		"Endpoints":     func(in *projection.Input) { in.Endpoints = map[identity.ID]projection.Endpoint{} },
		"WantHandshake": func(in *projection.Input) { in.WantHandshake = map[identity.ID]bool{ids[1]: true} },
		"Reach":         func(in *projection.Input) { in.Reach = sites.NewReach("", nil, nil, nil, nil) },
		"PortRewrites":  func(in *projection.Input) { in.PortRewrites = []dataplane.PortRewrite{{Local: 1}} },
		"Pods":          func(in *projection.Input) { in.Pods = []dataplane.PodRoute{{Addr: key, Link: "pod1"}} },
		"Gateway":       func(in *projection.Input) { in.Gateway = true },
		"Exported":      func(in *projection.Input) { in.Exported = []netip.Addr{key} },
		"Complete":      func(in *projection.Input) { in.Complete = false },
		"Rekeys": func(in *projection.Input) {
			in.Rekeys = map[identity.ID]projection.Rekey{ids[1]: {To: dataplane.Key{7}}}
		},

		"Plain.Carrying": func(in *projection.Input) { in.Plain.Carrying = true },
		"Plain.Terms": func(in *projection.Input) {
			in.Self, in.Plain.Terms = ids[2], map[uint64]uint64{base.State.PlainPeers()[0].GetCreatedIndex(): 1}
		},
		"Plain.Now": func(in *projection.Input) { in.Plain.Now = in.Plain.Now.Add(time.Minute) },

		"Host.PrivateKey":         func(in *projection.Input) { in.Host.PrivateKey[0]++ },
		"Host.Numbers":            func(in *projection.Input) { in.Host.Numbers = dataplane.NumbersOf(1) },
		"Host.Link":               func(in *projection.Input) { in.Host.Link = "skein9" },
		"Host.Port":               func(in *projection.Input) { in.Host.Port++ },
		"Host.ControlPort":        func(in *projection.Input) { in.Host.ControlPort++ },
		"Host.MTU":                func(in *projection.Input) { in.Host.MTU = 1300 },
		"Host.Keepalive":          func(in *projection.Input) { in.Host.Keepalive++ },
		"Host.AskedKeepalive":     func(in *projection.Input) { in.Host.AskedKeepalive++ },
		"Host.RouteNodeAddresses": func(in *projection.Input) { in.Host.RouteNodeAddresses = false },
		"Host.Connected": func(in *projection.Input) {
			in.Host.Connected = []netip.Prefix{netip.MustParsePrefix("192.168.8.0/24")}
		},
	}
	without := map[string]string{
		"Keys":    "it holds what would be derived again",
		"InGrace": "TestAMovedSlotHasAGracePeriod has a slot that moves",
	}
	for _, name := range fieldsOf(reflect.TypeFor[projection.Input](), "") {
		change, ok := changes[name]
		if _, excused := without[name]; !ok && !excused {
			t.Errorf("nothing here changes Input.%s", name)
		}
		if !ok {
			continue
		}
		var l projection.Last
		before, _, _ := l.Project(base)
		in := base
		change(&in)
		have, refused, _ := l.Project(in)
		want, refusals := projection.Project(in)
		if !have.Equal(want) || !reflect.DeepEqual(refused, refusals) {
			t.Errorf("Input.%s has changed, and the Spec is that of before", name)
		}
		if before.Equal(want) {
			t.Errorf("this change of Input.%s changes no Spec, so that it tries nothing", name)
		}
	}
}

// TestLastRedirects: when only where WireGuard sends changes, nothing else is made anew, and what is given is what a
// projection gives.
func TestLastRedirects(t *testing.T) {
	base, ids := remembered(t)
	at := netip.MustParseAddrPort("198.18.0.9:51820")
	base.Reach = sites.NewReach("home", map[identity.ID]bool{ids[1]: true, ids[2]: true}, map[identity.ID]projection.Way{
		ids[3]: {Via: ids[1]}}, nil, nil)
	var l projection.Last
	if _, _, anew := l.Project(base); !anew {
		t.Fatal("the first projection is remembered")
	}
	for _, c := range []struct {
		what      string
		endpoints map[identity.ID]projection.Endpoint
		handshake map[identity.ID]bool
		anew      bool
	}{
		{"nothing", base.Endpoints, nil, false},
		{"another endpoint", map[identity.ID]projection.Endpoint{ids[1]: {Addr: at, Proven: true}}, nil, false},
		{"none any more", nil, nil, false},
		{"two", map[identity.ID]projection.Endpoint{ids[1]: {Addr: at}, ids[2]: {Addr: at, Proven: true}}, nil, false},
		{"a handshake is wanted", map[identity.ID]projection.Endpoint{ids[1]: {Addr: at}, ids[2]: {Addr: at, Proven: true}},
			map[identity.ID]bool{ids[1]: true, ids[2]: false}, false},
		{"of one that is not a peer", map[identity.ID]projection.Endpoint{ids[3]: {Addr: at}},
			map[identity.ID]bool{ids[3]: true}, false},
		{"of a stranger", map[identity.ID]projection.Endpoint{{9, 9}: {Addr: at}}, nil, false},
		{"a narrow one", map[identity.ID]projection.Endpoint{ids[1]: {Addr: at, MTU: 1300}}, nil, true},
		{"which is gone", nil, nil, true},
	} {
		in := base
		in.Endpoints, in.WantHandshake = c.endpoints, c.handshake
		have, refused, anew := l.Project(in)
		want, refusals := projection.Project(in)
		if !have.Equal(want) || !reflect.DeepEqual(refused, refusals) || anew != c.anew {
			t.Errorf("%s: made anew %t, want %t:\n%s", c.what, anew, c.anew, difference(text(want), text(have)))
		}
	}
}

// fieldsOf are the exported fields of a struct, those of Host and Plain one by one.
func fieldsOf(of reflect.Type, prefix string) (out []string) {
	for i := range of.NumField() {
		f := of.Field(i)
		switch {
		case !f.IsExported():
		case f.Name == "Host" || f.Name == "Plain":
			out = append(out, fieldsOf(f.Type, f.Name+".")...)
		default:
			out = append(out, prefix+f.Name)
		}
	}
	return out
}

// TestLastReadsRecords: of a member's new record nothing escapes that a Spec follows from, whichever field says it.
func TestLastReadsRecords(t *testing.T) {
	base, ids := remembered(t)
	base.Plain.Now = time.Time{}
	fields := (&skeinv1.Record{}).ProtoReflect().Descriptor().Fields()
	changed := 0
	for i := range fields.Len() {
		f := fields.Get(i)
		r := proto.CloneOf(base.Records[ids[2]])
		fill(r.ProtoReflect(), f)
		in := base
		in.Records = map[identity.ID]*skeinv1.Record{}
		for id, old := range base.Records {
			in.Records[id] = proto.CloneOf(old)
		}
		in.Records[ids[2]] = r
		var l projection.Last
		before, _, _ := l.Project(base)
		have, _, _ := l.Project(in)
		want, _ := projection.Project(in)
		if !have.Equal(want) {
			t.Errorf("the record's %s has changed, and the Spec is that of before", f.Name())
		}
		if !before.Equal(want) {
			changed++
		}
	}
	if changed == 0 {
		t.Error("no field of a record changes a Spec, so that this tries nothing")
	}
}

// fill gives a field of a record another value.
func fill(m protoreflect.Message, f protoreflect.FieldDescriptor) {
	switch {
	case f.IsMap():
		m.Mutable(f).Map().Set(protoreflect.ValueOfString("k").MapKey(), protoreflect.ValueOfString("v"))
	case f.IsList() && f.Message() != nil:
		one := m.Mutable(f).List().AppendMutable().Message()
		for i := range f.Message().Fields().Len() {
			fill(one, f.Message().Fields().Get(i))
		}
	case f.IsList() && f.Kind() == protoreflect.BytesKind:
		m.Mutable(f).List().Append(protoreflect.ValueOfBytes([]byte("12345678")))
	case f.IsList():
		m.Mutable(f).List().Append(protoreflect.ValueOfString("10.9.0.0/16"))
	case f.Message() != nil:
		m.Mutable(f)
	default:
		values := map[protoreflect.Kind]any{protoreflect.StringKind: "10.9.0.0/16",
			protoreflect.BytesKind: []byte("12345678"),
			protoreflect.BoolKind:  true, protoreflect.Uint32Kind: uint32(3), protoreflect.Uint64Kind: uint64(3),
			protoreflect.Int64Kind: int64(3), protoreflect.EnumKind: protoreflect.EnumNumber(1)}
		m.Set(f, protoreflect.ValueOf(values[f.Kind()]))
	}
}
