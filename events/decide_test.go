package events

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// step is one command and what must come of it: events, or a refusal.
type step struct {
	command func(*world) *skeinv1.Command
	events  []string // as brief prints them
	code    Code
	says    string // part of the refusal's message
}

func does(c *skeinv1.Command, events ...string) step {
	return step{command: func(*world) *skeinv1.Command { return proto.CloneOf(c) }, events: events}
}

func fails(code Code, says string, c *skeinv1.Command) step {
	return step{command: func(*world) *skeinv1.Command { return proto.CloneOf(c) }, code: code, says: says}
}

// later moves the clock before the next step.
func later(d time.Duration) step {
	return step{command: func(w *world) *skeinv1.Command { w.now = w.now.Add(d); return nil }}
}

func id(name string) string { return idOf(name).String() }

// TestCommands shows what each command does. Every story starts from a cluster with the node a, at
// 10.4.0.1 and voter, and the token 1 of 1,000 uses, unless it is about making one.
func TestCommands(t *testing.T) {
	token1 := tokenID("1")
	text := strings.Repeat
	for _, story := range []struct {
		name  string
		empty bool
		steps []step
	}{
		{"create a cluster", true, []step{
			fails(FailedPrecondition, "skein up --init", admit("b", "1")),
			fails(InvalidArgument, "host bits set; write 10.4.0.0/16", createCluster("10.4.1.0/16", "a")),
			fails(InvalidArgument, "too small; use a /28", createCluster("10.4.0.0/29", "a")),
			fails(InvalidArgument, "not private", createCluster("8.8.0.0/16", "a")),
			fails(InvalidArgument, "not private", createCluster("10.0.0.0/7", "a")),
			fails(InvalidArgument, "not an IPv4 prefix", createCluster("fd00::/64", "a")),
			fails(InvalidArgument, "not an IPv4 prefix", createCluster("all", "a")),
			does(withID("init", createCluster("10.4.0.0/16", "a")), "ClusterCreated", "NodeAdmitted a 10.4.0.1", "ServerAdded",
				"ServerPromoted", "GossipKeyRotated", "CommandAnswered init"),
			does(createCluster("10.4.0.0/16", "a")),
			fails(AlreadyExists, "already belongs to cluster "+clusterID, createCluster("10.4.0.0/16", "b")),
		}},
		{"the default overlay", true, []step{does(createCluster("", "a"), "ClusterCreated", "NodeAdmitted a 10.4.0.1",
			"ServerAdded", "ServerPromoted", "GossipKeyRotated")}},
		{"a shared address range", true, []step{does(createCluster("100.64.0.0/10", "a"), "ClusterCreated",
			"NodeAdmitted a 100.64.0.1", "ServerAdded", "ServerPromoted", "GossipKeyRotated")}},
		{"settings", false, []step{
			does(changeSettings(&skeinv1.Settings{HandshakeTimeoutSeconds: 10}), "SettingsChanged"),
			does(changeSettings(&skeinv1.Settings{HandshakeTimeoutSeconds: 10})),
			does(changeSettings(&skeinv1.Settings{BirthdayAttack: "enabled"}, "birthday_attack"), "SettingsChanged"),
			fails(InvalidArgument, "use enabled or disabled", changeSettings(&skeinv1.Settings{BirthdayAttack: "yes"})),
			fails(InvalidArgument, "setting stun: \"off\" is not allowed; use enabled or disabled",
				changeSettings(&skeinv1.Settings{Stun: "off"})),
			fails(InvalidArgument, "setting stun_servers: \"nowhere\": want host:port",
				changeSettings(&skeinv1.Settings{StunServers: []string{"nowhere"}})),
			fails(InvalidArgument, "is there twice", changeSettings(&skeinv1.Settings{StunServers: []string{"a:1", "a:1"}})),
			fails(InvalidArgument, "17 servers are too many; use up to 16",
				changeSettings(&skeinv1.Settings{StunServers: make([]string, 17)})),
			fails(InvalidArgument, "handshake_timeout_seconds: 4000 is out of range; use 1 to 3600",
				changeSettings(&skeinv1.Settings{HandshakeTimeoutSeconds: 4000})),
			fails(InvalidArgument, "there are archive_max_age_seconds, ", changeSettings(&skeinv1.Settings{}, "keepalive")),
			fails(InvalidArgument, "no settings", changeSettings(nil)),
		}},
		{"tokens", false, []step{
			does(createToken("2", 1, false), "TokenCreated"),
			does(createToken("2", 1, false)),
			fails(AlreadyExists, "already exists",
				&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
					Id: tokenID("2"), SecretHash: key("other", ""), LifetimeNanos: 1, Uses: 1}}}),
			fails(InvalidArgument, "use 1 to 100000", createToken("3", 0, false)),
			fails(InvalidArgument, "use 1 to 100000", createToken("3", 100_001, false)),
			fails(InvalidArgument, "lifetime",
				&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
					Id: tokenID("3"), SecretHash: key("other", ""), LifetimeNanos: int64(366 * 24 * time.Hour), Uses: 1}}}),
			fails(InvalidArgument, "16 lower-case hex digits",
				&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: "mine"}}}),
			does(revokeToken("2"), "TokenRevoked "+tokenID("2")),
			fails(NotFound, "skein token list", revokeToken("2")),
			later(7*24*time.Hour - time.Minute), // so long a late joiner hears that it expired
			does(createToken("4", 1, false), "TokenCreated"),
			fails(PermissionDenied, "expired at", admit("late", "1")),
			later(time.Hour + time.Minute),
			does(createToken("5", 1, false), "TokenRevoked "+token1, "TokenCreated"),
		}},
		{"join", false, []step{
			does(withID("r1", admit("b", "1")), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1, "CommandAnswered r1"),
			does(withID("r1", admit("b", "1"))),
			does(withID("r2", admit("b", "1")), "CommandAnswered r2"),
			does(admit("s", "1", asServer), "NodeAdmitted s 10.4.0.3", "TokenUsed "+token1, "ServerAdded"),
			fails(AlreadyExists, "the name b is taken by node "+id("b")+" (10.4.0.2)",
				admit("c", "1", func(a *skeinv1.AdmitNode) { a.Node.Name = "b" })),
			fails(AlreadyExists, "used by node b", admit("c", "1", func(a *skeinv1.AdmitNode) {
				a.Node.WireguardKey = key("wireguard", "b")
			})),
		}},
		{"join with a bad token", false, []step{
			fails(PermissionDenied, "wrong or was revoked", admit("b", "2")),
			fails(PermissionDenied, "wrong or was revoked", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.TokenSecretHash = key("guess", "")
			})),
			fails(PermissionDenied, "this is cluster "+clusterID, admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.ClusterId = "ff" + clusterID[2:]
			})),
			does(createToken("once", 1, false), "TokenCreated"),
			does(admit("b", "once"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+tokenID("once")),
			fails(PermissionDenied, "used up (1 uses)", admit("c", "once")),
			does(admit("b", "once")), // its answer was lost: the member may ask again
			does(createToken("agents", 9, true), "TokenCreated"),
			fails(PermissionDenied, "gives the role agent and c wants to be a server", admit("c", "agents", asServer)),
			does(admit("c", "agents"), "NodeAdmitted c 10.4.0.3", "TokenUsed "+tokenID("agents")),
			does(addServer(id("c")), "NodeChanged c", "ServerAdded"), /* granted, whatever its token gave */
			later(59*time.Minute + 47*time.Second),                   // a second before
			does(admit("d", "1"), "NodeAdmitted d 10.4.0.4", "TokenUsed "+token1),
			fails(PermissionDenied, "expired at 2026-03-01T13:00:02Z", admit("e", "1")), // at this very moment
		}},
		{"join with bad values", false, []step{
			fails(InvalidArgument, "needs a name", admit("", "1")),
			fails(InvalidArgument, "lower-case letters", admit("Upper", "1")),
			fails(InvalidArgument, "lower-case letters", admit("-b", "1")),
			fails(InvalidArgument, "lower-case letters", admit("b.example", "1")),
			fails(InvalidArgument, "at most 63", admit(text("b", 64), "1")),
			fails(InvalidArgument, "taken for a node ID", admit("0123456789abcdef", "1")),
			fails(InvalidArgument, "the identity key of b has 31 bytes: want 32", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.IdentityKey = a.Node.IdentityKey[1:]
			})),
			fails(InvalidArgument, "all zero", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.WireguardKey = make([]byte, 32)
			})),
			fails(InvalidArgument, "the first is higher than the last",
				admit("b", "1", func(a *skeinv1.AdmitNode) { a.Node.MinSchema = 3 })),
			fails(InvalidArgument, "printable", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.Labels = map[string]string{"x": "\x1b[2J"}
			})),
			fails(InvalidArgument, "a key has 1 to 63", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.Labels = map[string]string{"a b": ""}
			})),
			fails(InvalidArgument, "at most 64", admit("b", "1", func(a *skeinv1.AdmitNode) {
				for i := range 65 {
					a.Node.Labels[fmt.Sprint(i)] = ""
				}
			})),
			fails(InvalidArgument, "request ID", withID(text("r", 257), admit("b", "1"))),
			fails(InvalidArgument, "no node", admit("b", "1", func(a *skeinv1.AdmitNode) { a.Node = nil })),
			fails(InvalidArgument, "older skein", &skeinv1.Command{}),
		}},
		{"join again with other keys", false, []step{
			does(admit("b", "1"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1),
			does(from(id("a"), withID("r", admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.WireguardKey = key("wireguard", "b2")
				a.Node.MaxSchema = 7
			}))),
				"NodeKeyRotated", "NodeChanged b", "CommandAnswered r"),
			fails(AlreadyExists, "used by node a", from(id("a"), admit("b", "1", func(a *skeinv1.AdmitNode) {
				a.Node.WireguardKey = key("wireguard", "a")
			}))),
		}},
		{"change a node", false, []step{
			does(admit("b", "1"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1),
			does(changeNode("b", "c", nil), "NodeChanged c"),
			does(changeNode("b", "c", nil)),
			fails(AlreadyExists, "the name a is taken", changeNode("b", "a", nil)),
			does(changeNode("b", "", map[string]string{"site": "home"}), "NodeChanged c"),
			does(changeNode("b", "", map[string]string{"site": "home"})),
			does(changeNode("a", "b", nil), "NodeChanged b"), // the name is free again
			fails(InvalidArgument, "lower-case letters", changeNode("b", "c_d", nil)),
			fails(NotFound, "skein nodes", changeNode("x", "y", nil)),
		}},
		{"rotate a node's key", false, []step{
			does(admit("b", "1"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1),
			does(rotateKey("b", "new"), "NodeKeyRotated"),
			does(rotateKey("b", "new")),
			fails(AlreadyExists, "used by node a", rotateKey("b", "a")),
			fails(NotFound, "not a member", rotateKey("x", "x")),
		}},
		{"revoke a node", false, []step{
			does(admit("b", "1"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1),
			does(withID("r", revoke(id("b"))), "NodeRevoked stolen", "GossipKeyRotated", "CommandAnswered r"),
			does(revoke(id("b"))),
			fails(PermissionDenied, "was revoked and cannot come back", admit("b", "1")),
			fails(PermissionDenied, "belonged to the revoked node "+id("b"), admit("c", "1", func(a *skeinv1.AdmitNode) {
				a.Node.WireguardKey = key("wireguard", "b")
			})),
			fails(FailedPrecondition, "(b) was revoked at 2026-03-01T12:00:04Z", changeNode("b", "c", nil)),
			// the name is free, the address rests
			does(admit("c", "1", func(a *skeinv1.AdmitNode) { a.Node.Name = "b" }), "NodeAdmitted b 10.4.0.3",
				"TokenUsed "+token1),
			fails(NotFound, "not a member", revoke(id("x"))),
			fails(FailedPrecondition, "only voter", revoke(id("a"))),
		}},
		{"servers", false, []step{
			does(admit("b", "1"), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1),
			fails(FailedPrecondition, "b is not a server", promote(id("b"))),
			does(addServer(id("b")), "ServerAdded"),
			does(addServer(id("b"))),
			fails(FailedPrecondition, "only voter", removeServer(id("a"))),
			does(promote(id("b")), "ServerPromoted"),
			does(promote(id("b"))),
			does(removeServer(id("a")), "ServerRemoved tired"),
			does(removeServer(id("a"))),
			does(withID("r", addServer(id("a"))), "ServerAdded", "CommandAnswered r"),
			does(revoke(id("a")), "ServerRemoved revoked", "NodeRevoked stolen", "GossipKeyRotated"), // a non-voter
			does(removeServer(id("a"))),
			fails(NotFound, "not a member", addServer(id("x"))),
		}},
		{"three voters", false, []step{
			does(admit("b", "1", asServer), "NodeAdmitted b 10.4.0.2", "TokenUsed "+token1, "ServerAdded"),
			does(admit("c", "1", asServer), "NodeAdmitted c 10.4.0.3", "TokenUsed "+token1, "ServerAdded"),
			does(promote(id("b")), "ServerPromoted"),
			does(promote(id("c")), "ServerPromoted"),
			fails(FailedPrecondition, "two voters would be left", removeServer(id("a"))),
			fails(FailedPrecondition, "two voters would be left", revoke(id("a"))),
			does(admit("d", "1", asServer), "NodeAdmitted d 10.4.0.4", "TokenUsed "+token1, "ServerAdded"),
			does(removeServer(id("a")), "ServerRemoved tired"), // d follows
			does(promote(id("d")), "ServerPromoted"),
			fails(FailedPrecondition, "two voters would be left", revoke(id("b"))),
			does(&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: id("b"),
				Force: true}}},
				"ServerRemoved revoked", "NodeRevoked ", "GossipKeyRotated"),
		}},
		{"gossip key", false, []step{does(rotateGossip(), "GossipKeyRotated")}},
	} {
		t.Run(story.name, func(t *testing.T) {
			w := newWorld(t)
			if !story.empty {
				w = newCluster(t)
			}
			for i, s := range story.steps {
				s.check(t, i, w)
			}
		})
	}
}

func (s step) check(t *testing.T, i int, w *world) {
	t.Helper()
	c := s.command(w)
	if c == nil {
		return
	}
	evs, a, err := w.propose(c)
	if s.code != "" {
		if CodeOf(err) != s.code || !strings.Contains(err.Error(), s.says) {
			t.Fatalf("step %d: %v\nis answered %s %v\nwant        %s …%s…", i, c, CodeOf(err), err, s.code, s.says)
		}
		if evs != nil || a != nil {
			t.Fatalf("step %d: a refusal came with %v and %v", i, evs, a)
		}
		return
	}
	var have []string
	for _, e := range evs {
		have = append(have, brief(e))
	}
	if err != nil || !slices.Equal(have, s.events) {
		t.Fatalf("step %d: %v\ngives %q, %v\nwant  %q", i, c, have, err, s.events)
	}
}

func TestAnswers(t *testing.T) {
	w := newCluster(t)
	first := w.must(withID("r", admit("b", "1")))
	if first.GetIndex() != w.s.Index() || first.GetNode().GetName() != "b" || first.GetRequestId() != "r" {
		t.Fatalf("the answer is %v", first)
	}
	if again := w.must(withID("r", admit("b", "1"))); !proto.Equal(again, first) {
		t.Fatalf("a retry is answered %v, want %v", again, first)
	}
	w.must(changeNode("b", "c", nil))
	if again := w.must(withID("r", admit("b", "1"))); again.GetIndex() != first.GetIndex() ||
		!proto.Equal(again.GetNode(), w.s.NodeByName("c")) {
		t.Fatalf("a retry after the node was renamed is answered %v, want the node as it is at the first answer's index",
			again)
	}
	if a := w.must(createToken("2", 2, true)); !proto.Equal(a.GetToken(), w.s.Token(tokenID("2"))) ||
		a.GetIndex() != w.s.Index() {
		t.Fatalf("the answer is %v", a)
	}
	if a := w.must(createToken("2", 2, true)); a.GetIndex() != w.s.Index() {
		t.Fatalf("an answer without events has the index %d, want %d", a.GetIndex(), w.s.Index())
	}
	for i := range MaxAnswers + 10 {
		w.must(withID(fmt.Sprint("many-", i), rotateKey("b", fmt.Sprint(i))))
	}
	known := func(c *skeinv1.Command) bool { return w.s.remembered(c) != nil }
	if known(withID("r", admit("b", "1"))) || known(withID("many-9", rotateKey("b", ""))) ||
		!known(withID("many-10", rotateKey("b", ""))) {
		t.Fatal("the oldest answers are to be forgotten, and no others")
	}
	if n := len(w.s.Proto().GetAnswers()); n != MaxAnswers {
		t.Fatalf("%d answers are remembered, want %d", n, MaxAnswers)
	}
}

func TestEventsAreComplete(t *testing.T) {
	w := newCluster(t)
	base := w.s.Index()
	evs, _, err := w.propose(withID("r", admit("b", "1", asServer)))
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range evs {
		if e.GetIndex() != base+uint64(i)+1 || e.GetTime() != w.now.UnixNano() || e.GetRequestId() != "r" ||
			e.GetSchema() != 1 || e.GetIgnorable() {
			t.Errorf("event %d is %v", i, e)
		}
	}
	if n := w.s.NodeByName("b"); n.GetAdmittedIndex() != base+1 || n.GetAdmittedAt() != w.now.UnixNano() ||
		n.GetIpv6() != "fd00:1122:3344:0:625e:da92:5f4c:ceae" {
		t.Errorf("the node is %v", n)
	}
}

func TestSecretsComeFromEntropy(t *testing.T) {
	w := newCluster(t)
	seed, first := w.s.Cluster().GetPskSeed(), w.s.GossipKeys().GetPrimary()
	if len(seed) != 32 || len(first) != 32 || string(seed) == string(first) {
		t.Fatalf("psk seed %x, gossip key %x", seed, first)
	}
	var primaries [][]byte
	for range 4 {
		primaries = append(primaries, w.s.GossipKeys().GetPrimary())
		w.must(rotateGossip())
	}
	have := w.s.GossipKeys()
	if want := [][]byte{primaries[3], primaries[2]}; !slices.EqualFunc(have.GetAccepted(), want, slices.Equal) {
		t.Fatalf("accepted keys are %x, want the last two %x", have.GetAccepted(), want)
	}
	c := rotateGossip()
	c.Time = 1
	if _, _, err := Decide(w.s, c); CodeOf(err) != InvalidArgument {
		t.Fatalf("without entropy: %v", err)
	}
	c = createToken("2", 1, false)
	if _, _, err := Decide(w.s, c); CodeOf(err) != InvalidArgument || !strings.Contains(err.Error(), "no time") {
		t.Fatalf("without time: %v", err)
	}
}

func TestAddresses(t *testing.T) {
	w := newWorld(t)
	w.must(createCluster("10.9.8.0/28", "n1"))
	w.must(createToken("1", 1000, false))
	address := func(name string) string { return w.must(admit(name, "1")).GetNode().GetIpv4() }
	for i := 2; i <= 14; i++ {
		if have, want := address(fmt.Sprint("n", i)), fmt.Sprintf("10.9.8.%d", i); have != want {
			t.Fatalf("node %d got %s, want %s", i, have, want)
		}
	}
	_, _, err := w.propose(admit("late", "1"))
	if CodeOf(err) != ResourceExhausted || !strings.Contains(err.Error(), "its 14 addresses belong to 14 nodes (") ||
		!strings.Contains(err.Error(), "overlay.ipv4") {
		t.Fatalf("a full overlay is answered: %v", err)
	}
	w.must(revoke(id("n5")))
	if _, _, err = w.propose(admit("late", "1")); CodeOf(err) != ResourceExhausted || !strings.Contains(err.Error(),
		"13 nodes") || !strings.Contains(err.Error(), "1 revoked") {
		t.Fatalf("the address of a revoked node was given again, or: %v", err)
	}
	rebuilt, err := FromProto(w.s.Proto())
	if err != nil {
		t.Fatal(err)
	}
	if rebuilt.newest != w.s.newest {
		t.Fatalf("the last address is %v, and %v when rebuilt", w.s.newest, rebuilt.newest)
	}
}

// TestAddressesGoOn: the next address follows the last one given, also when the holder of the last one
// was revoked, so that an address rests as long as possible.
func TestAddressesGoOn(t *testing.T) {
	w := newCluster(t)
	w.must(admit("b", "1"))
	w.must(admit("c", "1"))
	w.must(revoke(id("c")))
	s, err := FromProto(w.s.Proto())
	if err != nil {
		t.Fatal(err)
	}
	w.s = s
	if have := w.must(admit("d", "1")).GetNode().GetIpv4(); have != "10.4.0.4" {
		t.Fatalf("d got %s", have)
	}
	// It is the order of giving that counts, not that of the addresses.
	for i, ip := range []string{"10.4.0.200", "10.4.0.100"} {
		n := &skeinv1.Node{Id: id(ip), Name: fmt.Sprint("by-hand-", i), WireguardKey: key("wireguard", ip), Ipv4: ip,
			AdmittedIndex: w.s.Index() + 1}
		e := &skeinv1.Event{Index: w.s.Index() + 1, Time: w.s.Time(), Schema: 1,
			Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: n}}}
		if err := w.s.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	if have := w.must(admit("e", "1")).GetNode().GetIpv4(); have != "10.4.0.101" {
		t.Fatalf("e got %s", have)
	}
}

// TestSchemaOfServers: an event type is appended only when every server can fold it.
func TestSchemaOfServers(t *testing.T) {
	w := newCluster(t)
	w.must(admit("b", "1", asServer, func(a *skeinv1.AdmitNode) { a.Node.MaxSchema = 2 }))
	newer := func(e *skeinv1.Event) uint32 { return 2 }
	c := rotateKey("b", "new")
	c.Time = w.now.UnixNano()
	_, _, err := decide(w.s, c, newer)
	if CodeOf(err) != FailedPrecondition || !strings.Contains(err.Error(), "server a folds event schemas up to 1 and "+
		"this command needs 2: upgrade skein on a first") {
		t.Fatalf("answered %v", err)
	}
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id("a"),
		MaxSchema: 2}}})
	if _, _, err := decide(w.s, c, newer); err != nil {
		t.Fatal(err)
	}
	w.must(admit("agent", "1")) // folds schema 1 alone, and is not a server
	if _, _, err := decide(w.s, c, newer); err != nil {
		t.Fatal(err)
	}
}

func TestVotersAreBounded(t *testing.T) {
	w := newCluster(t)
	for i := 1; i < MaxVoters; i++ {
		w.must(admit(fmt.Sprint("s", i), "1", asServer))
		w.must(promote(id(fmt.Sprint("s", i))))
	}
	w.must(admit("more", "1", asServer))
	if _, _, err := w.propose(promote(id("more"))); CodeOf(err) != FailedPrecondition || !strings.Contains(err.Error(),
		"stays a non-voter") {
		t.Fatalf("answered %v", err)
	}
}

func TestTokensAreBounded(t *testing.T) {
	w := newCluster(t)
	for i := len(w.s.Tokens()); i < MaxTokens; i++ {
		c := createToken(fmt.Sprint("t", i), 1, false)
		c.Time = w.now.UnixNano()
		w.decide(c)
	}
	if _, _, err := w.propose(createToken("more", 1, false)); CodeOf(err) != ResourceExhausted ||
		!strings.Contains(err.Error(), "skein token revoke") {
		t.Fatalf("answered %v", err)
	}
}

// Many expired tokens go a few at a time, so that no command makes a huge entry.
func TestExpiredTokensGoInPortions(t *testing.T) {
	w := newCluster(t)
	for i := range 2*dropAtOnce - 1 {
		w.must(createToken(fmt.Sprint("t", i), 1, false))
	}
	w.now = w.now.Add(30 * 24 * time.Hour)
	for _, left := range []int{dropAtOnce + 1, 2, 3} {
		w.must(createToken(fmt.Sprint("left", left), 1, false))
		if have := len(w.s.Tokens()); have != left {
			t.Errorf("%d tokens are left, want %d", have, left)
		}
	}
}

// A node ID is a part of the key's hash. Who finds another key with a member's ID is not that member.
func TestAnotherKeyWithAMembersID(t *testing.T) {
	w := newCluster(t)
	n := &skeinv1.Node{Id: id("x"), Name: "victim", IdentityKey: key("identity", "victim"), WireguardKey: key("wireguard",
		"victim"), Ipv4: "10.4.0.9", AdmittedIndex: w.s.Index() + 1}
	if err := w.s.Fold(&skeinv1.Event{Index: w.s.Index() + 1, Time: w.s.Time(), Schema: 1,
		Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: n}}}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.propose(admit("x", "1")); CodeOf(err) != AlreadyExists || !strings.Contains(err.Error(),
		"has the node ID") {
		t.Fatalf("answered %v", err)
	}
}

func TestDefaults(t *testing.T) {
	s := NewState().Settings()
	if s.GetHandshakeTimeoutSeconds() != 30 || s.GetDirectRetryIntervalSeconds() != 120 ||
		s.GetPersistentKeepaliveSeconds() != 25 ||
		s.GetBirthdayAttack() != "disabled" || s.GetTopology() != "full" || s.GetLeadersPerSite() != 2 ||
		s.GetRouteNodeAddresses() ||
		len(s.GetPodRanges()) != 0 || s.GetArchiveMaxEvents() != 1_000_000 {
		t.Fatalf("defaults are %v", s)
	}
	if NewState().Node(identity.ID{}) != nil || NewState().Cluster() != nil || NewState().NodeByName("a") != nil {
		t.Fatal("the empty state holds something")
	}
}
