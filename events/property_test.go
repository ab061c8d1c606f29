package events

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// fatal is what *testing.T and *rapid.T share here.
type fatal interface {
	Helper()
	Fatalf(string, ...any)
}

// checkInvariants holds DESIGN.md's invariants against a state.
func checkInvariants(t fatal, s *State) {
	t.Helper()
	owners := map[string]string{}
	own := func(what, v, id string) {
		if other, taken := owners[what+v]; v != "" && taken {
			t.Fatalf("%s %q belongs to %s and to %s", what, v, other, id)
		}
		owners[what+v] = id
	}
	check := func(n *skeinv1.Node) {
		own("id ", n.GetId(), n.GetId())
		own("address ", n.GetIpv4(), n.GetId())
		own("address ", n.GetIpv6(), n.GetId())
		own("key ", string(n.GetWireguardKey()), n.GetId())
		own("identity ", string(n.GetIdentityKey()), n.GetId())
	}
	var overlay netip.Prefix
	if s.Cluster() != nil {
		overlay = netip.MustParsePrefix(s.Cluster().GetOverlayIpv4())
	}
	for _, n := range s.Nodes() {
		check(n)
		own("name ", n.GetName(), n.GetId())
		if a := netip.MustParseAddr(n.GetIpv4()); !overlay.Contains(a) || a == overlay.Addr() || !overlay.Contains(a.Next()) {
			t.Fatalf("address %s of %s is not one of %s", a, n.GetName(), overlay)
		}
		if s.NodeByName(n.GetName()) != n {
			t.Fatalf("%s is not found by its name", n.GetName())
		}
	}
	for _, r := range s.RevokedNodes() {
		check(r.GetNode())
	}
	checkPools(t, s)
	checkRanges(t, s)
	checkEgresses(t, s)
	checkPodCIDRs(t, s)
	checkNodesSet(t, s)
	checkPlainPeers(t, s, own)
	checkTranslations(t, s)
	for _, v := range s.Servers() {
		if s.Node(serverID(t, v)) == nil {
			t.Fatalf("server %s is not a member", v.GetNodeId())
		}
	}
	if !slices.IsSortedFunc(s.Nodes(), func(a, b *skeinv1.Node) int { return strings.Compare(a.GetId(), b.GetId()) }) {
		t.Fatalf("the nodes are not sorted")
	}
}

func serverID(t fatal, v *skeinv1.Server) identity.ID {
	t.Helper()
	out, err := identity.ParseID(v.GetNodeId())
	if err != nil {
		t.Fatalf("%v", err)
	}
	return out
}

// checkVoters: after a whole command somebody votes, or nothing could be agreed again.
func checkVoters(t fatal, s *State) {
	t.Helper()
	if s.Cluster() != nil && !slices.ContainsFunc(s.Servers(), (*skeinv1.Server).GetVoter) {
		t.Fatalf("nobody votes")
	}
}

// anyCommand draws a command about few names, so that they meet; some of it is nonsense.
func anyCommand(t *rapid.T, s *State) *skeinv1.Command {
	name := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "no", ""})
	token := rapid.SampledFrom([]string{"1", "2", "3"})
	n := func() string { return name.Draw(t, "name") }
	var c *skeinv1.Command
	switch rapid.IntRange(0, 48).Draw(t, "command") {
	case 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26:
		c = anyPoolCommand(t, n)
		if b := c.GetAllocateBlocks(); b != nil {
			b.Site, b.SiteSaid = n(), rapid.Bool().Draw(t, "says its site")
		}
	case 27, 28, 29, 30, 31, 32, 33, 34:
		c = anyEgressCommand(t, s, n)
	case 35, 36, 37, 38:
		c = anyPodCommand(t, func() string { return n() })
	case 39, 40, 41:
		c = anySiteCommand(t, n)
	case 42, 43, 44, 45:
		c = anyPlainCommand(t, n)
	case 46, 47, 48:
		c = anyTranslationCommand(t, n)
	case 0:
		c = createCluster(rapid.SampledFrom([]string{"10.4.0.0/28", "10.4.0.0/16", "1.2.3.4/5", ""}).Draw(t, "overlay"), n())
	case 1:
		c = createToken(token.Draw(t, "token"), uint32(rapid.IntRange(0, 4).Draw(t, "uses")),
			rapid.Bool().Draw(t, "agents only"))
	case 2:
		c = revokeToken(token.Draw(t, "token"))
	case 3, 4, 5, 6:
		c = admit(n(), token.Draw(t, "token"), func(a *skeinv1.AdmitNode) {
			a.Node.Server = rapid.Bool().Draw(t, "server")
			a.Node.Site, a.Node.SiteSaid = n(), rapid.Bool().Draw(t, "says its site")
			if rapid.IntRange(0, 3).Draw(t, "twist") == 0 {
				a.Node.Name = n()
				a.Node.WireguardKey = key("wireguard", n())
				a.Node.MaxSchema = uint32(rapid.IntRange(0, 3).Draw(t, "schema"))
			} else {
				a.Node.MaxSchema = SchemaMax
			}
		})
	case 7:
		c = changeNode(n(), n(), map[string]string{"site": n()})
	case 8:
		c = revoke(id(n()))
	case 9:
		c = rotateKey(n(), n())
	case 10:
		c = addServer(id(n()))
	case 11:
		c = promote(id(n()))
	case 12:
		c = removeServer(id(n()))
		c.GetRemoveServer().Force = rapid.Bool().Draw(t, "force")
	default:
		c = rapid.SampledFrom([]*skeinv1.Command{rotateGossip(), {}, changeSettings(&skeinv1.Settings{BirthdayAttack: n()}),
			changeSettings(&skeinv1.Settings{ArchiveMaxEvents: 9999}, "archive_max_events")}).Draw(t, "other")
		c = proto.CloneOf(c)
	}
	c.RequestId = rapid.SampledFrom([]string{"", "", "r1", "r2", "r3", "r4"}).Draw(t, "request")
	c.Time = start.UnixNano() + rapid.Int64Range(0, int64(2*time.Hour)).Draw(t, "time")
	c.Entropy = entropy(rapid.IntRange(0, 1000).Draw(t, "entropy"))
	return c
}

// TestAnyHistory: whatever is asked in whatever order, the invariants hold, a retry changes nothing, and a
// replay as well as a snapshot with its tail gives the same state and hash.
func TestAnyHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewState()
		first := []*skeinv1.Command{today(createCluster("10.4.0.0/28", "a")), createToken("1", 5, false)}
		var log []*skeinv1.Event
		var snapshot *State
		for i := range rapid.IntRange(2, 60).Draw(t, "length") {
			c := anyCommand(t, s)
			if i < len(first) && rapid.IntRange(0, 9).Draw(t, "cluster") > 0 {
				c.Body = first[i].Body
			}
			before := s.Hash()
			evs, answer, err := Decide(s, c)
			if s.Hash() != before {
				t.Fatalf("Decide changed the state")
			}
			if err != nil {
				if CodeOf(err) == "" || evs != nil || answer != nil {
					t.Fatalf("%v is refused with %v %v %v", c, evs, answer, err)
				}
				continue
			}
			old := s.Clone()
			for _, e := range evs {
				if err := s.Fold(e); err != nil {
					t.Fatalf("fold %v: %v", e, err)
				}
				checkInvariants(t, s)
			}
			checkVoters(t, s)
			if old.Hash() != before {
				t.Fatalf("folding into a state changed its clone")
			}
			if answer.GetIndex() > s.Index() {
				t.Fatalf("the answer %v is ahead of the state at %d", answer, s.Index())
			}
			checkPoolRules(t, s)
			checkEgressRules(t, s)
			checkEpochs(t, old, s)
			if !c.GetImportPools().GetDryRun() {
				checkRetry(t, s, c, answer)
			} else if len(evs) > 0 {
				t.Fatalf("a dry run gives %v", evs)
			}
			log = append(log, evs...)
			if snapshot == nil && rapid.IntRange(0, 9).Draw(t, "snapshot") == 0 {
				snapshot = throughBytes(t, s)
			}
		}
		replayed := NewState()
		for _, e := range log {
			if err := replayed.Fold(e); err != nil {
				t.Fatalf("replay %v: %v", e, err)
			}
		}
		checkSame(t, "replay", s, replayed)
		checkSame(t, "snapshot", s, throughBytes(t, s))
		if snapshot != nil {
			for _, e := range log[snapshot.Index():] {
				if err := snapshot.Fold(e); err != nil {
					t.Fatalf("tail %v: %v", e, err)
				}
			}
			checkSame(t, "snapshot and tail", s, snapshot)
		}
	})
}

// checkRetry proposes the command again: with its request ID it gives the first answer, but for a long plan, and
// without one it may not make another node.
func checkRetry(t fatal, s *State, c *skeinv1.Command, answer *skeinv1.Answer) {
	t.Helper()
	if c.GetRequestId() == "" {
		return
	}
	answer = proto.CloneOf(answer)
	answer.Plan = Reference(answer).GetPlan()
	evs, again, err := Decide(s, c)
	if err != nil || len(evs) > 0 || !proto.Equal(again, answer) {
		t.Fatalf("a retry of %v gives %v %v %v, want %v", c, evs, again, err, answer)
	}
}

// throughBytes is a state that was written and read again.
func throughBytes(t fatal, s *State) *State {
	t.Helper()
	b, err := proto.Marshal(s.Proto())
	if err != nil {
		t.Fatalf("marshal: %v", err)
	}
	p := &skeinv1.State{}
	if err := proto.Unmarshal(b, p); err != nil {
		t.Fatalf("unmarshal: %v", err)
	}
	out, err := FromProto(p)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return out
}

// TestEveryShortHistory tries all sequences of a few commands, after a cluster and a token were made.
func TestEveryShortHistory(t *testing.T) {
	depth := 6
	if testing.Short() {
		depth = 4
	}
	alphabet := []func() *skeinv1.Command{
		func() *skeinv1.Command { return admit("b", "1", asServer) },
		func() *skeinv1.Command { return withID("join", admit("c", "1")) },
		func() *skeinv1.Command { return changeNode("b", "c", nil) },
		func() *skeinv1.Command { return revoke(id("a")) },
		func() *skeinv1.Command { return withID("lost", revoke(id("b"))) },
		func() *skeinv1.Command { return addServer(id("c")) },
		func() *skeinv1.Command { return promote(id("b")) },
		func() *skeinv1.Command { return promote(id("c")) },
		func() *skeinv1.Command { return removeServer(id("a")) },
		func() *skeinv1.Command { return rotateKey("a", "b") },
		func() *skeinv1.Command { return revokeToken("1") },
		func() *skeinv1.Command { return createToken("1", 1, false) },
		func() *skeinv1.Command { return rotateGossip() },
	}
	w := newWorld(t)
	w.must(createCluster("10.4.0.0/28", "a"))
	w.must(createToken("1", 2, false))
	states := 0
	var visit func(s *State, left int)
	visit = func(s *State, left int) {
		states++
		checkInvariants(t, s)
		checkVoters(t, s)
		checkSame(t, "snapshot", s, mustFromProto(t, s))
		if left == 0 {
			return
		}
		for i, make := range alphabet {
			c := make()
			c.Time = s.Time() + int64(time.Second)
			c.Entropy = entropy(100*left + i)
			evs, answer, err := Decide(s, c)
			if err != nil {
				if CodeOf(err) == "" {
					t.Fatalf("%v: %v", c, err)
				}
				continue
			}
			next := s.Clone()
			for _, e := range evs {
				if err := next.Fold(e); err != nil {
					t.Fatal(err)
				}
			}
			checkRetry(t, next, c, answer)
			if len(evs) > 0 {
				visit(next, left-1)
			}
		}
	}
	visit(w.s, depth)
	t.Logf("%d states", states)
}

func mustFromProto(t fatal, s *State) *State {
	t.Helper()
	out, err := FromProto(s.Proto())
	if err != nil {
		t.Fatalf("%v", err)
	}
	return out
}

// anyEvent draws a fact that no leader would append: few values, in any combination.
func anyEvent(t *rapid.T) *skeinv1.Event {
	pick := func(what string, of ...string) string { return rapid.SampledFrom(of).Draw(t, what) }
	nid := func() string { return pick("id", id("a"), id("b"), id("c"), "x", "") }
	k := func() []byte { return []byte(pick("key", "", "k1", "k2", "k3")) }
	node := func() *skeinv1.Node {
		return &skeinv1.Node{
			Id: nid(), Name: pick("name", "", "a", "b", "c"), WireguardKey: k(),
			Ipv4: pick("ipv4", "", "10.4.0.1", "10.4.0.2", "10.4.0.3", "fd00::1", "no"), Ipv6: pick("ipv6", "", "fd00::1",
				"fd00::2", "10.4.0.1"),
			AdmittedIndex: rapid.Uint64Range(0, 3).Draw(t, "admitted"),
		}
	}
	token := func() string { return pick("token", tokenID("1"), tokenID("2"), "") }
	e := &skeinv1.Event{Time: rapid.Int64().Draw(t, "time")}
	switch rapid.IntRange(0, 13).Draw(t, "body") {
	case 0:
		e.Body = &skeinv1.Event_ClusterCreated{ClusterCreated: &skeinv1.ClusterCreated{Cluster: &skeinv1.Cluster{Id: pick(
			"cluster", "x", "y")}}}
	case 1:
		e.Body = &skeinv1.Event_SettingsChanged{SettingsChanged: &skeinv1.SettingsChanged{
			Settings: &skeinv1.Settings{BirthdayAttack: pick("attack", "", "x")}}}
	case 2:
		e.Body = &skeinv1.Event_TokenCreated{TokenCreated: &skeinv1.TokenCreated{Token: &skeinv1.Token{Id: token(),
			UsesLeft: 1}}}
	case 3:
		e.Body = &skeinv1.Event_TokenUsed{TokenUsed: &skeinv1.TokenUsed{TokenId: token()}}
	case 4:
		e.Body = &skeinv1.Event_TokenRevoked{TokenRevoked: &skeinv1.TokenRevoked{TokenId: token()}}
	case 5, 6, 7:
		e.Body = &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: node()}}
	case 8:
		e.Body = &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: node()}}
	case 9:
		e.Body = &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: nid()}}
	case 10:
		e.Body = &skeinv1.Event_NodeKeyRotated{NodeKeyRotated: &skeinv1.NodeKeyRotated{NodeId: nid(), WireguardKey: k()}}
	case 11:
		e.Body = &skeinv1.Event_ServerAdded{ServerAdded: &skeinv1.ServerAdded{NodeId: nid()}}
	case 12:
		e.Body = &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{NodeId: nid()}}
	default:
		a := &skeinv1.Answer{RequestId: pick("request", "", "r1", "r2"), Index: rapid.Uint64Range(1, 30).Draw(t, "index")}
		e.Body = &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{Answer: a}}
	}
	return e
}

// TestAnyEvents: no log whatever breaks a state. It stays free of double owners, and its snapshot is taken
// back and folds on exactly as the state itself does.
func TestAnyEvents(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := NewState()
		var rebuilt *State
		for i := range rapid.IntRange(1, 40).Draw(t, "length") {
			e := anyEvent(t)
			e.Index = uint64(i + 1)
			if a := e.GetCommandAnswered().GetAnswer(); a != nil && rapid.Bool().Draw(t, "right index") {
				a.Index = e.Index
			}
			if err := s.Fold(e); err != nil {
				t.Fatalf("%v: %v", e, err)
			}
			if rebuilt != nil {
				if err := rebuilt.Fold(e); err != nil {
					t.Fatalf("%v: %v", e, err)
				}
			}
			if rebuilt == nil || rapid.IntRange(0, 4).Draw(t, "snapshot") == 0 {
				rebuilt = mustFromProto(t, s)
			}
			checkSame(t, "snapshot and tail", s, rebuilt)
			if rebuilt.newest != s.newest {
				t.Fatalf("the last address is %v, and %v when rebuilt", s.newest, rebuilt.newest)
			}
		}
	})
}
