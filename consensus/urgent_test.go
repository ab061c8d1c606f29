package consensus

import (
	"errors"
	"fmt"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// A gateway that stops, one that begins and the clients' hosts follow different servers. All of them learn of a slot's
// move at once, not when the library next tells its followers what is committed, 50 to 100 ms later.
func TestSlotsMoveEverywhereAtOnce(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		first := c.nodes[0]
		for _, n := range c.nodes[:2] {
			c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{
				NodeId: n.id.String(), Labels: map[string]string{"gateway": "yes"}, SetLabels: true}}})
		}
		c.propose(first,
			&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{
				Name: "default", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.100.0.0/24"}}, BlockSizeBits: 3}}}})
		c.propose(first,
			&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{Egress: &skeinv1.Egress{
				Namespace: "out", Name: "any", Destinations: []string{"192.0.2.0/24"}, Replicas: 1,
				Gateways: map[string]string{"gateway": "yes"}}}}})
		c.agree()
		for i := range 10 {
			slot := first.replica.State().Slot("out", "any", 0)
			index := c.propose(first, &skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{
				Namespace: "out", Name: "any", NodeId: c.nodes[i%2].id.String(), Epoch: slot.GetEpoch(), Reason: "chosen",
				Planned: true}}}).GetIndex()
			committed := time.Now()
			for _, n := range c.nodes {
				for n.replica.State().Index() < index {
					if err := n.replica.Wait(t.Context(), n.replica.State().Index()); err != nil {
						t.Fatal(err)
					}
				}
			}
			if late := time.Since(committed); late > 10*time.Millisecond {
				t.Errorf("move %d was known everywhere %s after it was committed", i, late)
			}
			time.Sleep(200 * time.Millisecond) // virtual: the library's own word to its followers is not to help
			c.agree()
		}
	})
}

// A node does not notice for seconds that the line of its subscription is cut. If it learns from another node that
// there is more, it leaves the subscription.
func TestSubscriberThatHearsOfMoreLeavesASilentServer(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		for i := range 6 {
			server := c.followed(agent)
			time.Sleep(time.Second) // virtual: a heartbeat has just come, so that the silence is not noticed before
			c.net.cut(ids(agent), ids(server))
			index := c.propose(c.others(server)[0], token(i)).GetIndex()
			told := time.Now()
			for agent.replica.State().Index() < index {
				agent.client.Expect(index)
				time.Sleep(50 * time.Millisecond)
			}
			// the second try may find a connection that an earlier cut broke
			if took := time.Since(told); took > 3*behindFor+3*time.Second/10 {
				t.Errorf("round %d: the event came %s after it was heard of", i, took)
			}
			c.net.heal()
			c.agree()
		}
	})
}

// A line that brings nothing gets more and more time, so that a slow one can finish. Once it has, the next expectation
// is as short as the first.
func TestExpectingGrowsPatient(t *testing.T) {
	simulate(t, func(t *testing.T, c *cluster) {
		c.form(3)
		agent := c.add("agent", false)
		c.join(agent)
		c.followed(agent)
		c.net.cut(ids(agent), ids(c.nodes[:3]...))
		index := c.propose(c.nodes[0], token(1)).GetIndex()
		for range 60 {
			agent.client.Expect(index)
			time.Sleep(100 * time.Millisecond)
		}
		patience := func() time.Duration {
			agent.client.mu.Lock()
			defer agent.client.mu.Unlock()
			return agent.client.patience
		}
		if got := patience(); got < 2*time.Second {
			t.Errorf("after six seconds it waits %s", got)
		}
		c.net.heal()
		c.eventually("the agent caught up and is as impatient as before", func() error {
			agent.client.Expect(index)
			if agent.replica.State().Index() < index {
				return errors.New("it is behind")
			}
			if got := patience(); got != behindFor {
				return fmt.Errorf("it waits %s", got)
			}
			return nil
		})
	})
}
