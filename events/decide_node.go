package events

import (
	"cmp"
	"crypto/ed25519"
	"maps"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// admission is the token by which a node may ask to be admitted, or why it may not.
func (d *decision) admission(c *skeinv1.AdmitNode) (*skeinv1.Token, error) {
	want := c.GetNode()
	if err := checkNewNode(want); err != nil {
		return nil, err
	}
	if have := d.s.Cluster().GetId(); c.GetClusterId() != have {
		return nil, refuse(PermissionDenied, "the join token is for cluster %.40q and this is cluster %s: make a token on "+
			"a member of this one with skein token create", c.GetClusterId(), have)
	}
	t, err := d.token(c)
	if err != nil {
		return nil, err
	}
	id := identity.IDOf(ed25519.PublicKey(want.GetIdentityKey()))
	if d.s.Revoked(id) != nil {
		return nil, refuse(PermissionDenied, "node %s (%s) was revoked and cannot come back: move identity.pem out of its "+
			"state directory to join as a new node", id, want.GetName())
	}
	return t, nil
}

func (d *decision) admitNode(c *skeinv1.AdmitNode) error {
	t, err := d.admission(c)
	if err != nil {
		return err
	}
	want := c.GetNode()
	id := identity.IDOf(ed25519.PublicKey(want.GetIdentityKey()))
	if old := d.s.Node(id); old != nil {
		return d.readmit(old, want)
	}
	if t.GetUsesLeft() == 0 {
		return refuse(PermissionDenied, "join token %s is used up (%d uses): make a new one on a member with skein token "+
			"create", t.GetId(), t.GetUses())
	}
	if want.GetServer() && Role(t.GetRole()) != RoleServer {
		return refuse(PermissionDenied, "join token %s gives the role %s and %s wants to be a server: ask for a token made "+
			"with skein token create --role server, or remove server: true from skein.yaml and have the role granted later",
			t.GetId(), cmp.Or(t.GetRole(), string(RoleAgent)), want.GetName())
	}
	if want.GetServer() {
		if err := d.checkServerSchema(want.GetName(), max(want.GetMaxSchema(), 1)); err != nil {
			return err
		}
	}
	if err := d.checkFree(want); err != nil {
		return err
	}
	cluster, err := checkClusterID(c.GetClusterId())
	if err != nil {
		return err
	}
	ipv4, ipv6, err := d.overlay(want, cluster, id)
	if err != nil {
		return err
	}
	if d.s.taken(&d.s.addresses, ipv6.String(), "") {
		return refuse(AlreadyExists, "the overlay address %s of node %s is taken: move identity.pem out of its state "+
			"directory to get a new identity", ipv6, want.GetName())
	}
	n := d.newNode(want, ipv4, ipv6)
	n.AgentsOnly = t.GetAgentsOnly()
	n.Admin = Role(t.GetRole()) == RoleAdmin
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: n,
		TokenId: t.GetId()}}})
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_TokenUsed{TokenUsed: &skeinv1.TokenUsed{TokenId: t.GetId(),
		NodeId: n.GetId()}}})
	if want.GetServer() {
		d.emitServerAdded(n.GetId())
	}
	d.answer.Node = n
	return nil
}

// readmit answers a member that joins again, as after a lost answer or a lost replica: a used-up token does. Only the
// node that hands the join on has seen the member prove its identity, and whoever knows a token could claim that. So a
// new WireGuard key or version is taken over by the word of a server alone; a member tells its version itself when it
// is in again. The name and labels that were agreed stay.
func (d *decision) readmit(old *skeinv1.Node, want *skeinv1.NewNode) error {
	if string(old.GetIdentityKey()) != string(want.GetIdentityKey()) {
		return refuse(AlreadyExists, "the identity key of %s has the node ID %s of %s: move identity.pem out of its state "+
			"directory to get a new one", want.GetName(), old.GetId(), old.GetName())
	}
	d.answer.Node = old
	next := proto.CloneOf(old)
	next.MinSchema, next.MaxSchema = schemaRange(want.GetMinSchema(), want.GetMaxSchema())
	if err := d.checkLowered(old, next); err != nil {
		return err
	}
	if d.s.Role(d.c.GetIssuer()) != RoleServer {
		if string(old.GetWireguardKey()) == string(want.GetWireguardKey()) {
			return nil
		}
		return refuse(PermissionDenied, "node %s (%s) is a member with another WireGuard key, and %s, which hands the join "+
			"on, "+
			"is not a server: join at a server, put the former wireguard.pem back, "+
			"or move identity.pem out of its state directory to join as a new node",
			old.GetId(), old.GetName(), d.s.called(d.c.GetIssuer()))
	}
	if err := d.emitKey(want.GetWireguardKey()); err != nil {
		return err
	}
	next.WireguardKey = d.answer.GetNode().GetWireguardKey()
	d.emitChange(next)
	return nil
}

// checkFree refuses what belongs to another node already.
func (d *decision) checkFree(want *skeinv1.NewNode) error {
	if err := d.checkNameFree(want.GetName()); err != nil {
		return err
	}
	return d.checkKeyFree(want.GetName(), want.GetWireguardKey())
}

func (d *decision) checkNameFree(name string) error {
	if other := d.s.NodeByName(name); other != nil {
		return refuse(AlreadyExists, "the name %s is taken by node %s (%s): choose another, or revoke that node first with "+
			"skein node revoke %s", name, other.GetId(), other.GetIpv4(), name)
	}
	if p := d.s.PlainPeer(name); p != nil {
		return refuse(AlreadyExists, "the name %s is taken by a plain peer (%s): choose another, or remove that peer first "+
			"with skein peer remove %[1]s", name, p.GetIpv4())
	}
	return nil
}

func (d *decision) checkKeyFree(name string, key []byte) error {
	holder, ok := d.s.keys.get(textKey(string(key)), string(key))
	if !ok {
		return nil
	}
	if n := find(&d.s.nodes, holder); n != nil {
		return refuse(AlreadyExists, "the WireGuard key of %s is used by node %s: move wireguard.pem out of its state "+
			"directory to get a new one", name, n.GetName())
	}
	if strings.HasPrefix(holder, plainOwner) {
		return refuse(AlreadyExists, "the WireGuard key of %s is used by %s: move wireguard.pem out of its state directory "+
			"to get a new one", name, holder)
	}
	return refuse(PermissionDenied, "the WireGuard key of %s belonged to the revoked node %s: move wireguard.pem out of "+
		"its state directory to get a new one", name, holder)
}

// newNode is the node that the next event admits.
func (d *decision) newNode(want *skeinv1.NewNode, ipv4, ipv6 netip.Addr) *skeinv1.Node {
	id := identity.IDOf(ed25519.PublicKey(want.GetIdentityKey()))
	low, high := schemaRange(want.GetMinSchema(), want.GetMaxSchema())
	return &skeinv1.Node{
		Id: id.String(), Name: want.GetName(), IdentityKey: want.GetIdentityKey(), WireguardKey: want.GetWireguardKey(),
		Ipv4: ipv4.String(), Ipv6: ipv6.String(), Labels: maps.Clone(want.GetLabels()),
		AdmittedAt: d.c.GetTime(), AdmittedIndex: d.nextIndex(), MinSchema: low, MaxSchema: high,
	}
}

// node is the live node of that ID.
func (d *decision) node(id string) (*skeinv1.Node, error) {
	if n := find(&d.s.nodes, id); n != nil {
		return n, nil
	}
	if r := find(&d.s.revoked, id); r != nil {
		return nil, refuse(FailedPrecondition, "node %s (%s) was revoked at %s", id, r.GetNode().GetName(),
			time.Unix(0, r.GetRevokedAt()).UTC().Format(time.RFC3339))
	}
	return nil, refuse(NotFound, "node %.40q is not a member: skein nodes shows those that are", id)
}

func (d *decision) changeNode(c *skeinv1.ChangeNode) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	next := proto.CloneOf(n)
	if name := c.GetName(); name != "" && name != n.GetName() {
		if err := checkName(name); err != nil {
			return err
		}
		if err := d.checkNameFree(name); err != nil {
			return err
		}
		next.Name = name
	}
	if c.GetSetLabels() {
		if err := checkLabelsAre(n, c); err != nil {
			return err
		}
		if err := checkLabels(c.GetLabels()); err != nil {
			return err
		}
		next.Labels = maps.Clone(c.GetLabels())
	}
	if c.GetMinSchema() != 0 {
		next.MinSchema = c.GetMinSchema()
	}
	if c.GetMaxSchema() != 0 {
		next.MaxSchema = c.GetMaxSchema()
	}
	if err := checkSchemas(next.GetMinSchema(), next.GetMaxSchema()); err != nil {
		return err
	}
	if err := d.checkLowered(n, next); err != nil {
		return err
	}
	d.answer.Node = n
	d.emitChange(next)
	return d.changeNodeSettings(n, c)
}

// emitChange makes the node of the answer the next one, if they differ.
func (d *decision) emitChange(next *skeinv1.Node) {
	if !proto.Equal(next, d.answer.GetNode()) {
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: next}}})
		d.answer.Node = next
	}
}

func (d *decision) rotateNodeKey(c *skeinv1.RotateNodeKey) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	if err := checkKey("the WireGuard key of "+n.GetName(), c.GetWireguardKey()); err != nil {
		return err
	}
	d.answer.Node = n
	return d.emitKey(c.GetWireguardKey())
}

// emitKey gives the node of the answer another WireGuard key, if it is another.
func (d *decision) emitKey(key []byte) error {
	n := d.answer.GetNode()
	if string(n.GetWireguardKey()) == string(key) {
		return nil
	}
	if err := d.checkKeyFree(n.GetName(), key); err != nil {
		return err
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeKeyRotated{NodeKeyRotated: &skeinv1.NodeKeyRotated{NodeId: n.GetId(),
		WireguardKey: key}}})
	d.answer.Node = proto.CloneOf(n)
	d.answer.Node.WireguardKey = key
	return nil
}

// revokeNode takes a member out for good, with its server role, and makes gossip forget it.
func (d *decision) revokeNode(c *skeinv1.RevokeNode) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	if r := find(&d.s.revoked, c.GetNodeId()); r != nil {
		d.answer.Node = r.GetNode()
		return nil
	}
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	server := find(&d.s.servers, n.GetId()) != nil
	if server {
		if err := d.checkQuorumWithout(n, c.GetForce()); err != nil {
			return err
		}
		d.emitServerRemoved(n.GetId(), "revoked")
	}
	for _, v := range d.s.SlotsOf(n.GetId()) {
		d.emitSlotReleased(v, "revoked")
	}
	d.giveAllBack(n.GetId(), "revoked")
	n = d.withoutLabels(n)
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: n.GetId(),
		Reason: d.revokedReason(c.GetReason())}}})
	d.answer.Node = withoutSettings(n) // as it is answered when the command is repeated
	return d.rotateGossipKey()
}
