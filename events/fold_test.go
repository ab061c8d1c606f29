package events

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// later99 is an event of a version to come: its body has the field number 99.
func later99(t *testing.T, index uint64, ignorable bool) *skeinv1.Event {
	b, err := proto.Marshal(&skeinv1.Event{Index: index, Time: 5, Schema: SchemaMax + 1, Ignorable: ignorable})
	if err != nil {
		t.Fatal(err)
	}
	b = protowire.AppendString(protowire.AppendTag(b, 99, protowire.BytesType), "body")
	e := &skeinv1.Event{}
	if err := proto.Unmarshal(b, e); err != nil {
		t.Fatal(err)
	}
	return e
}

func TestUnknownEvent(t *testing.T) {
	w := newCluster(t)
	before, hash := w.s.Proto(), w.s.Hash()
	err := w.s.Fold(later99(t, w.s.Index()+1, false))
	if !errors.Is(err, ErrUnknownEvent) || !strings.Contains(err.Error(), "unknown event 7 (body 99) of schema 11: this "+
		"skein folds schemas 1 to 10; install") {
		t.Fatalf("an unknown event gives: %v", err)
	}
	if !proto.Equal(before, w.s.Proto()) || hash != w.s.Hash() {
		t.Fatal("a refused event changed the state")
	}
	if err := w.s.Fold(later99(t, w.s.Index()+1, true)); err != nil {
		t.Fatalf("an ignorable event gives: %v", err)
	}
	if w.s.Index() != 7 || w.s.Time() != 5 {
		t.Fatalf("after an ignored event the state is at %d, %d", w.s.Index(), w.s.Time())
	}
}

// TestNewerSchemaOfAKnownBody: a body that this version knows by an older schema is unknown all the same.
func TestNewerSchemaOfAKnownBody(t *testing.T) {
	s := NewState()
	e := &skeinv1.Event{Index: 1, Schema: SchemaMax + 1, Body: &skeinv1.Event_TokenUsed{TokenUsed: &skeinv1.TokenUsed{}}}
	if err := s.Fold(e); !errors.Is(err, ErrUnknownEvent) {
		t.Fatalf("gives %v", err)
	}
}

func TestGap(t *testing.T) {
	w := newCluster(t)
	last := w.log[len(w.log)-1]
	hash := w.s.Hash()
	for _, index := range []uint64{0, last.GetIndex(), last.GetIndex() + 2} {
		e := proto.CloneOf(last)
		e.Index = index
		if err := w.s.Fold(e); !errors.Is(err, ErrGap) || !strings.Contains(err.Error(), "the state is at 6") {
			t.Fatalf("event %d gives: %v", index, err)
		}
	}
	if err := w.s.Fold(nil); !errors.Is(err, ErrGap) {
		t.Fatalf("no event gives: %v", err)
	}
	if w.s.Hash() != hash {
		t.Fatal("a refused event changed the state")
	}
}

// TestContradictions: facts that cannot be change nothing but the index.
func TestContradictions(t *testing.T) {
	w := newCluster(t)
	w.must(withID("r", admit("b", "1")))
	w.must(admit("c", "1"))
	w.must(revoke(id("c")))
	a, c := w.s.NodeByName("a"), w.s.Revoked(idOf("c")).GetNode()
	answered := answerKey(withID("r", admit("b", "1")))
	node := func(change func(*skeinv1.Node)) *skeinv1.Node {
		n := &skeinv1.Node{Id: id("x"), Name: "x", IdentityKey: key("identity", "x"), WireguardKey: key("wireguard", "x"),
			Ipv4: "10.4.0.77", Ipv6: "fd00::77"}
		change(n)
		return n
	}
	changed := func(change func(*skeinv1.Node)) *skeinv1.Event {
		n := proto.CloneOf(a)
		change(n)
		return &skeinv1.Event{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: n}}}
	}
	admitted := func(change func(*skeinv1.Node)) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: node(change)}}}
	}
	rotated := func(id string, k []byte) *skeinv1.Event {
		return &skeinv1.Event{Body: &skeinv1.Event_NodeKeyRotated{NodeKeyRotated: &skeinv1.NodeKeyRotated{NodeId: id,
			WireguardKey: k}}}
	}
	for what, e := range map[string]*skeinv1.Event{
		"a member's ID":           admitted(func(n *skeinv1.Node) { n.Id = a.GetId() }),
		"a member's name":         admitted(func(n *skeinv1.Node) { n.Name = "a" }),
		"a member's address":      admitted(func(n *skeinv1.Node) { n.Ipv4 = a.GetIpv4() }),
		"a member's IPv6 address": admitted(func(n *skeinv1.Node) { n.Ipv6 = a.GetIpv6() }),
		"a member's key":          admitted(func(n *skeinv1.Node) { n.WireguardKey = a.GetWireguardKey() }),
		"a revoked ID":            admitted(func(n *skeinv1.Node) { n.Id = c.GetId() }),
		"a revoked address":       admitted(func(n *skeinv1.Node) { n.Ipv4 = c.GetIpv4() }),
		"a revoked key":           admitted(func(n *skeinv1.Node) { n.WireguardKey = c.GetWireguardKey() }),
		"one address twice":       admitted(func(n *skeinv1.Node) { n.Ipv6 = n.Ipv4 }),
		"no ID":                   admitted(func(n *skeinv1.Node) { n.Id = "x" }),
		"no node":                 {Body: &skeinv1.Event_NodeAdmitted{}},
		"a change of address":     changed(func(n *skeinv1.Node) { n.Ipv4 = "10.4.0.78" }),
		"a change of IPv6":        changed(func(n *skeinv1.Node) { n.Ipv6 = "fd00::78" }),
		"a change of identity":    changed(func(n *skeinv1.Node) { n.IdentityKey = key("identity", "y") }),
		"a change of admission":   changed(func(n *skeinv1.Node) { n.AdmittedIndex++ }),
		"a change of key":         changed(func(n *skeinv1.Node) { n.WireguardKey = key("wireguard", "y") }),
		"a change to a name":      changed(func(n *skeinv1.Node) { n.Name = "b" }),
		"a change of nobody":      changed(func(n *skeinv1.Node) { n.Id = id("x") }),
		"a rotation to a key":     rotated(id("b"), a.GetWireguardKey()),
		"a rotation of nobody":    rotated(id("x"), key("wireguard", "y")),
		"a server from nowhere":   {Body: &skeinv1.Event_ServerAdded{ServerAdded: &skeinv1.ServerAdded{NodeId: id("x")}}},
		"a promoted agent": {Body: &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{
			NodeId: id("b")}}},
		"a demoted voter": {Body: &skeinv1.Event_ServerAdded{ServerAdded: &skeinv1.ServerAdded{NodeId: id("a")}}},
		"another cluster": {Body: &skeinv1.Event_ClusterCreated{ClusterCreated: &skeinv1.ClusterCreated{
			Cluster: &skeinv1.Cluster{Id: "x"}}}},
		"a token twice": {Body: &skeinv1.Event_TokenCreated{TokenCreated: &skeinv1.TokenCreated{
			Token: &skeinv1.Token{Id: tokenID("1")}}}},
		"a second answer": {Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{
			Answer: &skeinv1.Answer{RequestId: answered, Index: w.s.Index() + 1}}}},
		"an answer to nobody": {Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{}}},
	} {
		s := w.s.Clone()
		e.Index, e.Time = s.Index()+1, s.Time()
		if err := s.Fold(e); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		s.index--
		checkSame(t, what, w.s, s)
	}
}

func TestFromProtoRefuses(t *testing.T) {
	w := newCluster(t)
	w.must(withID("r1", admit("b", "1", asServer)))
	w.must(withID("r2", admit("c", "1")))
	w.must(revoke(id("c")))
	for what, spoil := range map[string]func(*skeinv1.State){
		"there twice":     func(p *skeinv1.State) { p.Nodes = append(p.Nodes, p.Nodes[0]) },
		"malformed":       func(p *skeinv1.State) { p.Nodes[0] = &skeinv1.Node{Id: "x"} },
		"revoked node":    func(p *skeinv1.State) { p.Revoked = append(p.Revoked, p.Revoked[0]) },
		"address":         func(p *skeinv1.State) { p.Revoked[0] = &skeinv1.RevokedNode{Node: p.Nodes[0]} },
		"not a live node": func(p *skeinv1.State) { p.Servers[0] = &skeinv1.Server{NodeId: p.Revoked[0].GetNode().GetId()} },
		"server":          func(p *skeinv1.State) { p.Servers = append(p.Servers, p.Servers[0]) },
		"token":           func(p *skeinv1.State) { p.Tokens = append(p.Tokens, p.Tokens[0]) },
		"out of order":    func(p *skeinv1.State) { slices.Reverse(p.Answers) },
		"out of order ":   func(p *skeinv1.State) { p.Index = 3 },
		"may hold 4096":   func(p *skeinv1.State) { p.Answers = make([]*skeinv1.Answer, MaxAnswers+1) },
		"does not know": func(p *skeinv1.State) {
			p.ProtoReflect().SetUnknown(protowire.AppendTag(nil, 99, protowire.StartGroupType))
		},
		"request ID is miss": func(p *skeinv1.State) { p.Answers[0] = &skeinv1.Answer{Index: 1} },
	} {
		p := proto.CloneOf(w.s.Proto())
		spoil(p)
		if _, err := FromProto(p); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(what)) ||
			!strings.Contains(err.Error(), "snapshot at") {
			t.Errorf("%q: %v", what, err)
		}
	}
	if _, err := FromProto(nil); err == nil {
		t.Error("no snapshot was taken for one")
	}
}

// TestManyReaders: one published state is read, hashed and cloned by many at once (run with -race).
func TestManyReaders(t *testing.T) {
	w := newCluster(t)
	for _, n := range []string{"b", "c", "d", "e", "f"} {
		w.must(withID(n, admit(n, "1")))
	}
	next, _, err := Decide(w.s, withTime(w, withID("x", admit("x", "1"))))
	if err != nil {
		t.Fatal(err)
	}
	published := mustFromProto(t, w.s) // with no digest computed yet
	want := w.s.Hash()
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				c := published.Clone()
				for _, e := range next {
					if err := c.Fold(e); err != nil {
						t.Error(err)
					}
				}
				if c.Hash() == want || published.Hash() != want || published.NodeByName("x") != nil || c.NodeByName("x") == nil {
					t.Error("a clone and its origin are mixed up")
				}
				published.Nodes()
				published.Proto()
			}
		})
	}
	all.Wait()
}

func withTime(w *world, c *skeinv1.Command) *skeinv1.Command {
	c.Time, c.Entropy = w.now.UnixNano(), entropy(1)
	return c
}

func TestDiff(t *testing.T) {
	w := newCluster(t)
	if lines := Diff(w.s, w.s.Clone()); len(lines) != 0 {
		t.Fatalf("a state differs from itself: %q", lines)
	}
	before := w.s.Clone()
	w.must(admit("b", "1", asServer))
	w.must(changeNode("a", "alpha", map[string]string{"site": "dc"}))
	w.must(changeSettings(&skeinv1.Settings{PersistentKeepaliveSeconds: 7}))
	w.must(rotateGossip())
	golden(t, "diff.golden", strings.Join(append(append(Diff(before, w.s), "--- and back"), Diff(w.s, before)...), "\n")+
		"\n")

	for _, line := range Diff(NewState(), w.s) {
		for _, secret := range [][]byte{w.s.Cluster().GetPskSeed(), w.s.GossipKeys().GetPrimary(),
			w.s.Token(tokenID("1")).GetSecretHash()} {
			if strings.Contains(line, string(secret)) || strings.Contains(line, hexOf(secret)) ||
				strings.Contains(line, base64Of(secret)) {
				t.Fatalf("a secret is shown: %s", line)
			}
		}
	}
}

func TestAccessors(t *testing.T) {
	w := history(t)
	b := w.s.NodeByName("b")
	bID, err := identity.ParseID(b.GetId())
	if err != nil {
		t.Fatal(err)
	}
	if w.s.Node(bID) != b || !w.s.Server(bID).GetVoter() || w.s.Revoked(bID) != nil || len(w.s.Nodes()) != 3 ||
		w.s.Revoked(idOf("c")).GetReason() != "stolen" || w.s.Server(idOf("c")) != nil || len(w.s.Servers()) != 2 ||
		len(w.s.RevokedNodes()) != 1 ||
		w.s.Token(tokenID("2")).GetUsesLeft() != 2 || w.s.Token("x") != nil ||
		w.s.remembered(withID("join-b", admit("b", "1"))).GetNode().GetName() != "b" ||
		w.s.Settings().GetArchiveMaxEvents() != 5000 || w.s.Settings().GetPersistentKeepaliveSeconds() != 25 {
		t.Fatalf("the state is %v", w.s.Proto())
	}
}
