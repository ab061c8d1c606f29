package join

import (
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestNext(t *testing.T) {
	const a, b = "aaaa", "bbbb"
	server, agent := Host{Node: "one", Server: true}, Host{Node: "one"}
	meant := Host{Node: "one", Server: true, Meant: a}
	for _, one := range []struct {
		name string
		h    Host
		w    World
		want Act
		why  string
	}{
		{"an agent waits for a token", agent, World{}, Wait, "no server has made a token"},
		{"an agent claims nothing", agent, World{Claim: &Claim{}, Stood: time.Hour}, Wait, "no server has made a token"},
		{"an agent joins", agent, World{Token: "t", TokenCluster: a}, Join, ""},
		{"a refused token is not tried again", agent, World{Token: "t", TokenCluster: a, Refused: "t"}, Wait, "refused"},
		{"the next token is", agent, World{Token: "u", TokenCluster: a, Refused: "t"}, Join, ""},
		{"a server without the ConfigMap makes nothing", server, World{}, Wait, "there is no ConfigMap"},
		{"the first server claims", server, World{Claim: &Claim{}}, Take, ""},
		{"it gives others a moment", server, World{Claim: &Claim{Node: "one"}, Stood: Quiet - 1}, Wait, "exists already"},
		{"then it settles", server, World{Claim: &Claim{Node: "one"}, Stood: Quiet}, Settle, ""},
		{"and makes it, also after a crash", meant, World{Claim: &Claim{"one", a}}, Create, ""},
		{"a crash before the ConfigMap was written", meant, World{Claim: &Claim{Node: "one"}, Stood: Quiet}, Settle, ""},
		{"a mesh that was meant and overtaken", meant, World{Claim: &Claim{"two", b}}, Wait, "was made by Node two"},
		{"another said so under this Node's name", meant, World{Claim: &Claim{"one", b}}, Wait, "was made by Node one"},
		{"the same Node with an empty disk", server, World{Claim: &Claim{"one", a}}, Wait, "gone for good"},
		{"it joins where others have the mesh", server, World{Claim: &Claim{"one", a}, Token: "t",
			TokenCluster: a}, Join, ""},
		{"also the one that meant to make it", meant, World{Claim: &Claim{"one", a}, Token: "t", TokenCluster: a}, Join, ""},
		{"another server waits", server, World{Claim: &Claim{Node: "two"}, Stood: Abandoned - 1}, Wait, "Node two is making"},
		{"and takes over what nobody goes on with", server, World{Claim: &Claim{Node: "two"}, Stood: Abandoned}, Take, ""},
		{"never what was settled", server, World{Claim: &Claim{"two", a}, Stood: 1000 * Abandoned}, Wait, "gone for good"},
		{"a token of another mesh", server, World{Claim: &Claim{"two", a}, Token: "t", TokenCluster: b}, Wait,
			"of mesh bbbb"},
	} {
		t.Run(one.name, func(t *testing.T) {
			got := Next(one.h, one.w)
			if got.Act != one.want || !strings.Contains(got.Why, one.why) || got.Act == Wait && got.Why == "" {
				t.Errorf("%+v, want act %d because %q", got, one.want, one.why)
			}
		})
	}
}

func TestKeep(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	token := func(left time.Duration, uses uint32) *skeinv1.Token {
		return &skeinv1.Token{ExpiresAt: now.Add(left).UnixNano(), UsesLeft: uses}
	}
	for _, one := range []struct {
		name    string
		k       Kept
		waiting int
		want    uint32
	}{
		{"nobody waits", Kept{}, 0, 0},
		{"nobody waits, and the old one has ended", Kept{"t", "c", token(-time.Hour, 0)}, 0, 0},
		{"the first", Kept{}, 3, 3 + spare},
		{"it does", Kept{"t", "c", token(Lifetime, 3)}, 3, 0},
		{"too few uses", Kept{"t", "c", token(Lifetime, 2)}, 3, 3 + spare},
		{"about to end", Kept{"t", "c", token(renew, 5)}, 3, 3 + spare},
		{"revoked", Kept{"t", "c", nil}, 3, 3 + spare},
		{"rubbish", Kept{"t", "", nil}, 3, 3 + spare},
		{"of another mesh", Kept{"t", "d", token(Lifetime, 9)}, 3, 3 + spare},
		{"very many", Kept{}, 5000, mostUses},
		{"very many, again", Kept{"t", "c", token(Lifetime, mostUses/2)}, 5000, 0},
	} {
		t.Run(one.name, func(t *testing.T) {
			got, good := Keep(one.k, "c", one.waiting, now)
			if got != one.want || (got == 0) != (good > 0) {
				t.Errorf("%d uses, good for %s, want %d", got, good, one.want)
			}
			if left := time.Unix(0, one.k.Token.GetExpiresAt()).Sub(now) - renew; got == 0 && one.waiting > 0 && good != left {
				t.Errorf("the one that is there is good for %s, want %s", good, left)
			}
		})
	}
}

// TestAdopt: members say which mesh it is where nobody has.
func TestAdopt(t *testing.T) {
	for _, c := range []struct {
		claim *Claim
		want  bool
	}{{nil, false}, {&Claim{}, true}, {&Claim{Node: "two"}, true}, {&Claim{Node: "two", Cluster: "a"}, false}} {
		if got := Adopt(c.claim); got != c.want {
			t.Errorf("%+v is adopted: %v, want %v", c.claim, got, c.want)
		}
	}
}
