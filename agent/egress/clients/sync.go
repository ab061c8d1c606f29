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

// Timing of informing gateways.
const (
	syncTimeout    = 5 * time.Second // for one answer
	syncRetryFirst = 100 * time.Millisecond
	syncRetryLast  = egress.SyncEvery
	farewells      = 5 // attempts to inform a gateway that it has no clients here any more
)

// pairKey is an egress and a gateway.
type pairKey struct {
	Ref
	node identity.ID
}

// pair keeps one gateway informed about one egress's clients here. Clients.mu guards it.
type pair struct {
	pairKey
	wakeups chan struct{}
	last    bool // the gateway must forget its clients here, and then the pair ends

	installed []*skeinv1.EgressClient // the list that its data plane has
	refused   map[string]string       // client's key → reason
	problem   string                  // why the last list is not installed
	answered  bool
}

// resync compares the lists that gateways should have with those sent, and starts or wakes the goroutines that send
// them. The caller holds mu.
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
			c.all.Go(func() { c.syncPair(p) })
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

// forgetTold drops egresses that no longer exist and have no clients here. The caller holds mu.
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

// syncPair is the goroutine of a pair.
func (c *Clients) syncPair(p *pair) {
	backoff, goodbyes := time.Duration(0), 0
	for {
		c.mu.Lock()
		c.gen++ // new for each message, so that none counts as an older one
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

// heard records an answer; good: the gateway has the list.
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

// part ends a pair whose gateway has no clients here any more; false: it has some again.
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

// known returns the state of a client at the owner of its slot. The caller holds mu.
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
