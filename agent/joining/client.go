// Package joining is how a host asks to become a member: what it says to the seeds of its token, and what they answer.
package joining

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/api"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/sock"
)

const (
	JoinTimeout = 10 * time.Second // one attempt at one seed

	// Patience is how long a joiner tries, all attempts together, when it is not told otherwise.
	Patience = 2 * time.Minute
)

// ErrRefused is final: the cluster answered, and the answer is no.
var ErrRefused = errors.New("the cluster refused this node")

// Join asks the token's seeds, one after the other and again, until one has had this node admitted or
// patience ends.
func Join(ctx context.Context, key *identity.Key, token *skeinv1.JoinToken, node *skeinv1.NewNode,
	record *skeinv1.SignedRecord, patience time.Duration, mark uint32, log *slog.Logger) (*skeinv1.JoinResponse, error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request := &skeinv1.JoinRequest{
		ClusterId: token.GetClusterId(), TokenId: token.GetTokenId(), TokenSecret: token.GetSecret(),
		Node: node, Record: record, RequestId: consensus.NewRequestID(),
	}
	if token.GetSigned() {
		request.TokenSecret = events.TokenKey(token.GetSecret())
		request.TokenProof = events.ProveJoin(token.GetSecret(), token.GetClusterId(), token.GetTokenId(), node)
	}
	failures := map[string]error{} // of each seed, the newest that says something
	for pause := 200 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		for _, seed := range token.GetSeeds() {
			r, err := JoinAt(ctx, key, mark, seed, request)
			if err == nil {
				return r, nil
			}
			if errors.Is(err, ErrRefused) {
				return nil, err
			}
			log.Info("seed did not admit this node yet", "seed", seed.GetAddress(), "error", err)
			// What was cut off by the end of our patience says less than what came before.
			if ctx.Err() == nil || failures[seed.GetAddress()] == nil {
				failures[seed.GetAddress()] = err
			}
		}
		select {
		case <-time.After(pause):
			continue
		case <-ctx.Done():
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

// JoinAt asks one seed once.
func JoinAt(ctx context.Context, key *identity.Key, mark uint32, seed *skeinv1.JoinToken_Seed,
	request *skeinv1.JoinRequest) (*skeinv1.JoinResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, JoinTimeout)
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
	if err := WriteMessage(c, request); err != nil {
		return nil, fmt.Errorf("send the join request: %w", err)
	}
	r := &skeinv1.JoinResponse{}
	if err := ReadMessage(c, r, MaxJoinResponse); err != nil {
		return nil, fmt.Errorf("read the answer to the join request: %w", err)
	}
	switch r.GetErrorCode() {
	case "":
		return r, nil
	case "unavailable", "deadline_exceeded":
		return nil, errors.New(r.GetErrorMessage())
	case CodeRevoked:
		return nil, &RevokedError{r.GetErrorMessage()}
	}
	return nil, fmt.Errorf("%w: %s", ErrRefused, r.GetErrorMessage())
}

// CodeRevoked is JoinResponse.error_code for a revoked node; the message is the reason.
const CodeRevoked = "revoked"

// RevokedError is a server's word that this node was revoked.
type RevokedError struct{ Reason string }

func (e *RevokedError) Error() string {
	return fmt.Sprintf("this node was revoked (%s): move its state directory away to get a new identity, and join with "+
		"a new token", api.ReasonText(e.Reason))
}

// Is says that a revocation is a refusal.
func (e *RevokedError) Is(target error) bool { return target == ErrRefused }
