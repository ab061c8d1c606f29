package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/joining"
	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// seedThat runs a front whose join handler answers with what answer returns; nil: nothing.
func seedThat(t *testing.T,
	answer func(n int32, r *skeinv1.JoinRequest) *skeinv1.JoinResponse) (*skeinv1.JoinToken_Seed, *atomic.Int32) {
	t.Helper()
	h := newHost(t, "seed")
	asked := &atomic.Int32{}
	address := serveAdmission(t, h.key, roster.New(newWorld(t, h).state), admission.Handlers{
		identity.ALPNJoin: func(_ context.Context, c *tls.Conn, _ identity.ID) {
			r := &skeinv1.JoinRequest{}
			if err := joining.ReadMessage(c, r, joining.MaxJoinRequest); err != nil {
				t.Errorf("the request: %v", err)
				return
			}
			if m := answer(asked.Add(1), r); m != nil {
				_ = joining.WriteMessage(c, m)
			}
		},
	})
	return &skeinv1.JoinToken_Seed{Address: address, IdentityKey: h.key.Public()}, asked
}

func joinWith(t *testing.T, patience time.Duration, seeds ...*skeinv1.JoinToken_Seed) (*skeinv1.JoinResponse, error) {
	t.Helper()
	needMark(t)
	h := newHost(t, "new")
	token := testToken()
	token.Seeds = seeds
	return joining.Join(t.Context(), h.key, token, h.node(t), nil, patience, 0, quiet())
}

func TestJoin(t *testing.T) {
	admitted := &skeinv1.JoinResponse{State: &skeinv1.State{Index: 7}}
	says := func(code, message string) func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse {
		return func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse {
			return &skeinv1.JoinResponse{ErrorCode: code, ErrorMessage: message}
		}
	}
	t.Run("a seed without a leader is asked again, with the same request", func(t *testing.T) {
		ids := map[string]bool{}
		seed, asked := seedThat(t, func(n int32, r *skeinv1.JoinRequest) *skeinv1.JoinResponse {
			ids[r.GetRequestId()] = true
			if n < 3 {
				return &skeinv1.JoinResponse{ErrorCode: "unavailable", ErrorMessage: "no leader"}
			}
			return admitted
		})
		r, err := joinWith(t, time.Minute, seed)
		if err != nil || r.GetState().GetIndex() != 7 || asked.Load() != 3 || len(ids) != 1 {
			t.Errorf("after %d questions with IDs %v: %v, %v", asked.Load(), ids, r, err)
		}
	})
	t.Run("a refusal is final", func(t *testing.T) {
		seed, asked := seedThat(t, says("permission_denied", "the token is used up"))
		_, err := joinWith(t, time.Minute, seed)
		if !errors.Is(err, joining.ErrRefused) || !strings.HasSuffix(err.Error(), "the token is used up") ||
			asked.Load() != 1 {
			t.Errorf("after %d questions: %v", asked.Load(), err)
		}
	})
	t.Run("the next seed is asked when one hangs up, or is another than the token says", func(t *testing.T) {
		mute, _ := seedThat(t, func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse { return nil })
		impostor, asked := seedThat(t, says("permission_denied", "give me your secret"))
		impostor.IdentityKey = newHost(t, "x").key.Public()
		good, _ := seedThat(t, func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse { return admitted })
		if _, err := joinWith(t, time.Minute, mute, impostor, good); err != nil {
			t.Error(err)
		}
		if asked.Load() != 0 {
			t.Error("the token's secret went to a seed that is not the token's")
		}
	})
	t.Run("patience ends", func(t *testing.T) {
		seed, _ := seedThat(t, says("unavailable", "no leader"))
		_, err := joinWith(t, time.Second, seed)
		want := "no seed of the token admitted this node within 1s: seed " + seed.GetAddress() + ": no leader " +
			"(is one of them up, and its TCP port reachable from here?)"
		if err == nil || err.Error() != want {
			t.Errorf("have %v\nwant %s", err, want)
		}
	})
	t.Run("it is told to stop", func(t *testing.T) {
		needMark(t)
		h := newHost(t, "new")
		ctx, cancel := context.WithCancel(t.Context())
		token := testToken()
		seed, _ := seedThat(t, func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse {
			cancel()
			return &skeinv1.JoinResponse{ErrorCode: "unavailable"}
		})
		token.Seeds = []*skeinv1.JoinToken_Seed{seed}
		_, err := joining.Join(ctx, h.key, token, h.node(t), nil, time.Minute, 0, quiet())
		if !errors.Is(err, context.Canceled) ||
			!strings.HasPrefix(err.Error(), "joining was interrupted") {
			t.Errorf("have %v", err)
		}
	})
}

// A joiner may ask for itself only: a token does not let it put another's key into the log.
func TestAdmissionOfAnothersKey(t *testing.T) {
	needMark(t)
	member, joiner, victim := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	a := newTestAgent(member, newWorld(t, member).state)
	a.replica = newReplica(t, newWorld(t, member))
	address := serveAdmission(t, member.key, a.roster, admission.Handlers{identity.ALPNJoin: a.serveJoin})
	request := &skeinv1.JoinRequest{ClusterId: testCluster, TokenId: testTokenID, TokenSecret: testSecret,
		Node: victim.node(t), RequestId: "r"}
	seed := &skeinv1.JoinToken_Seed{Address: address, IdentityKey: ed25519.PublicKey(member.key.Public())}
	_, err := joining.JoinAt(t.Context(), joiner.key, 0, seed, request)
	if !errors.Is(err, joining.ErrRefused) ||
		!strings.Contains(err.Error(), "another identity key than the connection has proved") {
		t.Errorf("have %v", err)
	}
	request.TokenId = ""
	if _, err := joining.JoinAt(t.Context(), joiner.key, 0, seed, request); !errors.Is(err, joining.ErrRefused) ||
		!strings.Contains(err.Error(), "holds no token") {
		t.Errorf("without a token: %v", err)
	}
	var refused *events.Error
	if _, err := a.admit(t.Context(), &skeinv1.JoinRequest{}, joiner.key.ID()); !errors.As(err, &refused) ||
		refused.Code != events.PermissionDenied {
		t.Errorf("a request without a key: %v", err)
	}
}

// A node that hears nothing of the log may ask a server whether it was revoked.
func TestRevokedNodeAsks(t *testing.T) {
	needMark(t)
	server, node := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, server, node)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
		NodeId: node.key.ID().String(), Reason: "stolen"}}})
	a := newTestAgent(server, w.state)
	a.replica = newReplica(t, w)
	address := serveAdmission(t, server.key, a.roster, admission.Handlers{identity.ALPNJoin: a.serveJoin})
	seed := &skeinv1.JoinToken_Seed{Address: address, IdentityKey: server.key.Public()}
	_, err := joining.JoinAt(t.Context(), node.key, 0, seed,
		&skeinv1.JoinRequest{ClusterId: testCluster, Node: node.node(t)})
	var r *joining.RevokedError
	if !errors.As(err, &r) || r.Reason != "stolen" || !errors.Is(err, joining.ErrRefused) {
		t.Errorf("have %v", err)
	}
}
