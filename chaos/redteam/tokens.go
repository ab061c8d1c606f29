package redteam

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// joining is an attempt at the port for joiners. change makes the honest request of a new identity what is tried.
func joining(name string, from Place, guard Guard,
	change func(ctx context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error) Attempt {
	return Attempt{Name: name, From: from, Guard: guard, Judge: admitted,
		Try: func(ctx context.Context, f *Field) (Seen, error) {
			token, err := f.token(ctx, 1)
			if err != nil {
				return Seen{}, err
			}
			p, err := f.newcomer(stranger)
			if err != nil {
				return Seen{}, err
			}
			r, err := p.request(token, "new-"+p.id()[:6])
			if err == nil {
				err = change(ctx, f, r, token)
			}
			if err != nil {
				return Seen{}, err
			}
			return f.joinAs(ctx, p, r)
		}}
}

// joinAs asks, and looks at the log and at what came back.
func (f *Field) joinAs(ctx context.Context, p *person, r *skeinv1.JoinRequest) (seen Seen, err error) {
	if seen.Before, err = f.log(ctx); err != nil {
		return seen, err
	}
	answer, err := p.join(ctx, relayNode, r)
	if err != nil {
		answer = nil
		seen.Refusal = err.Error()
	}
	if seen.After, err = f.log(ctx); err != nil {
		return seen, err
	}
	if answer.GetErrorMessage() != "" {
		seen.Refusal = answer.GetErrorMessage()
	}
	switch s := answer.GetState(); {
	case s.GetGossipKeys() != nil:
		seen.Given = append(seen.Given, "the whole state, with the gossip key and the seed of preshared keys")
	case s != nil:
		seen.Given = append(seen.Given, "the state")
	case answer.GetNews() != nil:
		seen.Given = append(seen.Given, "events of the log")
	}
	return seen, nil
}

// admitted judges an attempt to join: by the log, and by what the newcomer was told.
func admitted(s Seen) string {
	if len(s.After.GetServers()) > len(s.Before.GetServers()) {
		return "it is a server"
	}
	if len(s.After.GetNodes()) > len(s.Before.GetNodes()) {
		return "it is a member"
	}
	return given(s)
}

func tokens() []Attempt {
	return []Attempt{
		joining("join with a wrong secret", Token, Tokens,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				t.Secret = make([]byte, 32)
				_, err := rand.Read(t.Secret)
				show(r, t)
				return err
			}),
		joining("join with the secret's hash in its place", Token, Tokens,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				for _, t := range f.members.GetTokens() {
					r.TokenId, r.TokenSecret = t.GetId(), t.GetSecretHash()
				}
				return nil
			}),
		joining("join with a token of another cluster", Token, Tokens,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				t.ClusterId = "000102030405060708090a0b0c0d0e0f"
				show(r, t)
				return nil
			}),
		joining("join with a revoked token", Token, Tokens,
			func(ctx context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				_, err := f.api(relayNode).RevokeToken(ctx, &skeinv1.RevokeTokenRequest{TokenId: r.GetTokenId()})
				return err
			}),
		joining("join with an expired token", Token, Tokens,
			func(ctx context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				made, err := f.api(relayNode).CreateToken(ctx,
					&skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Second)})
				if err != nil {
					return err
				}
				j, err := decodeToken(made.GetToken())
				show(r, j)
				pause.For(ctx, 1100*time.Millisecond)
				return err
			}),
		joining("join as a server with a token for agents", Token, Tokens,
			func(ctx context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				made, err := f.api(relayNode).CreateToken(ctx,
					&skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Hour), AgentsOnly: true})
				if err != nil {
					return err
				}
				j, err := decodeToken(made.GetToken())
				r.Node.Server = true
				show(r, j)
				return err
			}),
		{Name: "use a token for one node twice", From: Token, Guard: Tokens, Judge: admitted,
			Try: func(ctx context.Context, f *Field) (Seen, error) {
				token, err := f.token(ctx, 1)
				if err != nil {
					return Seen{}, err
				}
				var all [2]*person
				var requests [2]*skeinv1.JoinRequest
				for i := range all {
					if all[i], err = f.newcomer(stranger); err != nil {
						return Seen{}, err
					}
					if requests[i], err = all[i].request(token, "twice-"+all[i].id()[:6]); err != nil {
						return Seen{}, err
					}
				}
				if a, err := all[0].join(ctx, relayNode, requests[0]); err != nil || a.GetErrorCode() != "" {
					return Seen{}, errors.Join(err, errors.New("the first use fails: "+a.GetErrorMessage()))
				}
				return f.joinAs(ctx, all[1], requests[1])
			}},
		joining("ask for the role of a server in the node's own words", Token, Tokens,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.Server = true
				show(r, t)
				return nil
			}),
		joining("join with the proof that another joiner has shown", Token, Tokens,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				theirs, err := f.doomed.request(t, "their-own")
				if r.TokenProof = theirs.GetTokenProof(); !t.GetSigned() {
					r.TokenSecret = nil // a token without proofs has nothing else to steal
				}
				return err
			}),
		joining("take the name of a member", Token, Names,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.Name = victim
				show(r, t)
				return nil
			}),
		joining("join with another identity key than the stream proves", Token, Roster,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.IdentityKey = f.prey.key.Public()
				show(r, t)
				return nil
			}),
		joining("join with a member's WireGuard key", Token, Names,
			func(_ context.Context, f *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.WireguardKey = f.member(victim).GetWireguardKey()
				show(r, t)
				return nil
			}),
		joining("join under a name that is a path", Token, Names,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.Name = "../../../../tmp/x"
				show(r, t)
				return nil
			}),
		joining("join with 60 KiB of labels", Token, Limits,
			func(_ context.Context, _ *Field, r *skeinv1.JoinRequest, t *skeinv1.JoinToken) error {
				r.Node.Labels = manyLabels(400, 60)
				show(r, t)
				return nil
			}),
	}
}
