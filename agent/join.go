package agent

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/sock"
)

const (
	joinTimeout = 10 * time.Second // one attempt at one seed

	// JoinPatience is how long a joiner tries, all attempts together, when it is not told otherwise.
	JoinPatience = 2 * time.Minute
)

// ErrJoinRefused is final: the cluster answered, and the answer is no.
var ErrJoinRefused = errors.New("the cluster refused this node")

// join asks the token's seeds, one after the other and again, until one has had this node admitted or
// patience ends.
func join(ctx context.Context, key *identity.Key, token *skeinv1.JoinToken, node *skeinv1.NewNode,
	record *skeinv1.SignedRecord, patience time.Duration, mark uint32, log *slog.Logger) (*skeinv1.JoinResponse, error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request := &skeinv1.JoinRequest{
		ClusterId: token.GetClusterId(), TokenId: token.GetTokenId(), TokenSecret: token.GetSecret(),
		Node: node, Record: record, RequestId: newRequestID(),
	}
	if token.GetSigned() {
		request.TokenSecret = events.TokenKey(token.GetSecret())
		request.TokenProof = events.ProveJoin(token.GetSecret(), token.GetClusterId(), token.GetTokenId(), node)
	}
	failures := map[string]error{} // of each seed, the newest that says something
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		for _, seed := range token.GetSeeds() {
			r, err := joinAt(ctx, key, mark, seed, request)
			if err == nil {
				return r, nil
			}
			if errors.Is(err, ErrJoinRefused) {
				return nil, err
			}
			log.Info("seed did not admit this node yet", "seed", seed.GetAddress(), "error", err)
			// What was cut off by the end of our patience says less than what came before.
			if ctx.Err() == nil || failures[seed.GetAddress()] == nil {
				failures[seed.GetAddress()] = err
			}
		}
		if wait(ctx, pause) {
			continue
		}
		if whole.Err() != nil { // told to stop
			return nil, fmt.Errorf("joining was interrupted: %w", whole.Err())
		}
		return nil, fmt.Errorf("no seed of the token admitted this node within %s: %s (is one of them up, and its TCP port "+
			"reachable from here?)", patience, inWords(failures))
	}
}

// inWords lists what the seeds said, in order.
func inWords(failures map[string]error) string {
	var all []string
	for _, seed := range slices.Sorted(maps.Keys(failures)) {
		all = append(all, fmt.Sprintf("seed %s: %s", seed, failures[seed]))
	}
	return strings.Join(all, "; ")
}

func joinAt(ctx context.Context, key *identity.Key, mark uint32, seed *skeinv1.JoinToken_Seed,
	request *skeinv1.JoinRequest) (*skeinv1.JoinResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	conf, err := key.ClientTLS(identity.ALPNJoin, identity.Expect(seed.GetIdentityKey()))
	if err != nil {
		return nil, err
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Control: sock.Mark(mark)}, Config: conf}
	c, err := d.DialContext(ctx, "tcp", seed.GetAddress())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if err := writeMessage(c, request); err != nil {
		return nil, fmt.Errorf("send the join request: %w", err)
	}
	r := &skeinv1.JoinResponse{}
	if err := readMessage(c, r, maxJoinResponse); err != nil {
		return nil, err
	}
	switch r.GetErrorCode() {
	case "":
		return r, nil
	case "unavailable", "deadline_exceeded":
		return nil, errors.New(r.GetErrorMessage())
	case codeRevoked:
		return nil, &revokedError{r.GetErrorMessage()}
	}
	return nil, fmt.Errorf("%w: %s", ErrJoinRefused, r.GetErrorMessage())
}

// serveJoin answers one joiner.
func (a *Agent) serveJoin(ctx context.Context, c *tls.Conn, peer identity.ID) {
	ctx, cancel := context.WithTimeout(ctx, joinTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	request := &skeinv1.JoinRequest{}
	if err := readMessage(c, request, maxJoinRequest); err != nil {
		a.log.Debug("join request", "from", c.RemoteAddr().String(), "error", err)
		return
	}
	if request.GetTokenId() == "" {
		_ = writeMessage(c, a.answerInquiry(peer, request))
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
	if err := writeMessage(c, response); err != nil {
		a.log.Info("answer to a joiner", "node", peer.String(), "error", err)
	}
}

// takeFirstRecord spreads what a joiner says of itself. It may have no other way to say so yet: nobody
// has its addresses, and it may be the mesh's first relay. Where leaders speak for its site it has: they know it first.
func (a *Agent) takeFirstRecord(joiner identity.ID, r *skeinv1.SignedRecord) {
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
		a.log.Warn("a joiner's first record", "error", errors.Join(errs...))
	}
}

// awaitCandidates waits a little, just after the start, until this node's own record says where it is.
// Without a relay a joiner has nothing else to find it by.
func (a *Agent) awaitCandidates(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for len(a.gossip.Records()[a.id].Record.GetCandidates()) == 0 && !a.relayOnly() && wait(ctx, 20*time.Millisecond) {
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
	pctx, cancel := context.WithTimeout(ctx, joinTimeout-2*time.Second)
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
	a.takeFirstRecord(peer, request.GetRecord())
	a.awaitCandidates(ctx)
	if err := a.checkAdmitted(peer, answer); err != nil { // it may have been revoked meanwhile
		return nil, err
	}
	st := a.replica.State()
	return &skeinv1.JoinResponse{
		State: st.Proto(), Records: fitting(a.id, st, a.gossip.Records(), maxJoinResponse-joinSlack-st.Size()),
		Node: answer.GetNode(), Time: time.Now().UnixNano(),
	}, nil
}

// checkAdmitted keeps the state, which holds the gossip keys and the preshared seed, from everybody but the node that
// the log has admitted: whatever the answer to the command says, the joiner must be a live member here.
func (a *Agent) checkAdmitted(peer identity.ID, answer *skeinv1.Answer) error {
	state := a.replica.State()
	if r := state.Revoked(peer); r != nil {
		return &events.Error{Code: codeRevoked, Message: r.GetReason()}
	}
	if state.Node(peer) == nil || answer.GetNode().GetId() != peer.String() {
		return &events.Error{Code: events.PermissionDenied, Message: fmt.Sprintf("the log has not admitted node %s: ask "+
			"again with a token of this cluster", peer)}
	}
	return nil
}

func newRequestID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
