// Package members answers the commands that change who is a member and what it may do: tokens, roles, nodes' names,
// labels and settings, the cluster's settings, and its gossip key.
package members

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// Host is what the answers need of the agent. Its methods may be called from any goroutine.
type Host interface {
	api.Agent
	// Wait waits until this node has folded the events up to an index.
	Wait(ctx context.Context, index uint64) error
	// Seeds are the members at which others join.
	Seeds() []*skeinv1.JoinToken_Seed
	// GossipKeyUsed is the key by which this node encrypts gossip.
	GossipKeyUsed() []byte
}

// MemberService is that part of the API.
type MemberService struct{ Host Host }

// CreateToken makes a token that names the members to join at.
func (s MemberService) CreateToken(ctx context.Context,
	r *skeinv1.CreateTokenRequest) (*skeinv1.CreateTokenResponse, error) {
	role, err := events.ParseRole(cmp.Or(r.GetRole(), string(events.RoleAgent)))
	if err != nil {
		return nil, api.Error(err)
	}
	seeds := s.Host.Seeds()
	if len(seeds) == 0 {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("no member offers a port to join at: set "+
			"`relay: true` in the configuration of a node that others can reach"))
	}
	var secret [32]byte
	var id [8]byte
	rand.Read(secret[:])
	rand.Read(id[:])
	hash := sha256.Sum256(events.TokenKey(secret[:]))
	want := &skeinv1.CreateToken{
		Id: hex.EncodeToString(id[:]), SecretHash: hash[:], LifetimeNanos: r.GetLifetimeNanos(), Uses: r.GetUses(),
		Label: r.GetLabel(), AgentsOnly: r.GetAgentsOnly(), Role: string(role), Signed: true,
	}
	answer, err := s.Host.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: want}})
	if err != nil {
		return nil, err
	}
	text, err := admission.EncodeToken(&skeinv1.JoinToken{ClusterId: s.Host.State().Cluster().GetId(), Seeds: seeds,
		TokenId: answer.GetToken().GetId(), Secret: secret[:], Role: string(role), Signed: true})
	if err != nil {
		return nil, err
	}
	return &skeinv1.CreateTokenResponse{Token: text, Info: answer.GetToken()}, nil
}

// ListTokens are the tokens that the log has.
func (s MemberService) ListTokens(context.Context, *skeinv1.ListTokensRequest) (*skeinv1.ListTokensResponse, error) {
	return &skeinv1.ListTokensResponse{Tokens: s.Host.State().Tokens()}, nil
}

// RepairClock shows or repairs the log's time. It shows this node's clock, and it is the leader's that counts.
func (s MemberService) RepairClock(ctx context.Context,
	r *skeinv1.RepairClockRequest) (*skeinv1.RepairClockResponse, error) {
	state := s.Host.State()
	out := &skeinv1.RepairClockResponse{Before: state.Time(), After: time.Now().UnixNano(), Index: state.Index()}
	if r.GetDryRun() {
		return out, nil
	}
	answer, err := s.Host.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RepairClock{RepairClock: &skeinv1.RepairClock{}}})
	if err != nil {
		return nil, err
	}
	if err := s.Host.Wait(ctx, max(answer.GetIndex(), 1)-1); err != nil {
		return nil, api.Error(err)
	}
	out.After, out.Index = s.Host.State().Time(), answer.GetIndex()
	return out, nil
}

// RevokeToken ends a token.
func (s MemberService) RevokeToken(ctx context.Context,
	r *skeinv1.RevokeTokenRequest) (*skeinv1.RevokeTokenResponse, error) {
	_, err := s.Host.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{TokenId: r.GetTokenId()}}})
	return &skeinv1.RevokeTokenResponse{}, err
}

// RevokeNode removes a member for good.
func (s MemberService) RevokeNode(ctx context.Context,
	r *skeinv1.RevokeNodeRequest) (*skeinv1.RevokeNodeResponse, error) {
	n, _, err := api.Find(s.Host.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := s.Host.Propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: n.GetId(),
			Reason: r.GetReason(), Force: r.GetForce()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.RevokeNodeResponse{Node: n, Index: answer.GetIndex()}, nil
}

// SetRole grants a role to a member, or withdraws it.
func (s MemberService) SetRole(ctx context.Context, r *skeinv1.SetRoleRequest) (*skeinv1.SetRoleResponse, error) {
	role, err := events.ParseRole(r.GetRole())
	if err != nil {
		return nil, api.Error(err)
	}
	n, _, err := api.Find(s.Host.State(), r.GetNode())
	if err != nil {
		return nil, err
	}
	c := &skeinv1.Command{}
	switch {
	case role == events.RoleAgent:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("every member is an agent: that role "+
			"cannot be granted or withdrawn; `skein node revoke %s` removes the member", n.GetName()))
	case role == events.RoleAdmin:
		c.Body = &skeinv1.Command_SetAdmin{SetAdmin: &skeinv1.SetAdmin{NodeId: n.GetId(), Admin: !r.GetWithdraw()}}
	case r.GetWithdraw():
		c.Body = &skeinv1.Command_RemoveServer{RemoveServer: &skeinv1.RemoveServer{NodeId: n.GetId(),
			Reason: "role withdrawn", Force: r.GetForce()}}
	default:
		c.Body = &skeinv1.Command_AddServer{AddServer: &skeinv1.AddServer{NodeId: n.GetId()}}
	}
	answer, err := s.Host.Propose(ctx, c)
	if err != nil {
		return nil, err
	}
	return &skeinv1.SetRoleResponse{Node: n, Role: string(s.Host.State().Role(n.GetId())),
		Index: answer.GetIndex()}, nil
}

// Settings changes the cluster's settings, if fields are named, and returns them.
func (s MemberService) Settings(ctx context.Context, r *skeinv1.SettingsRequest) (*skeinv1.SettingsResponse, error) {
	if len(r.GetFields()) > 0 {
		_, err := s.Host.Propose(ctx,
			&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
				Settings: r.GetChange(), Fields: r.GetFields()}}})
		if err != nil {
			return nil, err
		}
	}
	st := s.Host.State()
	return &skeinv1.SettingsResponse{Settings: st.Settings(), Index: st.Index()}, nil
}

// RotateGossipKey has the leader make a new gossip key.
func (s MemberService) RotateGossipKey(ctx context.Context,
	_ *skeinv1.RotateGossipKeyRequest) (*skeinv1.RotateGossipKeyResponse, error) {
	answer, err := s.Host.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_RotateGossipKey{
		RotateGossipKey: &skeinv1.RotateGossipKey{}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.RotateGossipKeyResponse{
		Keys: GossipKeys(s.Host.State().GossipKeys(), s.Host.GossipKeyUsed()), Index: answer.GetIndex(),
	}, nil
}

// GossipKeys tells keys apart without showing them; nil: none is agreed.
func GossipKeys(k *skeinv1.GossipKeys, used []byte) *skeinv1.GossipKeysView {
	if len(k.GetPrimary()) == 0 {
		return nil
	}
	v := &skeinv1.GossipKeysView{Agreed: keyMark(k.GetPrimary()), Used: keyMark(used)}
	for _, one := range k.GetAccepted() {
		v.Accepted = append(v.Accepted, keyMark(one))
	}
	return v
}

// keyMark is by which people tell a random secret of 32 bytes from others.
func keyMark(key []byte) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:4])
}
