package consensus

import (
	"testing"
)

func TestThreeServersAgree(t *testing.T) {
	c := newCluster(t)
	c.form(3)
	agent := c.add("agent", false)
	c.join(agent)
	for i := range 20 {
		c.propose(c.nodes[i%4], token(i))
	}
	c.agree()
	if got := len(agent.replica.State().Tokens()); got != 20+3 {
		t.Fatalf("the agent knows %d tokens, want 23", got)
	}
}

func TestKilledLeaderIsReplaced(t *testing.T) {
	c := newCluster(t)
	c.form(3)
	c.join(c.add("agent", false))
	agent := c.nodes[3]
	old := c.leader()
	old.crash()
	c.propose(agent, token(1))
	old.start(false)
	c.propose(agent, token(2))
	c.agree()
}
