package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// A relay is a witness of where its clients' packets come from: nobody can have a TLS session, or prove a UDP mapping,
// from another host's address. A node that would send many packets to an address that a peer claims first asks relays
// of its own choice. An older relay ignores the question, and older clients do not ask.

const (
	whereWait  = 1500 * time.Millisecond // for the relays' answers; a peer waits 3 s for what depends on them
	meetRelays = 4                       // of the relays that a peer's record lists, this node shows itself to so many
	showEvery  = time.Minute
)

// questions holds the questions of this node that wait for answers.
type questions struct {
	mu      sync.Mutex
	waiting map[link][]chan testimony
}

// testimony is one relay's answer: from which addresses a node's packets come.
type testimony struct {
	relay identity.ID
	addrs []netip.Addr
}

// answer gives a relay's answer to all that wait for it, once. Further answers of this relay, whether to earlier
// questions or unasked, do not take the place of another relay's answer.
func (q *questions) answer(relay, node identity.ID, addrs []netip.Addr) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := link{relay, node}
	for _, c := range q.waiting[l] {
		c <- testimony{relay, addrs}
	}
	delete(q.waiting, l)
}

// begin makes c receive one answer of a relay. c must have room for an answer of each relay that is asked.
func (q *questions) begin(l link, c chan testimony) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.waiting == nil {
		q.waiting = map[link][]chan testimony{}
	}
	q.waiting[l] = append(q.waiting[l], c)
}

func (q *questions) end(l link, c chan testimony) {
	q.mu.Lock()
	defer q.mu.Unlock()
	rest := slices.DeleteFunc(q.waiting[l], func(o chan testimony) bool { return o == c })
	if q.waiting[l] = rest; len(rest) == 0 {
		delete(q.waiting, l)
	}
}

// ErrUnattested is returned by Attest when no relay says that a peer's packets come from an address.
var ErrUnattested = errors.New("no relay that this host chose itself has confirmed the peer's address")

// Attest returns nil when a relay says that a peer's packets come from an address. It asks the relays that this node
// chose itself, as its nearest, and those that PoolConfig.Witness names. It does not ask relays that are used only
// because the peer's record lists them: the peer itself could run such a relay. So that the peer can do the same, this
// node shows itself at the relays that the peer's record lists.
func (p *Pool) Attest(ctx context.Context, peer identity.ID, at netip.Addr) error {
	p.meet(peer)
	asked := p.witnesses(peer)
	if len(asked) == 0 {
		return fmt.Errorf("%w: there is no session with such a relay", ErrUnattested)
	}
	ctx, cancel := context.WithTimeout(ctx, whereWait)
	defer cancel()
	answers := make(chan testimony, len(asked))
	for _, c := range asked {
		l := link{c.relay.ID, peer}
		p.questions.begin(l, answers)
		defer p.questions.end(l, answers)
		c.control(func(b []byte) []byte { return wire.AppendNode(b, wire.FrameWhere, peer) })
	}
	saw := map[string]bool{}
	for range asked {
		select {
		case <-ctx.Done():
			return unattested(at, saw, len(asked))
		case t := <-answers:
			if slices.Contains(t.addrs, at) {
				return nil
			}
			for _, a := range t.addrs {
				saw[a.String()] = true
			}
		}
	}
	return unattested(at, saw, len(asked))
}

func unattested(at netip.Addr, saw map[string]bool, asked int) error {
	if len(saw) > 0 {
		return fmt.Errorf("%w: the peer claims %s, and is seen at %s", ErrUnattested, at,
			strings.Join(slices.Sorted(maps.Keys(saw)), ", "))
	}
	return fmt.Errorf("%w: the peer claims %s, and none of the %d relays asked has a session with it or can tell",
		ErrUnattested, at, asked)
}

// witnesses returns the sessions with relays whose answer about a peer counts.
func (p *Pool) witnesses(peer identity.ID) (all []*client) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	for id, c := range p.relays {
		if id != peer && c.queue() != nil && (c.needIs(needWarm) || p.cfg.Witness != nil && p.cfg.Witness(id)) {
			all = append(all, c)
		}
	}
	return all
}

// meet shows this node at the relays that a peer's record lists, since the peer asks these. It does not wait for them.
func (p *Pool) meet(peer identity.ID) {
	s := p.peer(peer)
	s.mu.Lock()
	listed := maps.Clone(s.listed)
	s.mu.Unlock()
	ids := slices.SortedFunc(maps.Keys(listed), func(a, b identity.ID) int {
		return cmp.Or(cmp.Compare(listed[a], listed[b]), slices.Compare(a[:], b[:]))
	})
	for _, id := range ids[:min(len(ids), meetRelays)] {
		c := p.client(id)
		if c == nil || id == peer {
			continue
		}
		c.demand(p.now())
		c.show()
	}
}

// show makes this node's IPv4 address known to a relay whose session runs over IPv6, because predicted ports are ports
// of IPv4.
func (c *client) show() {
	w := c.wire.Load()
	if w == nil || wire.RemoteIP(w.TLS.NetConn()).Unmap().Is4() {
		return
	}
	ipv4 := slices.DeleteFunc(slices.Clone(c.dialAddresses()), func(s string) bool {
		a, err := netip.ParseAddrPort(s)
		return err != nil || !a.Addr().Unmap().Is4()
	})
	now := int64(max(c.pool.now(), 1))
	last := c.shown.Load()
	if len(ipv4) == 0 || last != 0 && time.Duration(now-last) < showEvery || !c.shown.CompareAndSwap(last, now) {
		return
	}
	c.pool.wg.Go(func() {
		conn, err := c.pool.dialRelay(c.ctx, c.relay, ipv4, identity.ALPNSplice)
		if err == nil {
			err = ask(conn, wire.AppendHeader(nil, wire.FrameShow, 0))
			conn.NetConn().Close()
		}
		if err != nil {
			c.pool.cfg.Log.Debug("a relay was not shown this node's IPv4 address", "relay", c.relay.ID, "error", err)
		}
	})
}
