package events

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// roleWorld has a server "server", an admin "admin", and the agents "agent" and "other".
func roleWorld(t *testing.T) *world {
	w := newCluster(t)
	for name, role := range map[string]Role{"admin": RoleAdmin, "agent": RoleAgent, "other": RoleAgent,
		"server": RoleServer} {
		c := createToken("for "+name, 1, false)
		c.GetCreateToken().Role = string(role)
		w.must(c)
		w.must(admit(name, "for "+name, func(a *skeinv1.AdmitNode) { a.Node.Server = role == RoleServer }))
	}
	return w
}

// sample is a command of a kind, from a member, about a node. What it asks for need not be possible.
func sample(t *testing.T, kind, issuer, about string) *skeinv1.Command {
	t.Helper()
	c := &skeinv1.Command{Issuer: issuer}
	m := c.ProtoReflect()
	f := m.Descriptor().Fields().ByName(protoreflect.Name(kind))
	if f == nil {
		t.Fatalf("the table has a command %q that the schema does not", kind)
	}
	body := m.NewField(f).Message()
	if id := body.Descriptor().Fields().ByName("node_id"); id != nil && about != "" {
		body.Set(id, protoreflect.ValueOfString(about))
	}
	m.Set(f, protoreflect.ValueOfMessage(body))
	if a := c.GetAdmitNode(); a != nil {
		a.TokenSecret = []byte("secret")
	}
	return c
}

// TestTable runs through the table: each command, from each role, about itself and about another member.
func TestTable(t *testing.T) {
	w := roleWorld(t)
	for _, rule := range Rules {
		for _, role := range Roles {
			self, other := w.id(string(role)), w.id("other")
			own := Authorise(w.s, sample(t, rule.Command, self, self))
			others := Authorise(w.s, sample(t, rule.Command, self, other))
			want := map[Right][2]bool{No: {}, Own: {true, false}, Yes: {true, true}}[rule.Of(role)]
			if (own == nil) != want[0] || (others == nil) != want[1] {
				t.Errorf("%s by a node with the role %s: the table says %q; for itself: %v; for another: %v", rule.Command, role,
					rule.Of(role), own, others)
			}
			for _, err := range []error{own, others} {
				if err != nil && CodeOf(err) != PermissionDenied {
					t.Errorf("%s by a node with the role %s is refused as %s: %v", rule.Command, role, CodeOf(err), err)
				}
			}
		}
	}
}

// TestTableIsComplete: a command that is added to the schema needs a line in the table.
func TestTableIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range Rules {
		if seen[r.Command] {
			t.Errorf("%s stands twice in the table", r.Command)
		}
		seen[r.Command] = true
	}
	for i := range commandBody.Fields().Len() {
		if name := string(commandBody.Fields().Get(i).Name()); !seen[name] {
			t.Errorf("%s is missing in the table", name)
		}
	}
}

func TestAuthoriseRefuses(t *testing.T) {
	w := roleWorld(t)
	w.must(revoke(w.id("other")))
	agent, admin := w.id("agent"), w.id("admin")
	by := func(issuer string, c *skeinv1.Command) *skeinv1.Command { c.Issuer = issuer; return c }
	secret := func(a *skeinv1.AdmitNode) { a.TokenSecret = []byte("x") }
	for name, q := range map[string]struct {
		command *skeinv1.Command
		text    string // empty: may
	}{
		"nobody":                    {by("", rotateGossip()), "issuer"},
		"a stranger":                {by(idOf("stranger").String(), rotateGossip()), "is not a member"},
		"one that was revoked":      {by(idOf("other").String(), rotateGossip()), "was revoked"},
		"an empty command":          {&skeinv1.Command{Issuer: admin}, "does not know the command, or it is empty"},
		"an agent, and who may":     {by(agent, rotateGossip()), "run it on "},
		"an agent, and the way out": {by(agent, rotateGossip()), "`skein node grant agent admin`"},
		"an agent names itself anew": {by(agent, changeNode("agent", "boss", nil)), "may not change its name, labels " +
			"or settings"},
		"an agent labels itself": {by(agent, changeNode("agent", "", map[string]string{"egress": "yes"})),
			"may not change its name, labels or settings"},
		"an agent leads its site": {by(agent, setNode("agent", &skeinv1.NodeSettings{Leader: "yes"}, "leader")),
			"may not change its name, labels or settings"},
		"an admin, another's site":       {by(admin, setNode("agent", &skeinv1.NodeSettings{SiteSet: true}, "site")), ""},
		"an agent's own schemas":         {by(agent, schemas(agent, 1, 2)), ""},
		"an admin, another's schemas":    {by(admin, schemas(agent, 1, 1)), "itself may say which event schemas it folds"},
		"an admin, another's labels":     {by(admin, changeNode("agent", "", map[string]string{"egress": "yes"})), ""},
		"an admin, another's key":        {by(admin, rotateKey("agent", "mine")), "for itself only"},
		"a join with the secret":         {by(agent, admit("new", "1", secret)), ""},
		"a join with the hash, by agent": {by(agent, admit("new", "1")), "without the token's secret"},
		"the same by a server":           {by(w.id("server"), admit("new", "1")), ""},
	} {
		err := Authorise(w.s, q.command)
		if (err == nil) != (q.text == "") || err != nil && !strings.Contains(err.Error(), q.text) {
			t.Errorf("%s: %v, want %q", name, err, q.text)
		}
	}
}

func schemas(id string, low, high uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id, MinSchema: low,
		MaxSchema: high}}}
}

func setAdmin(id string, admin bool) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: id, Admin: admin}}}
}

func TestRolesAreGrantedAndWithdrawn(t *testing.T) {
	w := roleWorld(t)
	is := func(name string, want Role) {
		t.Helper()
		if have := w.s.Role(w.id(name)); have != want {
			t.Errorf("%s has the role %q, want %q", name, have, want)
		}
	}
	is("agent", RoleAgent)
	is("admin", RoleAdmin)
	is("server", RoleServer)
	agent := w.id("agent")
	w.must(setAdmin(agent, true))
	is("agent", RoleAdmin)
	w.must(addServer(agent))
	is("agent", RoleServer)
	if w.s.Node(idOf("agent")).GetAgentsOnly() {
		t.Error("for leaders older than roles it still may not be a server")
	}
	w.must(removeServer(agent)) // and is the admin again that it was
	is("agent", RoleAdmin)
	w.must(setAdmin(agent, false))
	is("agent", RoleAgent)
	if evs, _, err := w.propose(setAdmin(agent, false)); err != nil || len(evs) != 0 {
		t.Errorf("a role that was withdrawn is withdrawn again: %v, %v", evs, err)
	}
	if _, _, err := w.propose(setAdmin(idOf("stranger").String(), true)); CodeOf(err) != NotFound {
		t.Errorf("a stranger is granted a role: %v", err)
	}
	if s := w.s.Role(idOf("stranger").String()); s != "" {
		t.Errorf("a stranger has the role %s", s)
	}
	w.must(removeServer(w.id("server")))
	if _, _, err := w.propose(removeServer(w.id("a"))); CodeOf(err) != FailedPrecondition {
		t.Errorf("the last server was taken away: %v", err)
	}
}

// TestTokensGiveRoles: what a joiner is follows from its token, and never from what it asks for alone.
func TestTokensGiveRoles(t *testing.T) {
	for _, q := range []struct {
		role       string
		agentsOnly bool
		server     bool // what the joiner wants
		want       Role // empty: refused
	}{
		{"", false, false, RoleAgent}, {"", false, true, ""}, {"agent", false, true, ""}, {"", true, true, ""},
		{"admin", false, false, RoleAdmin}, {"admin", false, true, ""},
		{"server", false, true, RoleServer}, {"server", false, false, RoleAgent},
	} {
		t.Run(fmt.Sprintf("%+v", q), func(t *testing.T) {
			w := newCluster(t)
			c := createToken("x", 1, false)
			c.GetCreateToken().Role, c.GetCreateToken().AgentsOnly = q.role, q.agentsOnly
			w.must(c)
			_, _, err := w.propose(admit("b", "x", func(a *skeinv1.AdmitNode) { a.Node.Server = q.server }))
			if q.want == "" {
				if CodeOf(err) != PermissionDenied || !strings.Contains(err.Error(), "--role server") {
					t.Fatalf("admitted as %q: %v", w.s.Role(idOf("b").String()), err)
				}
				return
			}
			if have := w.s.Role(idOf("b").String()); err != nil || have != q.want {
				t.Fatalf("the role %q, want %q: %v", have, q.want, err)
			}
		})
	}
	w := newCluster(t)
	for text, change := range map[string]func(*skeinv1.CreateToken){
		"does not exist": func(c *skeinv1.CreateToken) { c.Role = "king" },
		"agents only":    func(c *skeinv1.CreateToken) { c.Role, c.AgentsOnly = "server", true },
	} {
		c := createToken("bad", 1, true)
		change(c.GetCreateToken())
		if _, _, err := w.propose(c); CodeOf(err) != InvalidArgument || !strings.Contains(err.Error(), text) {
			t.Errorf("%v: %v, want %q", c, err, text)
		}
	}
}

// TestTokensOfAnOlderVersion: the log of a grown cluster has tokens without a role. They let agents in.
func TestTokensOfAnOlderVersion(t *testing.T) {
	w := newCluster(t)
	i := w.s.Index() + 1
	e := &skeinv1.Event{Index: i, Time: w.s.Time(), Schema: 1,
		Body: &skeinv1.Event_TokenCreated{TokenCreated: &skeinv1.TokenCreated{Token: &skeinv1.Token{
			Id: tokenID("old"), SecretHash: key("secret", "old"), ExpiresAt: w.s.Time() * 2, Uses: 2, UsesLeft: 2}}}}
	if err := w.s.Fold(e); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.propose(admit("b", "old", asServer)); CodeOf(err) != PermissionDenied {
		t.Errorf("a token without a role lets a server in: %v", err)
	}
	w.must(admit("b", "old"))
	if r := w.s.Role(idOf("b").String()); r != RoleAgent {
		t.Errorf("it gives the role %q", r)
	}
}

// TestTheSecretCounts: the hash of a secret is in every replica, so that it proves nothing.
func TestTheSecretCounts(t *testing.T) {
	w := newCluster(t)
	secret := sum256([]byte("secret"))
	c := createToken("s", 9, true)
	c.GetCreateToken().SecretHash = sum256(secret)
	w.must(c)
	wrong := admit("b", "s", func(a *skeinv1.AdmitNode) {
		a.TokenSecret, a.TokenSecretHash = []byte("wrong"),
			sum256(secret)
	})
	if _, _, err := w.propose(wrong); CodeOf(err) != PermissionDenied {
		t.Errorf("a wrong secret beside the right hash was taken: %v", err)
	}
	w.must(admit("b", "s", func(a *skeinv1.AdmitNode) { a.TokenSecret, a.TokenSecretHash = secret, nil }))
}

// TestSignedTokens: who hands a signed join on can admit the node that signed it, as it asked for it, and nobody else.
func TestSignedTokens(t *testing.T) {
	w := newCluster(t)
	secret := sum256([]byte("secret"))
	for _, name := range []string{"s", "other"} {
		c := createToken(name, 9, false)
		c.GetCreateToken().SecretHash, c.GetCreateToken().Signed = sum256(TokenKey(secret)), true
		w.must(c)
	}
	signed := func(name string, change ...func(*skeinv1.AdmitNode)) *skeinv1.Command {
		return admit(name, "s", func(a *skeinv1.AdmitNode) {
			a.TokenSecretHash, a.TokenSecret = nil, TokenKey(secret)
			a.TokenProof = ProveJoin(secret, clusterID, tokenID("s"), a.GetNode())
			for _, f := range change {
				f(a)
			}
		})
	}
	for name, q := range map[string]struct {
		change func(*skeinv1.AdmitNode)
		text   string
	}{
		"another node":  {func(a *skeinv1.AdmitNode) { a.Node = newNode("puppet") }, "not signed"},
		"another wish":  {func(a *skeinv1.AdmitNode) { a.Node.Server = true }, "not signed"},
		"other labels":  {func(a *skeinv1.AdmitNode) { a.Node.Labels["egress"] = "yes" }, "not signed"},
		"another token": {func(a *skeinv1.AdmitNode) { a.TokenId = tokenID("other") }, "not signed"},
		"no proof":      {func(a *skeinv1.AdmitNode) { a.TokenProof = nil }, "not signed"},
		"the hash alone": {func(a *skeinv1.AdmitNode) {
			a.TokenSecret, a.TokenSecretHash = nil, sum256(TokenKey(secret))
		}, "not signed"},
		"another key": {func(a *skeinv1.AdmitNode) { a.TokenSecret = TokenKey(sum256([]byte("mine"))) },
			"wrong or was revoked"},
		"by an older joiner": {func(a *skeinv1.AdmitNode) { a.TokenSecret, a.TokenProof = secret, nil },
			"upgrade skein on b"},
	} {
		if _, _, err := w.propose(signed("b", q.change)); CodeOf(err) != PermissionDenied ||
			!strings.Contains(err.Error(), q.text) {
			t.Errorf("%s: %v, want %q", name, err, q.text)
		}
	}
	w.must(signed("b"))
	w.must(signed("b")) // the first answer was lost
}

// TestRolesAreIntroducedOnce: a cluster of today has roles from its start, and one that is older notes when they came.
func TestRolesAreIntroducedOnce(t *testing.T) {
	introduce := func() *skeinv1.Command {
		return &skeinv1.Command{Body: &skeinv1.Command_IntroduceRoles{IntroduceRoles: &skeinv1.IntroduceRoles{}}}
	}
	w := newCluster(t)
	if since := w.s.Settings().GetRolesSince(); since != w.s.Cluster().GetCreatedAt() {
		t.Errorf("a new cluster has roles since %d, and was created at %d", since, w.s.Cluster().GetCreatedAt())
	}
	if evs, _, err := w.propose(introduce()); err != nil || len(evs) != 0 {
		t.Errorf("they are introduced again: %v, %v", evs, err)
	}
	old := newWorld(t)
	for _, e := range recordedLog(t, "log.jsonl") {
		if err := old.s.Fold(e); err != nil {
			t.Fatal(err)
		}
	}
	before := old.s.Settings()
	old.now = start.AddDate(1, 0, 0)
	old.must(introduce())
	after := old.s.Settings()
	if after.GetRolesSince() != old.now.UnixNano() {
		t.Errorf("since %d, want %d", after.GetRolesSince(), old.now.UnixNano())
	}
	if after.RolesSince = 0; after.String() != before.String() {
		t.Errorf("other settings changed: %v, before %v", after, before)
	}
	old.must(changeSettings(&skeinv1.Settings{BirthdayAttack: "disabled"}))
	if old.s.Settings().GetRolesSince() == 0 {
		t.Error("a command about settings took the note away")
	}
}

// TestJoiningAgainInAnothersName: whoever knows a token, also a used-up one, can hand on an admission of any member.
// Its key and what it folds change only by the word of a server, which has seen the member prove its identity.
func TestJoiningAgainInAnothersName(t *testing.T) {
	w := roleWorld(t)
	before := w.s.Node(idOf("other"))
	again := func(issuer string, change func(*skeinv1.NewNode)) *skeinv1.Command {
		c := admit("other", "for agent", func(a *skeinv1.AdmitNode) { change(a.GetNode()) }) // used up
		c.Issuer = w.id(issuer)
		return c
	}
	newKey := func(n *skeinv1.NewNode) { n.WireguardKey = key("wireguard", "mine") }
	newSchemas := func(n *skeinv1.NewNode) { n.MaxSchema = 7 }
	for _, issuer := range []string{"agent", "admin"} {
		w.refused(again(issuer, newKey), PermissionDenied, "is not a server")
		if a := w.must(again(issuer, newSchemas)); !proto.Equal(a.GetNode(), before) {
			t.Errorf("by %s it is %v, and was %v", issuer, a.GetNode(), before)
		}
		w.must(again(issuer, func(*skeinv1.NewNode) {})) // its answer was lost
	}
	if n := w.s.Node(idOf("other")); !proto.Equal(n, before) {
		t.Errorf("it is %v, and was %v", n, before)
	}
	w.must(again("server", newKey))
	w.must(again("server", func(n *skeinv1.NewNode) { newKey(n); newSchemas(n) }))
	n := w.s.Node(idOf("other"))
	if string(n.GetWireguardKey()) != string(key("wireguard", "mine")) || n.GetMaxSchema() != 7 {
		t.Errorf("by a server it is %v", n)
	}
}
