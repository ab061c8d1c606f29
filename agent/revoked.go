package agent

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/skeinmesh/skein/agent/joining"
	"github.com/skeinmesh/skein/agent/ownrecord"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// A revoked node is refused by everybody at once, and so may not hear of its revocation from the log. A node whose UDP
// is blocked, and which knows no relay that is up, hears nothing at all, not even of a relay that has joined since.
// When the log is silent a node asks the servers at the port for joiners, the one that talks to strangers.

const (
	silence  = 5 * time.Second  // without the log after which a node asks
	askEvery = 15 * time.Second // while the silence lasts

	isolatedSilence = 2 * time.Second // the same for a node that reaches nobody
	isolatedEvery   = 4 * time.Second

	newsMax    = 1024 // events for such a node at a time
	newsRelays = 32   // relays' records
)

// inquire asks when it is time to. The loop calls it every second.
func (a *Agent) inquire(ctx context.Context) {
	now := time.Now()
	if s := a.server.Load(); s != nil {
		if _, ok := s.Leader(); ok {
			a.heard.Set(now)
		}
	}
	after, every := silence, askEvery
	if a.isolated() {
		after, every = isolatedSilence, isolatedEvery
	}
	if now.Sub(a.heard.Load()) < after || now.Sub(a.loop.asked) < every || !a.asking.CompareAndSwap(false, true) {
		return
	}
	a.loop.asked = now
	go func() {
		defer a.asking.Store(false)
		a.askServers(ctx)
	}()
}

// isolated tells whether this node reaches no other: it has no session with a relay, and no path.
func (a *Agent) isolated() bool {
	if a.pool == nil || a.relayOnly() || a.isServer() || len(a.pool.Links()) > 0 {
		return false
	}
	for _, p := range a.currentPaths() {
		if p.Alive {
			return false
		}
	}
	return true
}

// askServers asks one server after the other until one says that this node was revoked, or has news for one that
// reaches nobody. Servers alone are believed: the log comes from them too.
func (a *Agent) askServers(ctx context.Context) {
	node, err := a.newNode()
	if err != nil {
		return
	}
	request := &skeinv1.JoinRequest{ClusterId: a.cluster.String(), Node: node, RequestId: consensus.NewRequestID()}
	if a.isolated() {
		state := a.replica.State()
		hash := state.Hash()
		request.MemberIndex, request.MemberHash = state.Index(), hash[:]
	}
	for _, v := range a.replica.State().Servers() {
		id, err := identity.ParseID(v.GetNodeId())
		key, ok := a.roster.Key(id)
		if err != nil || !ok || id == a.id {
			continue
		}
		for _, address := range ownrecord.JoinAddresses(a.gossip.Records()[id].Record) {
			news, err := joining.JoinAt(ctx, a.key, a.numbers.MarkWG, &skeinv1.JoinToken_Seed{Address: address,
				IdentityKey: key}, request)
			var r *joining.RevokedError
			if errors.As(err, &r) {
				a.revokedBy.Store(r)
				a.wakeUp()
				return
			}
			if err == nil {
				a.followNews(news)
				return
			}
			if errors.Is(err, joining.ErrRefused) || ctx.Err() != nil {
				break // it answers, and knows nothing of that
			}
		}
	}
}

// followNews follows what a server says to a node that reaches nobody, most of all to where there are relays.
func (a *Agent) followNews(r *skeinv1.JoinResponse) {
	have := a.replica.State().Index()
	var err error
	switch {
	case r.GetNews().GetBase() == have && len(r.GetNews().GetEvents()) > 0:
		err = a.replica.Apply(r.GetNews())
	case r.GetState().GetIndex() > have:
		err = a.replica.Reset(r.GetState())
	}
	if err != nil {
		a.log.Warn("a server's news cannot be applied", "error", err)
		return
	}
	a.roster.Update(a.replica.State())
	a.gossip.RosterChanged()
	n, errs := a.gossip.Merge(r.GetRecords())
	if n > 0 || len(errs) > 0 || a.replica.State().Index() > have {
		a.log.Info("this node reaches nobody, and a server has told it of others at the port for joiners", "index",
			a.replica.State().Index(), "records", n, "refused", len(errs))
		a.wakeUp()
	}
}

// news is what a member is told that reaches nobody.
func (a *Agent) news(after uint64) *skeinv1.JoinResponse {
	r := &skeinv1.JoinResponse{Time: time.Now().UnixNano()}
	evs, first, last, err := a.replica.Events(after, newsMax)
	switch {
	case err != nil || after < last && first > after+1:
		if st := a.replica.State(); consensus.CheckSent(st) == nil {
			r.State = st.Proto()
		}
	case len(evs) > 0:
		r.News = &skeinv1.Batch{Base: after, Events: consensus.Portion(evs)}
	}
	for id, e := range a.gossip.Records() {
		if id == a.id || e.Record.GetRelay() != nil && len(r.Records) < newsRelays {
			r.Records = append(r.Records, e.Signed)
		}
	}
	return r
}

// answerInquiry is what a node says to one that asks without a token. One that was revoked is told only that, also
// when that was agreed a moment ago.
func (a *Agent) answerInquiry(peer identity.ID, request *skeinv1.JoinRequest) *skeinv1.JoinResponse {
	r := a.answerMember(peer, request)
	if was := a.replica.State().Revoked(peer); was != nil {
		return &skeinv1.JoinResponse{Time: time.Now().UnixNano(), ErrorCode: joining.CodeRevoked,
			ErrorMessage: was.GetReason()}
	}
	return r
}

// answerMember is what a node says to a member that reaches nobody.
func (a *Agent) answerMember(peer identity.ID, request *skeinv1.JoinRequest) *skeinv1.JoinResponse {
	if _, member := a.roster.Key(peer); member && request.GetMemberIndex() > 0 {
		if hash := request.GetMemberHash(); len(hash) > 0 { // earlier versions send none
			if a.replica.State().Index() < request.GetMemberIndex() {
				return a.news(math.MaxUint64) // no events: nobody can tell yet whether they follow on what it has
			}
			switch err := a.replica.SameHistory(peer, request.GetMemberIndex(), hash); {
			case errors.Is(err, consensus.ErrTooSoon):
				return a.news(math.MaxUint64) // the same; it asks again when the answer has brought it nobody
			case errors.Is(err, consensus.ErrDiverged):
				return &skeinv1.JoinResponse{Time: time.Now().UnixNano(), ErrorCode: string(events.FailedPrecondition),
					ErrorMessage: err.Error()}
			}
		}
		return a.news(request.GetMemberIndex())
	}
	return &skeinv1.JoinResponse{Time: time.Now().UnixNano(), ErrorCode: string(events.PermissionDenied),
		ErrorMessage: "the request holds no token: make one on a member with skein token create"}
}
