package agent

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/profile"
	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// proposeHold is how long a command from the command line may wait for a leader.
const proposeHold = 15 * time.Second

// apiGrace is how long a request that is being answered may hold up the end of the agent.
const apiGrace = 2 * time.Second

// serveAPI listens on the agent's socket until stop is called, which lets answers under way finish. The
// socket's file stays until the agent has ended; see Run.
func (a *Agent) serveAPI(ctx context.Context) (stop func(), err error) {
	path := filepath.Join(a.cfg.RunDir, config.SocketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove a stale socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("API socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	a.socketOpen = true
	if err := os.Chmod(path, 0o660); err != nil {
		l.Close()
		return nil, fmt.Errorf("API socket: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewAgentServiceHandler(a.services(), connect.WithReadMaxBytes(4<<20)))
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{Handler: profile.Deadline(mux), Protocols: protocols, ReadHeaderTimeout: 5 * time.Second,
		ConnContext: api.WithCaller,
		BaseContext: func(net.Listener) context.Context { return ctx }}
	go srv.Serve(l)
	return func() {
		grace, cancel := context.WithTimeout(context.Background(), apiGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			srv.Close()
		}
	}, nil
}

// removeSocket tells `skein down` that the agent is gone.
func (a *Agent) removeSocket() {
	if a.socketOpen {
		os.Remove(filepath.Join(a.cfg.RunDir, config.SocketName))
	}
}

// propose hands a command to the cluster and waits until its effect is visible on this node.
func (a *Agent) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if a.client == nil {
		return nil, connect.NewError(connect.CodeUnavailable,
			errors.New("the agent has not joined a cluster yet; see `skein status`"))
	}
	ctx, cancel := context.WithTimeout(ctx, proposeHold)
	defer cancel()
	if c.RequestId == "" { // one that is set makes a late copy of the command harmless: see agent/ipam/DESIGN.md
		c.RequestId = consensus.NewRequestID()
	}
	answer, err := a.client.Propose(ctx, c)
	if err != nil {
		return nil, api.Error(err)
	}
	if answer.GetIndex() > 0 {
		if err := a.replica.Wait(ctx, answer.GetIndex()-1); err != nil {
			return nil, api.Error(err)
		}
	}
	return a.replica.State().Complete(answer), nil // a leader of an earlier version answers a retry with names alone
}

// find is a member by name or ID.
func (a *Agent) find(nameOrID string) (*skeinv1.Node, identity.ID, error) {
	return api.Find(a.replica.State(), nameOrID)
}

func (s services) CreateToken(ctx context.Context,
	r *skeinv1.CreateTokenRequest) (*skeinv1.CreateTokenResponse, error) {
	return s.a.createToken(ctx, r)
}

// createToken makes a token that names the members to join at.
func (a *Agent) createToken(ctx context.Context,
	r *skeinv1.CreateTokenRequest) (*skeinv1.CreateTokenResponse, error) {
	role, err := events.ParseRole(cmp.Or(r.GetRole(), string(events.RoleAgent)))
	if err != nil {
		return nil, api.Error(err)
	}
	seeds := a.seeds()
	if len(seeds) == 0 {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("no member offers a port to join at: set "+
			"`relay: true` in the configuration of a node that others can reach"))
	}
	var secret [32]byte
	var id [8]byte
	rand.Read(secret[:])
	rand.Read(id[:])
	hash := sha256.Sum256(events.TokenKey(secret[:]))
	answer, err := a.propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: hex.EncodeToString(id[:]), SecretHash: hash[:], LifetimeNanos: r.GetLifetimeNanos(), Uses: r.GetUses(),
		Label: r.GetLabel(), AgentsOnly: r.GetAgentsOnly(), Role: string(role), Signed: true,
	}}})
	if err != nil {
		return nil, err
	}
	text, err := admission.EncodeToken(&skeinv1.JoinToken{ClusterId: a.cluster.String(), Seeds: seeds,
		TokenId: answer.GetToken().GetId(), Secret: secret[:], Role: string(role), Signed: true})
	if err != nil {
		return nil, err
	}
	return &skeinv1.CreateTokenResponse{Token: text, Info: answer.GetToken()}, nil
}

func (s services) ListTokens(context.Context, *skeinv1.ListTokensRequest) (*skeinv1.ListTokensResponse, error) {
	return &skeinv1.ListTokensResponse{Tokens: s.a.replica.State().Tokens()}, nil
}

// RepairClock shows or repairs the log's time. It shows this node's clock, and it is the leader's that counts.
func (s services) RepairClock(ctx context.Context,
	r *skeinv1.RepairClockRequest) (*skeinv1.RepairClockResponse, error) {
	if s.a.replica == nil {
		return nil, connect.NewError(connect.CodeUnavailable,
			errors.New("the agent has not joined a cluster yet; see `skein status`"))
	}
	state := s.a.replica.State()
	out := &skeinv1.RepairClockResponse{Before: state.Time(), After: time.Now().UnixNano(), Index: state.Index()}
	if r.GetDryRun() {
		return out, nil
	}
	answer, err := s.a.propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RepairClock{RepairClock: &skeinv1.RepairClock{}}})
	if err != nil {
		return nil, err
	}
	if err := s.a.replica.Wait(ctx, max(answer.GetIndex(), 1)-1); err != nil {
		return nil, api.Error(err)
	}
	out.After, out.Index = s.a.replica.State().Time(), answer.GetIndex()
	return out, nil
}

func (s services) RevokeToken(ctx context.Context,
	r *skeinv1.RevokeTokenRequest) (*skeinv1.RevokeTokenResponse, error) {
	_, err := s.a.propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{TokenId: r.GetTokenId()}}})
	return &skeinv1.RevokeTokenResponse{}, err
}

func (s services) RevokeNode(ctx context.Context, r *skeinv1.RevokeNodeRequest) (*skeinv1.RevokeNodeResponse, error) {
	n, _, err := s.a.find(r.GetNode())
	if err != nil {
		return nil, err
	}
	answer, err := s.a.propose(ctx,
		&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{NodeId: n.GetId(),
			Reason: r.GetReason(), Force: r.GetForce()}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.RevokeNodeResponse{Node: n, Index: answer.GetIndex()}, nil
}

func (s services) SetRole(ctx context.Context, r *skeinv1.SetRoleRequest) (*skeinv1.SetRoleResponse, error) {
	role, err := events.ParseRole(r.GetRole())
	if err != nil {
		return nil, api.Error(err)
	}
	n, _, err := s.a.find(r.GetNode())
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
	answer, err := s.a.propose(ctx, c)
	if err != nil {
		return nil, err
	}
	return &skeinv1.SetRoleResponse{Node: n, Role: string(s.a.replica.State().Role(n.GetId())),
		Index: answer.GetIndex()}, nil
}

func (s services) Settings(ctx context.Context, r *skeinv1.SettingsRequest) (*skeinv1.SettingsResponse, error) {
	if len(r.GetFields()) > 0 {
		_, err := s.a.propose(ctx,
			&skeinv1.Command{Body: &skeinv1.Command_ChangeSettings{ChangeSettings: &skeinv1.ChangeSettings{
				Settings: r.GetChange(), Fields: r.GetFields()}}})
		if err != nil {
			return nil, err
		}
	}
	st := s.a.replica.State()
	return &skeinv1.SettingsResponse{Settings: st.Settings(), Index: st.Index()}, nil
}

func (s services) Down(ctx context.Context, r *skeinv1.DownRequest) (*skeinv1.DownResponse, error) {
	order := downOrder{purge: r.GetPurge(), done: make(chan error, 1)}
	select {
	case s.a.down <- order:
	case <-ctx.Done():
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("the agent is stopping already"))
	}
	return &skeinv1.DownResponse{}, api.Error(<-order.done)
}
