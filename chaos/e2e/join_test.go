package e2e

import (
	"encoding/json"
	"testing"

	"github.com/skeinmesh/skein/agent/admission"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

const refused = "the cluster refused this node: "

// altered is a fresh token with something changed.
func altered(t *testing.T, change func(*skeinv1.JoinToken)) string {
	t.Helper()
	k, err := admission.DecodeToken(token(t))
	if err != nil {
		t.Fatal(err)
	}
	change(k)
	text, err := admission.EncodeToken(k)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func TestJoinTokens(t *testing.T) {
	s := newSite(t, "spare", "newcomer", nil)
	const cluster = "00112233445566778899aabbccddeeff"
	for _, c := range []struct {
		name, token, complaint string
	}{
		{"no token", "", "this host belongs to no cluster yet (state directory {state} is empty): create one with `skein " +
			"up --init`, or join one with `skein up --join TOKEN`"},
		{"no token text", "hello", "this is not a skein token: it must begin with \"skein1_\"; print one with `skein token " +
			"create` on a member"},
		{"cut short", token(t)[:60], "the token is damaged (…): copy it again, whole"},
		{"wrong secret", altered(t, func(k *skeinv1.JoinToken) { k.Secret[0]++ }), refused + "join token … is wrong or was " +
			"revoked: make a new one on a member with skein token create"},
		{"unknown", altered(t, func(k *skeinv1.JoinToken) { k.TokenId = "ffffffffffffffff" }),
			refused + "join token \"ffffffffffffffff\" is wrong or was revoked: make a new one on a member with skein token " +
				"create"},
		{"foreign cluster", altered(t, func(k *skeinv1.JoinToken) { k.ClusterId = cluster }),
			refused + "the join token is for cluster \"" + cluster + "\" and this is cluster …: make a token on a member of " +
				"this one with skein token create"},
		{"expired", token(t, "--ttl", "1ns"), refused + "join token … expired at …: make a new one on a member with skein " +
			"token create"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := s.in(t)
			args := s.upArgs()
			if c.token != "" {
				args = s.upArgs("--join", c.token)
			}
			s.fails(1, c.complaint, args...)
		})
	}
	t.Run("revoked", func(t *testing.T) {
		s := s.in(t)
		var k struct {
			Token string
			Info  struct{ ID string }
		}
		if err := json.Unmarshal([]byte(token(t, "-o", "json")), &k); err != nil {
			t.Fatal(err)
		}
		onSeed(t, "token", "revoke", k.Info.ID)
		s.fails(1, refused+"join token … is wrong or was revoked: make a new one on a member with skein token create",
			s.upArgs("--join", k.Token)...)
	})
	t.Run("name taken", func(t *testing.T) {
		s := newSite(t, "spare", "peer", nil)
		s.fails(1, refused+"the name peer is taken by node … (10.4.0.…): choose another, or revoke that node first with "+
			"skein node revoke peer", s.upArgs("--join", token(t))...)
	})
	t.Run("seed unreachable", func(t *testing.T) {
		s := s.in(t)
		gone := altered(t, func(k *skeinv1.JoinToken) {
			for _, seed := range k.GetSeeds() {
				seed.Address = "127.0.0.1:9"
			}
		})
		s.fails(1, "no seed of the token admitted this node within 1s: seed 127.0.0.1:9: …connection refused (is one of "+
			"them up, and its TCP port reachable from here?)",
			s.upArgs("--join", gone, "--join-timeout", "1s")...)
	})
	t.Run("seed is another", func(t *testing.T) {
		s := s.in(t)
		other, err := identity.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		text := altered(t, func(k *skeinv1.JoinToken) {
			for _, seed := range k.GetSeeds() {
				seed.IdentityKey = other.Public()
			}
		})
		s.fails(1, "no seed of the token admitted this node within 1s: seed …: the other end's identity key is not the one "+
			"expected: want node "+other.ID().String()+
			", have node … (is one of them up, and its TCP port reachable from here?)",
			s.upArgs("--join", text, "--join-timeout", "1s")...)
	})
	t.Run("used up", func(t *testing.T) {
		once := token(t)
		first := newSite(t, "spare", "first", nil)
		p := first.running("--join", once)
		first.ok("down", "--purge")
		if exit := p.ends(); exit != 0 {
			t.Errorf("after `skein down` the agent's exit status is %d", exit)
		}
		second := newSite(t, "spare", "second", nil)
		second.fails(1, refused+"join token … is used up (1 uses): make a new one on a member with skein token create",
			second.upArgs("--join", once)...)
	})
}
