package consensus

import (
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Servers are written as letters: upper case votes, lower case does not.
func TestPlanVoters(t *testing.T) {
	for _, c := range []struct {
		name, raft, agreed, healthy, stable, self, want string
	}{
		{"no cluster yet", "A", "", "", "", "a", "nothing"},
		{"all is well", "ABC", "ABC", "bc", "bc", "a", "nothing"},
		{"a failed server stays", "ABC", "ABC", "b", "b", "a", "nothing"},
		{"two failed servers stay", "ABC", "ABC", "", "", "a", "nothing"},
		{"a new server gets the log first", "A", "Ab", "", "", "a", "add non-voter b"},
		{"a new server that is not stable waits", "Ab", "Ab", "b", "", "a", "nothing"},
		{"a stable one is promoted", "Ab", "Ab", "b", "b", "a", "promote b"},
		{"and then votes", "Ab", "AB", "b", "b", "a", "add voter b"},
		{"but not while it is away", "Ab", "AB", "", "", "a", "nothing"},
		{"a voter that the log calls a non-voter is logged", "AB", "Ab", "", "", "a", "promote b"},
		{"a removed non-voter goes", "ABCd", "ABC", "", "", "a", "remove d"},
		{"a removed voter goes", "ABC", "AB", "bc", "bc", "a", "remove c"},
		{"a removed voter that failed goes", "ABC", "AB", "b", "b", "a", "remove c"},
		{"a removed voter stays while another has failed", "ABC", "AC", "b", "b", "a", "postpone removal b"},
		{"the leader is removed by its successor", "ABC", "BC", "bc", "bc", "a", "hand over a"},
		{"but not without a quorum behind it", "ABC", "BC", "b", "b", "a", "postpone removal a"},
		{"the others go before the leader", "ABCDE", "CDE", "bcde", "bcde", "a", "remove b"},
		{"the last voter stays", "A", "b", "b", "b", "a", "add non-voter b"},
		{"the last voter stays for now", "Ab", "b", "b", "", "a", "postpone removal a"},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := func(set string) func(raft.ServerID) bool {
				return func(id raft.ServerID) bool { return strings.Contains(set, string(id)) }
			}
			v := voterView{self: raft.ServerID(c.self), healthy: in(c.healthy), stable: in(c.stable)}
			for _, r := range c.raft {
				s := raft.Server{ID: raft.ServerID(strings.ToLower(string(r))), Suffrage: raft.Nonvoter}
				if r < 'a' {
					s.Suffrage = raft.Voter
				}
				v.raft = append(v.raft, s)
			}
			for _, r := range c.agreed {
				v.agreed = append(v.agreed, &skeinv1.Server{NodeId: strings.ToLower(string(r)), Voter: r < 'a'})
			}
			step := planVoters(v)
			if got := strings.TrimSpace(step.kind.String() + " " + string(step.id)); got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}

func TestHealthNeedsHeartbeatsAndTheLog(t *testing.T) {
	var h health
	now := time.Unix(0, 0)
	h.failed("b") // before the first leadership
	h.reset()
	h.checked("b", true, now)
	if !h.healthyFor("b", 0, now) || h.healthyFor("b", time.Second, now) {
		t.Error("health begins with the first check")
	}
	h.checked("b", true, now.Add(time.Second))
	if !h.healthyFor("b", time.Second, now.Add(time.Second)) {
		t.Error("it has kept up for a second")
	}
	h.failed("b")
	h.checked("b", true, now.Add(2*time.Second))
	if h.healthyFor("b", 0, now.Add(2*time.Second)) || !h.failing("b") {
		t.Error("a silent server is not healthy, whatever its index")
	}
	h.resumed("b")
	h.checked("b", true, now.Add(3*time.Second))
	h.checked("b", false, now.Add(4*time.Second))
	if h.healthyFor("b", 0, now.Add(4*time.Second)) {
		t.Error("a server that lags is not healthy")
	}
}
