package kube

import (
	"context"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/identity"
)

// lostAfter is how long gossip must have missed a member, without a break, until its Node is tainted.
const lostAfter = 15 * time.Second

// losses are members that are Nodes and that gossip misses: since when, and whether their Nodes have been tainted for
// it. An agent that works takes the taint off by itself, and its Node is not tainted again before gossip has seen it.
type losses map[identity.ID]*loss

type loss struct {
	since   time.Time
	tainted bool
}

// look takes in what gossip sees. It returns whose Nodes are to be tainted now, and when the next one will be; 0: none.
func (l losses) look(members map[identity.ID]*Node, alive func(identity.ID) bool, self identity.ID,
	now time.Time) (over []identity.ID, next time.Duration) {
	for id := range l {
		if members[id] == nil || alive(id) {
			delete(l, id)
		}
	}
	for id := range members {
		if id == self || alive(id) {
			continue
		}
		if l[id] == nil {
			l[id] = &loss{since: now}
		}
		wait := lostAfter - now.Sub(l[id].since)
		switch {
		case l[id].tainted:
		case wait <= 0:
			over = append(over, id)
		case next == 0 || wait < next:
			next = wait
		}
	}
	return over, next
}

// withMost tells whether this node sees most of the servers. One that does not has been lost itself, more likely than
// all the others.
func withMost(s *part.Snapshot) bool {
	seen, all := 0, 0
	for _, v := range s.State.Servers() {
		id, err := identity.ParseID(v.GetNodeId())
		if err != nil {
			continue
		}
		all++
		if id == s.Self || s.Alive(id) {
			seen++
		}
	}
	return 2*seen > all
}

// taintLost puts the taint on the Nodes of members whose agents are lost.
func (c *controller) taintLost(ctx context.Context, a *apiserver, s *part.Snapshot,
	members map[identity.ID]*Node) time.Duration {
	if !withMost(s) {
		clear(c.lost)
		return 0
	}
	over, next := c.lost.look(members, s.Alive, s.Self, time.Now())
	if wait := c.tainting.wait(time.Now()); wait > 0 && len(over) > 0 {
		return wait
	}
	for _, id := range over {
		node := members[id]
		inner, cancel := context.WithTimeout(ctx, writeTimeout)
		wrote, err := a.taint(inner, node.Name, node.UID, true)
		cancel()
		if ctx.Err() != nil {
			return 0
		}
		if !vanished(err) {
			c.p.health.result("put the taint "+taintKey+" on Node "+node.Name, "patch", "nodes", err)
		}
		if err != nil {
			c.p.metrics.wrote("taint", err)
			c.tainting.fail(time.Now(), retryAfter(err))
			return c.tainting.wait(time.Now())
		}
		c.lost[id].tainted = true
		c.tainting.succeed()
		if wrote {
			c.p.metrics.wrote("taint", nil)
			c.p.log.Info("a Node is tainted: its agent is lost", "node", node.Name, "taint", taintKey,
				"member", s.State.Node(id).GetName())
		}
	}
	return next
}
