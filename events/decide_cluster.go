package events

import (
	"cmp"
	"crypto/ed25519"
	"crypto/subtle"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func (d *decision) createCluster(c *skeinv1.CreateCluster) error {
	cluster, err := checkClusterID(c.GetClusterId())
	if err != nil {
		return err
	}
	if err := checkNewNode(c.GetFirstNode()); err != nil {
		return err
	}
	id := identity.IDOf(ed25519.PublicKey(c.GetFirstNode().GetIdentityKey()))
	if have := d.s.Cluster(); have != nil {
		if n := d.s.Node(id); have.GetId() == c.GetClusterId() && n != nil {
			d.answer.Node = n
			return nil
		}
		return refuse(AlreadyExists, "this log already belongs to cluster %s: use another state directory for a new cluster",
			have.GetId())
	}
	overlay, err := checkOverlay(cmp.Or(c.GetOverlayIpv4(), DefaultOverlayIPv4))
	if err != nil {
		return err
	}
	if err := checkSettings(c.GetSettings()); err != nil {
		return err
	}
	seed, err := d.secret("psk seed")
	if err != nil {
		return err
	}
	settings := &skeinv1.Settings{}
	if c.GetSettings() != nil {
		settings = proto.CloneOf(c.GetSettings())
	}
	settings.RolesSince, settings.FouPortChange = d.c.GetTime(), nil
	settings.PodRanges = plainPrefixes(settings.GetPodRanges())
	created := &skeinv1.Cluster{
		Id: c.GetClusterId(), CreatedAt: d.c.GetTime(), PskSeed: seed,
		OverlayIpv4: overlay.String(), OverlayIpv6: identity.OverlayPrefix(cluster).String(),
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_ClusterCreated{ClusterCreated: &skeinv1.ClusterCreated{Cluster: created,
		Settings: settings}}})
	n := d.newNode(c.GetFirstNode(), overlay.Addr().Next(), d.firstRange(c.GetFirstNode(), settings, cluster, overlay))
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: n}}})
	d.answer.Node = n
	d.emitServerAdded(n.GetId())
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{NodeId: n.GetId()}}})
	return d.rotateGossipKey()
}

func (d *decision) changeSettings(c *skeinv1.ChangeSettings) error {
	if c.GetSettings() == nil {
		return refuse(InvalidArgument, "the command carries no settings")
	}
	next, err := mergeSettings(d.s.settings.get(), c.GetSettings(), c.GetFields())
	if err != nil {
		return err
	}
	next.RolesSince = d.s.Settings().GetRolesSince() // the leader's to set
	if err := checkSettings(next); err != nil {
		return err
	}
	if err := d.setFoUPort(next); err != nil {
		return err
	}
	next.PodRanges = plainPrefixes(next.GetPodRanges())
	if proto.Equal(next, d.s.settings.get()) {
		return nil
	}
	if err := d.checkPodRangesKnown(next); err != nil {
		return err
	}
	if setsSites(next) {
		if err := d.checkSitesKnown("settings about sites"); err != nil {
			return err
		}
	}
	d.dropPodCIDRsOutside(next.GetPodRanges())
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_SettingsChanged{SettingsChanged: &skeinv1.SettingsChanged{Settings: next}}})
	return nil
}

// rotateGossipKey makes a new key primary; the last ones are still read for a while.
func (d *decision) rotateGossipKey() error {
	key, err := d.secret("gossip key")
	if err != nil {
		return err
	}
	keys := &skeinv1.GossipKeys{Primary: key}
	if old := d.s.GossipKeys(); old != nil {
		if string(old.GetPrimary()) == string(key) {
			return nil // the same entropy again
		}
		keys.Accepted = append(keys.Accepted, old.GetPrimary())
		for _, k := range old.GetAccepted() {
			if len(keys.Accepted) < maxAcceptedKeys {
				keys.Accepted = append(keys.Accepted, k)
			}
		}
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_GossipKeyRotated{GossipKeyRotated: &skeinv1.GossipKeyRotated{Keys: keys}}})
	return nil
}

// Expired tokens are kept for a while, so that a late joiner hears why it is refused, then dropped a
// few at a time when new ones are made.
const (
	keepExpired = 7 * 24 * time.Hour
	dropAtOnce  = 16
)

func (d *decision) createToken(c *skeinv1.CreateToken) error {
	if _, ok := hexKey(c.GetId()); !ok {
		return refuse(InvalidArgument, "token ID %.40q: want 16 lower-case hex digits", c.GetId())
	}
	if err := checkKey("the hash of the token's secret", c.GetSecretHash()); err != nil {
		return err
	}
	if l := c.GetLifetimeNanos(); l <= 0 || l > int64(MaxTokenLifetime) {
		return refuse(InvalidArgument, "a token's lifetime of %s is out of range: use up to %s", time.Duration(l),
			MaxTokenLifetime)
	}
	if u := c.GetUses(); u == 0 || u > MaxTokenUses {
		return refuse(InvalidArgument, "a token for %d uses: use 1 to %d", u, MaxTokenUses)
	}
	if err := checkText("the token's label", c.GetLabel(), MaxText); err != nil {
		return err
	}
	role, err := ParseRole(cmp.Or(c.GetRole(), string(RoleAgent)))
	if err != nil {
		return err
	}
	if c.GetAgentsOnly() && role == RoleServer {
		return refuse(InvalidArgument, "a token for agents only cannot give the role server as well: ask for one of "+
			"the two")
	}
	if old := d.s.Token(c.GetId()); old != nil {
		if !sameSecret(old.GetSecretHash(), c.GetSecretHash()) {
			return refuse(AlreadyExists, "token %s already exists: make another ID", c.GetId())
		}
		d.answer.Token = old
		return nil
	}
	if dropped := d.dropExpired(); d.s.tokens.n-dropped >= MaxTokens {
		return refuse(ResourceExhausted, "there are %d tokens already: revoke some with skein token revoke ID", d.s.tokens.n)
	}
	t := &skeinv1.Token{
		Id: c.GetId(), SecretHash: c.GetSecretHash(), CreatedAt: d.c.GetTime(), ExpiresAt: d.c.GetTime() +
			c.GetLifetimeNanos(),
		UsesLeft: c.GetUses(), Uses: c.GetUses(), Label: c.GetLabel(), AgentsOnly: role != RoleServer, Signed: c.GetSigned(),
	}
	if role != RoleAgent {
		t.Role = string(role)
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_TokenCreated{TokenCreated: &skeinv1.TokenCreated{Token: t}}})
	d.answer.Token = t
	return nil
}

func (d *decision) dropExpired() (dropped int) {
	for t := range d.s.tokens.all() {
		if dropped == dropAtOnce {
			break
		}
		if d.c.GetTime()-int64(keepExpired) > t.GetExpiresAt() {
			d.emitTokenRevoked(t.GetId(), "expired")
			dropped++
		}
	}
	return dropped
}

func (d *decision) revokeToken(c *skeinv1.RevokeToken) error {
	if d.s.Token(c.GetTokenId()) == nil {
		return refuse(NotFound, "token %.40q does not exist: skein token list shows those that do", c.GetTokenId())
	}
	d.emitTokenRevoked(c.GetTokenId(), "")
	return nil
}

func (d *decision) emitTokenRevoked(id, reason string) {
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_TokenRevoked{TokenRevoked: &skeinv1.TokenRevoked{TokenId: id,
		Reason: reason}}})
}

// token is the token that a joiner shows, or the reason why it does not let it in.
func (d *decision) token(c *skeinv1.AdmitNode) (*skeinv1.Token, error) {
	t := d.s.Token(c.GetTokenId())
	if t == nil {
		return nil, wrongToken(c.GetTokenId())
	}
	if err := checkProof(t, c); err != nil {
		return nil, err
	}
	if d.c.GetTime() >= t.GetExpiresAt() {
		return nil, refuse(PermissionDenied,
			"join token %s expired at %s: make a new one on a member with skein token create", t.GetId(),
			time.Unix(0, t.GetExpiresAt()).UTC().Format(time.RFC3339))
	}
	return t, nil
}

func sameSecret(a, b []byte) bool { return subtle.ConstantTimeCompare(a, b) == 1 }
