package agent

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/agent/joining"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// serveJoin answers one joiner.
func (a *Agent) serveJoin(ctx context.Context, c *tls.Conn, peer identity.ID) {
	ctx, cancel := context.WithTimeout(ctx, joining.JoinTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	request := &skeinv1.JoinRequest{}
	if err := joining.ReadMessage(c, request, joining.MaxJoinRequest); err != nil {
		a.log.Debug("join request", "from", c.RemoteAddr().String(), "error", err)
		return
	}
	if request.GetTokenId() == "" {
		_ = joining.WriteMessage(c, a.answerInquiry(peer, request))
		return
	}
	response, err := a.admit(ctx, request, peer)
	if err != nil {
		code := events.Code("unavailable")
		var e *events.Error
		if errors.As(err, &e) {
			code = e.Code
		}
		response = &skeinv1.JoinResponse{ErrorCode: string(code), ErrorMessage: err.Error(), Time: time.Now().UnixNano()}
		a.log.Info("joiner not admitted", "node", peer.String(), "name", request.GetNode().GetName(), "error", err)
	}
	if err := joining.WriteMessage(c, response); err != nil {
		a.log.Info("answer to a joiner", "node", peer.String(), "error", err)
	}
}

// mergeFirstRecord spreads what a joiner says of itself. It may have no other way to say so yet: nobody
// has its addresses, and it may be the mesh's first relay. Where leaders speak for its site it has: they know it first.
func (a *Agent) mergeFirstRecord(joiner identity.ID, r *skeinv1.SignedRecord) {
	if r == nil {
		return
	}
	st := a.replica.State()
	a.roster.Update(st)
	a.gossip.RosterChanged()
	if a.joinerIsKnown(st, joiner) {
		return
	}
	if _, errs := a.gossip.Merge([]*skeinv1.SignedRecord{r}); len(errs) > 0 {
		a.log.Warn("a joiner's first record is refused", "error", errors.Join(errs...))
	}
}

// awaitCandidates waits a little, just after the start, until this node's own record says where it is.
// Without a relay a joiner has nothing else to find it by.
func (a *Agent) awaitCandidates(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for len(a.gossip.Records()[a.id].Record.GetCandidates()) == 0 && !a.relayOnly() &&
		pause.For(ctx, 20*time.Millisecond) {
	}
}

func (a *Agent) admit(ctx context.Context, request *skeinv1.JoinRequest,
	peer identity.ID) (*skeinv1.JoinResponse, error) {
	if identity.IDOf(request.GetNode().GetIdentityKey()) != peer {
		return nil, &events.Error{Code: events.PermissionDenied, Message: "the request names another identity key than the " +
			"connection has proved"}
	}
	if err := consensus.CheckSent(a.replica.State()); err != nil { // before it is admitted and cannot be told
		return nil, &events.Error{Code: events.ResourceExhausted, Message: err.Error()}
	}
	secret := sha256.Sum256(request.GetTokenSecret())
	// Leave time to answer, so that the joiner hears why.
	pctx, cancel := context.WithTimeout(ctx, joining.JoinTimeout-2*time.Second)
	defer cancel()
	answer, err := a.client.Propose(pctx, &skeinv1.Command{
		RequestId: request.GetRequestId(),
		Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
			Node: request.GetNode(), TokenId: request.GetTokenId(), TokenSecret: request.GetTokenSecret(),
			TokenProof: request.GetTokenProof(), ClusterId: request.GetClusterId(),
			TokenSecretHash: secret[:], // for a leader older than roles
		}},
	})
	if err != nil {
		return nil, err
	}
	if answer.GetIndex() > 0 {
		if err := a.replica.Wait(ctx, answer.GetIndex()-1); err != nil {
			return nil, fmt.Errorf("wait for the admission to arrive here: %w", err)
		}
	}
	if err := a.checkAdmitted(peer, answer); err != nil {
		return nil, err
	}
	a.mergeFirstRecord(peer, request.GetRecord())
	a.awaitCandidates(ctx)
	if err := a.checkAdmitted(peer, answer); err != nil { // it may have been revoked meanwhile
		return nil, err
	}
	st := a.replica.State()
	return &skeinv1.JoinResponse{
		State: st.Proto(), Records: fitting(a.id, st, a.gossip.Records(), joining.MaxJoinResponse-joinSlack-st.Size()),
		Node: answer.GetNode(), Time: time.Now().UnixNano(),
	}, nil
}

// checkAdmitted keeps the state, which holds the gossip keys and the preshared seed, from everybody but the node that
// the log has admitted: whatever the answer to the command says, the joiner must be a live member here.
func (a *Agent) checkAdmitted(peer identity.ID, answer *skeinv1.Answer) error {
	state := a.replica.State()
	if r := state.Revoked(peer); r != nil {
		return &events.Error{Code: joining.CodeRevoked, Message: r.GetReason()}
	}
	if state.Node(peer) == nil || answer.GetNode().GetId() != peer.String() {
		return &events.Error{Code: events.PermissionDenied, Message: fmt.Sprintf("the log has not admitted node %s: ask "+
			"again with a token of this cluster", peer)}
	}
	return nil
}
