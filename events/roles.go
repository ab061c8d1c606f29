package events

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Role is what a member may do in the cluster.
type Role string

// The roles. Each may do what the one before it may, and more.
const (
	RoleAgent  Role = "agent"  // speaks for itself only
	RoleAdmin  Role = "admin"  // gives cluster commands
	RoleServer Role = "server" // votes, and is an admin
)

// Roles are all roles, from the one with the fewest rights.
var Roles = []Role{RoleAgent, RoleAdmin, RoleServer}

// ParseRole reads a role's name.
func ParseRole(name string) (Role, error) {
	if r := Role(name); slices.Contains(Roles, r) {
		return r, nil
	}
	return "", refuse(InvalidArgument, "role %.40q does not exist: use agent, admin or server", name)
}

// Role is what a member may do; empty for one that is not a member. A cluster that is older than roles needs no
// conversion: its servers are servers, and all others are agents.
func (s *State) Role(id string) Role {
	n := find(&s.nodes, id)
	switch {
	case n == nil:
		return ""
	case find(&s.servers, id) != nil:
		return RoleServer
	case n.GetAdmin():
		return RoleAdmin
	}
	return RoleAgent
}

// Right says whether a role may give a command.
type Right string

// The rights. Own means: only for the node that gives the command.
const (
	No  Right = "no"
	Own Right = "own"
	Yes Right = "yes"
)

// Rule is a line of the table that says who may give which command.
type Rule struct {
	Command              string // the field of api/skein/v1/events.proto, in Command
	Agent, Admin, Server Right
	Why                  string // what the line rests on, for the documents
}

// Of is what a role may do by the rule.
func (r Rule) Of(role Role) Right {
	switch role {
	case RoleAgent:
		return r.Agent
	case RoleAdmin:
		return r.Admin
	case RoleServer:
		return r.Server
	}
	return No
}

// Rules is the table command × role. The leader decides by it, docs/security.md shows it, and the tests run through it.
var Rules = []Rule{
	{"create_cluster", No, No, No, "only on the first node itself, by `skein up --init`"},
	{"change_settings", No, Yes, Yes, ""},
	{"create_token", No, Yes, Yes, ""},
	{"revoke_token", No, Yes, Yes, ""},
	{"admit_node", Yes, Yes, Yes, "the token's secret is the proof, whoever hands the request on; a member that joins " +
		"again gets a new key by a server only"},
	{"change_node", Own, Yes, Yes, "an agent changes its event schemas only; nobody changes another node's schemas; " +
		"with its name, labels and settings (`skein node set`)"},
	{"revoke_node", No, Yes, Yes, ""},
	{"rotate_node_key", Own, Own, Own, ""},
	{"add_server", No, Yes, Yes, ""},
	{"promote_server", No, No, Yes, "the leader's own, once a server keeps up"},
	{"remove_server", No, Yes, Yes, ""},
	{"rotate_gossip_key", No, Yes, Yes, ""},
	{"create_pool", No, Yes, Yes, ""},
	{"change_pool", No, Yes, Yes, ""},
	{"remove_pool", No, Yes, Yes, ""},
	{"allocate_blocks", Own, Own, Yes, ""},
	{"reserve_block", No, Yes, Yes, ""},
	{"release_blocks", Own, Yes, Yes, "reserved blocks belong to no node: agents do not release them"},
	{"reserve_address", No, Yes, Yes, ""},
	{"claim_address", Own, Own, Yes, ""},
	{"release_address", No, Yes, Yes, ""},
	{"set_grant", Own, Own, Yes, ""},
	{"import_pools", No, Yes, Yes, ""},
	{"define_egress", No, Yes, Yes, ""},
	{"change_egress", No, Yes, Yes, ""},
	{"remove_egress", No, Yes, Yes, ""},
	{"assign_slot", No, No, Yes, "the leader's own"},
	{"release_slot", No, No, Yes, "the leader's own"},
	{"drain_node", Own, Yes, Yes, ""},
	{"repair_clock", No, No, Yes, "by any of them; the log's time becomes the leader's clock"},
	{"set_admin", No, Yes, Yes, "`skein node grant` and `withdraw`"},
	{"set_pod_cidrs", No, Yes, Yes, "by the apiserver's word; a member does not tell its own"},
	{"set_plain_peer", No, Yes, Yes, "who gives it chooses the carriers and makes their secrets"},
	{"remove_plain_peer", No, Yes, Yes, "the leader gives it for one that has expired"},
	{"set_site_translation", No, Yes, Yes, ""},
	{"remove_site_translation", No, Yes, Yes, ""},
	{"introduce_roles", No, No, Yes, "the leader's own, in a cluster that is older than roles"},
}

// RuleOf is the line of a command.
func RuleOf(c *skeinv1.Command) (Rule, bool) {
	kind := KindOf(c)
	for _, r := range Rules {
		if r.Command == kind {
			return r, true
		}
	}
	return Rule{}, false
}

// KindOf is the name of a command's body in the schema; empty without one.
func KindOf(c *skeinv1.Command) string {
	m := c.ProtoReflect()
	if f := m.WhichOneof(commandBody); f != nil {
		return string(f.Name())
	}
	return ""
}

var commandBody = func() protoreflect.OneofDescriptor {
	return (&skeinv1.Command{}).ProtoReflect().Descriptor().Oneofs().ByName("body")
}()

// Authorise says whether the command's issuer may give it, in this state. The leader asks before it decides. A log
// without a cluster is at home on its own host, and takes whatever makes the cluster.
func Authorise(s *State, c *skeinv1.Command) error {
	id, err := identity.ParseID(c.GetIssuer())
	if err != nil {
		return refuse(InvalidArgument, "the command's issuer: %v", err)
	}
	if s.Cluster() == nil {
		return nil
	}
	role := s.Role(c.GetIssuer())
	if role == "" {
		if s.Revoked(id) != nil {
			return refuse(PermissionDenied, "node %s was revoked", id)
		}
		return refuse(PermissionDenied, "node %s is not a member", id)
	}
	rule, ok := RuleOf(c)
	if !ok {
		return refuse(InvalidArgument, "the leader does not know the command, or it is empty: upgrade skein on the servers")
	}
	switch right := rule.Of(role); {
	case right == No:
		return s.denied(c.GetIssuer(), role, rule)
	case right == Own && concerns(c) != c.GetIssuer():
		return s.deniedFor(c, role, rule)
	}
	return s.authoriseParts(c, role)
}

// authoriseParts looks into commands of which a role may give a part.
func (s *State) authoriseParts(c *skeinv1.Command, role Role) error {
	switch b := c.GetBody().(type) {
	case *skeinv1.Command_ChangeNode:
		own := b.ChangeNode.GetNodeId() == c.GetIssuer()
		if !own && (b.ChangeNode.GetMinSchema() != 0 || b.ChangeNode.GetMaxSchema() != 0) {
			return refuse(PermissionDenied, "only %s itself may say which event schemas it folds, and not %s",
				s.called(b.ChangeNode.GetNodeId()), s.called(c.GetIssuer()))
		}
		if role == RoleAgent && (b.ChangeNode.GetName() != "" || b.ChangeNode.GetSetLabels() ||
			len(b.ChangeNode.GetSettingsFields()) > 0) {
			return refuse(PermissionDenied, "%s is an agent and may not change its name, labels or settings: %s",
				s.called(c.GetIssuer()), s.wayOut(c.GetIssuer()))
		}
	case *skeinv1.Command_AdmitNode:
		if len(b.AdmitNode.GetTokenSecret()) == 0 && role != RoleServer {
			return refuse(PermissionDenied, "%s passed a join on without the token's secret, as versions before roles do: "+
				"join at a server, or upgrade skein on %[1]s",
				s.called(c.GetIssuer()))
		}
	}
	return nil
}

// concerns is the node for which a command speaks; empty: for none, or for all.
func concerns(c *skeinv1.Command) string {
	switch b := c.GetBody().(type) {
	case *skeinv1.Command_ChangeNode:
		return b.ChangeNode.GetNodeId()
	case *skeinv1.Command_RotateNodeKey:
		return b.RotateNodeKey.GetNodeId()
	case *skeinv1.Command_AllocateBlocks:
		return b.AllocateBlocks.GetNodeId()
	case *skeinv1.Command_ReleaseBlocks:
		return b.ReleaseBlocks.GetNodeId()
	case *skeinv1.Command_ClaimAddress:
		return b.ClaimAddress.GetNodeId()
	case *skeinv1.Command_SetGrant:
		return b.SetGrant.GetNodeId()
	case *skeinv1.Command_DrainNode:
		return b.DrainNode.GetNodeId()
	}
	return ""
}

// called is a member's name, or the ID of one that is gone.
func (s *State) called(id string) string {
	if n := find(&s.nodes, id); n != nil {
		return n.GetName()
	}
	return id
}

func (s *State) denied(issuer string, role Role, rule Rule) error {
	switch {
	case rule.Server == No:
		return refuse(PermissionDenied, "a cluster is created on its first node, with skein up --init")
	case rule.Admin == No:
		return refuse(PermissionDenied, "%s is %s, and only servers may do this (%s)", s.called(issuer),
			article(role), rule.Command)
	}
	return refuse(PermissionDenied, "%s is %s, and this is for admins and servers (%s): %s", s.called(issuer),
		article(role), rule.Command, s.wayOut(issuer))
}

func (s *State) deniedFor(c *skeinv1.Command, role Role, rule Rule) error {
	who := s.called(c.GetIssuer())
	if rule.Server == Own {
		return refuse(PermissionDenied, "%s may do this for itself only (%s)", who, rule.Command)
	}
	if rule.Admin == Own {
		return refuse(PermissionDenied, "%s is %s and may do this for itself only (%s)", who, article(role), rule.Command)
	}
	return refuse(PermissionDenied, "%s is %s and may do this for itself only (%s): %s", who, article(role), rule.Command,
		s.wayOut(c.GetIssuer()))
}

func article(r Role) string {
	if r == RoleServer {
		return "a server"
	}
	return "an " + string(r)
}

// wayOut names nodes that may give cluster commands, and how to grant it.
func (s *State) wayOut(issuer string) string {
	const most = 3
	var names []string
	more := false
	for _, n := range s.Nodes() {
		if r := s.Role(n.GetId()); r != RoleAdmin && r != RoleServer {
			continue
		}
		if more = len(names) == most; more {
			break
		}
		names = append(names, n.GetName())
	}
	where := strings.Join(names, " or ")
	if len(names) > 2 {
		where = strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
	}
	if more {
		where = strings.Join(names, ", ") + " or another of them"
	}
	return fmt.Sprintf("run it on %s, or there run `skein node grant %s admin` first", where, s.called(issuer))
}

func (d *decision) setAdmin(c *skeinv1.SetAdmin) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	d.answer.Node = n
	next := proto.CloneOf(n)
	next.Admin = c.GetAdmin()
	d.emitChange(next)
	return nil
}

// introduceRoles notes since when commands of a grown cluster need a role.
func (d *decision) introduceRoles() error {
	if d.s.Settings().GetRolesSince() != 0 {
		return nil
	}
	next := &skeinv1.Settings{}
	if have := d.s.settings.get(); have != nil {
		next = proto.CloneOf(have)
	}
	next.RolesSince = d.c.GetTime()
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_SettingsChanged{SettingsChanged: &skeinv1.SettingsChanged{Settings: next}}})
	return nil
}
