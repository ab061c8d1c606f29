package clients

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Timing of telling gateways.
const (
	syncTimeout    = 5 * time.Second // for one answer
	syncRetryFirst = 100 * time.Millisecond
	syncRetryLast  = egress.SyncEvery
	farewells      = 5 // tries to tell a gateway that it has no clients here any more
)

// pairKey is an egress and a gateway.
type pairKey struct {
	Ref
	node identity.ID
}

// pair keeps one gateway informed of one egress. Clients.mu guards it.
type pair struct {
	pairKey
	wakeups chan struct{}
	last    bool // the gateway shall know of no clients any more, and then it is forgotten

	installed []*skeinv1.EgressClient // what its data plane knows
	refused   map[string]string       // client's key -> why
	problem   string                  // why the last list is not installed
	answered  bool
}

// resync compares what gateways shall know with what they are told, and starts or wakes who tells them. The caller has
// mu.
func (c *Clients) resync(clients []Client) {
	if c.agreed == nil {
		return
	}
	lists := Lists(clients, c.agreed)
	for ref := range lists {
		c.told[ref] = true
	}
	for _, ref := range slices.Collect(maps.Keys(c.lists)) {
		if !sameClients(c.lists[ref], lists[ref]) {
			c.wakePairs(ref)
		}
	}
	c.lists = lists
	targets := map[pairKey]bool{}
	for ref := range c.told {
		for _, node := range c.agreed.Egresses[ref].Gateways {
			targets[pairKey{ref, node}] = true
		}
	}
	for key := range targets {
		last := len(c.lists[key.Ref]) == 0
		p := c.pairs[key]
		if p == nil {
			p = &pair{pairKey: key, wakeups: make(chan struct{}, 1)}
			c.pairs[key] = p
			c.all.Go(func() { c.tell(p) })
		}
		if p.last != last {
			p.last = last
			p.wake()
		}
	}
	for key, p := range c.pairs {
		if !targets[key] && !p.last {
			p.last = true
			p.wake()
		}
	}
	c.forgetTold()
}

// forgetTold drops egresses about which nobody is told any more. The caller has mu.
func (c *Clients) forgetTold() {
	for ref := range c.told {
		_, defined := c.agreed.Egresses[ref]
		if len(c.lists[ref]) == 0 && !defined {
			delete(c.told, ref)
		}
	}
}

func sameClients(a, b []*skeinv1.EgressClient) bool {
	return slices.EqualFunc(a, b, func(x, y *skeinv1.EgressClient) bool { return proto.Equal(x, y) })
}

func (c *Clients) wakePairs(ref Ref) {
	for key, p := range c.pairs {
		if key.Ref == ref {
			p.wake()
		}
	}
}

func (p *pair) wake() {
	select {
	case p.wakeups <- struct{}{}:
	default:
	}
}

// tell is a pair's goroutine.
func (c *Clients) tell(p *pair) {
	backoff, goodbyes := time.Duration(0), 0
	for {
		c.mu.Lock()
		c.gen++ // with each word, so that none is taken for an older one
		last := p.last
		r := &skeinv1.SyncEgressClientsRequest{Namespace: p.Namespace, Name: p.Name, Epoch: c.cfg.Epoch, Generation: c.gen}
		if !last {
			r.Clients = c.lists[p.Ref]
		}
		c.mu.Unlock()
		ctx, cancel := context.WithTimeout(c.ctx, syncTimeout)
		resp, err := c.cfg.Sender.Sync(ctx, p.node, r)
		cancel()
		if c.ctx.Err() != nil {
			return
		}
		good := c.heard(p, r, resp, err)
		if last {
			goodbyes++
		} else {
			goodbyes = 0
		}
		if last && (good || goodbyes >= farewells) && c.part(p, good) {
			return
		}
		pause := egress.SyncEvery
		if good {
			backoff = 0
		} else {
			backoff = min(max(2*backoff, syncRetryFirst), syncRetryLast)
			pause = backoff
		}
		select {
		case <-c.ctx.Done():
			return
		case <-p.wakeups:
			backoff = 0
		case <-time.After(pause):
		}
	}
}

// heard keeps an answer; good: nothing is left to be said.
func (c *Clients) heard(p *pair, r *skeinv1.SyncEgressClientsRequest, resp *skeinv1.SyncEgressClientsResponse,
	err error) (good bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := fmt.Sprint(p.problem, p.refused, p.answered, len(p.installed))
	switch {
	case err != nil:
		p.problem = err.Error()
	case !resp.GetInstalled():
		p.problem = join("the gateway does not know its clients yet", resp.GetReason())
	default:
		changed := !sameClients(p.installed, r.Clients)
		p.problem, p.installed, p.answered, p.refused = "", r.Clients, true, map[string]string{}
		for _, x := range resp.GetRefused() {
			p.refused[x.GetKey()] = x.GetReason()
		}
		good = true
		if changed {
			before = ""
		}
	}
	if before != fmt.Sprint(p.problem, p.refused, p.answered, len(p.installed)) {
		c.broadcast()
	}
	return good
}

// part ends a pair that has nothing to tell any more; false: it has again.
func (c *Clients) part(p *pair, good bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !p.last {
		return false
	}
	if !good {
		c.cfg.Log.Warn("a gateway was not told that it has no clients here any more", "egress", p.Ref, "node", p.node,
			"error", p.problem)
	}
	delete(c.pairs, p.pairKey)
	left := len(c.lists[p.Ref]) > 0
	for key := range c.pairs {
		left = left || key.Ref == p.Ref
	}
	if !left {
		delete(c.told, p.Ref)
		c.save()
	}
	return true
}

// known says whether the owner of a client's slot knows it. The caller has mu.
func (c *Clients) known(client Client, ch Choice) (state, reason string) {
	p := c.pairs[pairKey{ch.Ref, ch.Owner}]
	if p == nil {
		return Waiting, "its gateway has not been told of it yet"
	}
	if why, refused := p.refused[client.Key]; refused {
		return Refused, fmt.Sprintf("gateway %s: %s", ch.OwnerName, why)
	}
	if slices.ContainsFunc(p.installed, func(e *skeinv1.EgressClient) bool { return proto.Equal(e, entry(client, ch)) }) {
		return Ready, ""
	}
	if p.problem != "" {
		return Waiting, fmt.Sprintf("gateway %s: %s", ch.OwnerName, p.problem)
	}
	return Waiting, fmt.Sprintf("gateway %s has not answered yet", ch.OwnerName)
}
