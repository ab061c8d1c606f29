package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// A revoked node is refused by everybody at once, and so may not hear of its revocation from the log.
// When the log is silent it asks the servers at the port for joiners, the one that talks to strangers.

const (
	silence  = 5 * time.Second  // without the log after which a node asks
	askEvery = 15 * time.Second // while the silence lasts
)

// codeRevoked is JoinResponse.error_code for a revoked node; the message is the reason.
const codeRevoked = "revoked"

// revokedError is a server's word that this node was revoked.
type revokedError struct{ reason string }

func (e *revokedError) Error() string {
	return fmt.Sprintf("this node was revoked (%s): move its state directory away to get a new identity, and join with a new token", reasonText(e.reason))
}

// reasonText is why a node was revoked.
func reasonText(reason string) string {
	if reason == "" {
		return "no reason was given"
	}
	return reason
}

func (e *revokedError) Is(target error) bool { return target == ErrJoinRefused }

// inquire asks when it is time to. The loop calls it every second.
func (a *Agent) inquire(ctx context.Context) {
	now := time.Now()
	if s := a.server.Load(); s != nil {
		if _, ok := s.Leader(); ok {
			a.heard.Store(now.UnixNano())
		}
	}
	if now.Sub(time.Unix(0, a.heard.Load())) < silence || now.Sub(a.loop.asked) < askEvery {
		return
	}
	a.loop.asked = now
	go a.askServers(ctx)
}

// askServers asks one server after the other until one says that this node was revoked. Servers alone
// are believed: the log comes from them too.
func (a *Agent) askServers(ctx context.Context) {
	node, err := a.newNode()
	if err != nil {
		return
	}
	request := &skeinv1.JoinRequest{ClusterId: a.cluster.String(), Node: node, RequestId: newRequestID()}
	for _, v := range a.replica.State().Servers() {
		id, err := identity.ParseID(v.GetNodeId())
		key, ok := a.roster.Key(id)
		if err != nil || !ok || id == a.id {
			continue
		}
		for _, address := range a.gossip.Records()[id].Record.GetRelay().GetAddresses() {
			_, err := joinAt(ctx, a.key, &skeinv1.JoinToken_Seed{Address: address, IdentityKey: key}, request)
			var r *revokedError
			if errors.As(err, &r) {
				a.expelled.Store(r)
				a.wakeUp()
				return
			}
			if errors.Is(err, ErrJoinRefused) || ctx.Err() != nil {
				break // it answers, and knows nothing of that
			}
		}
	}
}

// answerInquiry is what a node says to one that asks without a token.
func (a *Agent) answerInquiry(peer identity.ID) *skeinv1.JoinResponse {
	r := &skeinv1.JoinResponse{Time: time.Now().UnixNano(), ErrorCode: string(events.PermissionDenied), ErrorMessage: "the request holds no token: make one on a member with skein token create"}
	if was := a.replica.State().Revoked(peer); was != nil {
		r.ErrorCode, r.ErrorMessage = codeRevoked, was.GetReason()
	}
	return r
}
