package udp

import (
	"maps"
	"net/netip"
	"time"

	"golang.org/x/time/rate"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

// Attach gives the UDP relay the ID of its own node and a way to look up the sessions that it serves, and starts its
// timekeeper. session returns nil for a node that has none.
func (u *Relay) Attach(self identity.ID, session func(node identity.ID) Session) {
	u.self, u.session = self, session
	u.done.Go(u.keepTime)
}

// TakeFrame takes what a client says about pairs.
func (u *Relay) TakeFrame(from Session, t wire.FrameType, body []byte) {
	if !u.allowed(from.Node()) {
		if t == wire.FrameReserve {
			u.deny(from, wire.DecodeNode(body), wire.DeniedQuota)
		}
		return
	}
	switch t {
	case wire.FrameReserve:
		u.reserve(from, wire.DecodeNode(body))
	case wire.FrameFailed:
		u.failed(from.Node(), wire.DecodePairID(body))
	case wire.FrameGiveUp:
		if p := u.pairOf(from.Node(), wire.DecodePairID(body)); p != nil {
			u.end(p)
		}
	}
}

// allowed paces a client's requests, which cost sockets here and frames elsewhere.
func (u *Relay) allowed(id identity.ID) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	l := u.pace[id]
	if l == nil {
		l = rate.NewLimiter(requestsPerSecond, u.cfg.PairsPerClient+16)
		u.pace[id] = l
	}
	return l.Allow()
}

// SessionBegan tells a node in a new session of the pairs that it has already.
func (u *Relay) SessionBegan(x Session) {
	for _, p := range u.all() {
		for i := range p.ends {
			if p.ends[i].node != x.Node() {
				continue
			}
			p.mu.Lock()
			if !p.over {
				u.grant(p, i, x)
				if !p.mapping.IsZero() {
					x.PushControl(func(b []byte) []byte { return wire.AppendState(b, p.id, wire.PairReady) })
				}
			}
			p.mu.Unlock()
		}
	}
}

// pairOf finds a pair if the node is one of its ends.
func (u *Relay) pairOf(node identity.ID, id wire.PairID) *pair {
	u.mu.Lock()
	defer u.mu.Unlock()
	if p := u.pairs[id]; p != nil && (p.nodes.a == node || p.nodes.b == node) {
		return p
	}
	return nil
}

// failed hears that nothing comes through a pair. When the kernel has not seen its packets either, the host's firewall
// may drop what should be forwarded, and this process forwards the pair instead. Only this one: both ends of a pair may
// be liars, or their addresses the only ones that the firewall drops, so that the failure says nothing about the pairs
// of others.
func (u *Relay) failed(node identity.ID, id wire.PairID) {
	p, now := u.pairOf(node, id), time.Now()
	if p == nil || !p.mayFall(now) {
		return
	}
	u.seeOthers(p, now)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || !p.inKernel || now.Sub(p.since) < repairGap {
		return // it has changed since
	}
	if used, err := u.cfg.Kernel.Used(p.mapping); used && err == nil {
		u.worked.Set(now)
		return // it does forward: the fault is on somebody's way to the relay
	}
	if !u.kernelDrops(now) {
		u.cfg.Log.Warn("the kernel does not forward a relayed pair; it is forwarded in userspace for a while",
			"node", p.nodes.a, "peer", p.nodes.b, "cause", ErrForwardingDropped, "for", kernelRetry)
	}
	u.fellAt.Set(now)
	u.counters.fellBack.Add(1)
	p.avoid = now.Add(kernelRetry)
	u.write(p, p.mapping)
	u.sendState(p, wire.PairReady)
}

// mayFall tells whether the kernel has the pair, and for long enough to be judged.
func (p *pair) mayFall(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.over && p.inKernel && now.Sub(p.since) >= repairGap
}

// seeOthers looks for another pair whose packets the kernel has forwarded, unless that was seen since the timekeeper's
// last round: what one member says of its own pair alone tells nobody that the kernel drops everything. The caller
// holds no pair's mu.
func (u *Relay) seeOthers(p *pair, now time.Time) {
	if now.Sub(u.worked.Load()) < u.round() {
		return
	}
	looked := 0
	for _, o := range u.all() { // in random order
		if o == p || looked == othersSeen {
			continue
		}
		if asked, used := u.used(o); used {
			u.worked.Set(now)
			return
		} else if asked {
			looked++
		}
	}
}

// used asks the kernel whether it has forwarded a pair's packets lately, if it has the pair.
func (u *Relay) used(p *pair) (asked, used bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over || !p.inKernel {
		return false, false
	}
	used, err := u.cfg.Kernel.Used(p.mapping)
	return true, used && err == nil
}

// noteFallen remembers of a pair that ends whether the kernel was seen not to forward it: it may be asked for again.
// The caller holds mu.
func (u *Relay) noteFallen(p *pair, now time.Time) {
	p.mu.Lock()
	avoid := p.avoid
	p.mu.Unlock()
	if !avoid.After(now) {
		return
	}
	maps.DeleteFunc(u.fell, func(_ nodes, until time.Time) bool { return !until.After(now) })
	if len(u.fell) < fellBackKept {
		u.fell[p.nodes] = avoid
	}
}

// end ends a pair: nothing more is forwarded, and its ports are free.
func (u *Relay) end(p *pair) {
	u.mu.Lock()
	known := u.pairs[p.id] == p
	if known {
		delete(u.pairs, p.id)
		delete(u.byNodes, p.nodes)
		if u.asked[p.asker]--; u.asked[p.asker] <= 0 {
			delete(u.asked, p.asker)
		}
		u.noteFallen(p, time.Now())
	}
	u.mu.Unlock()
	if !known {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	p.forward(Mapping{})
	if p.inKernel {
		if err := u.cfg.Kernel.Map(p.mapping, Mapping{}); err != nil {
			u.cfg.Log.Warn("an ended pair's entries stay in the kernel until they expire", "error", err)
		}
	}
	p.ends[0].port.close()
	p.ends[1].port.close()
	u.counters.ended.Add(1)
	u.sendState(p, wire.PairEnded)
}

// Observed is where a node's packets to the asker come from by a reserved port; invalid: that is not known.
func (u *Relay) Observed(asker, node identity.ID) netip.Addr {
	u.mu.Lock()
	p := u.byNodes[nodesOf(asker, node)]
	u.mu.Unlock()
	if p == nil {
		return netip.Addr{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.ends {
		if p.ends[i].node == node && !p.over {
			return p.ends[i].remote.Addr()
		}
	}
	return netip.Addr{}
}

// Kick ends the pairs of a node that is not a member any more.
func (u *Relay) Kick(id identity.ID) {
	for _, p := range u.all() {
		if p.nodes.a == id || p.nodes.b == id {
			u.end(p)
		}
	}
	u.mu.Lock()
	delete(u.pace, id)
	u.mu.Unlock()
}

func (u *Relay) all() []*pair {
	u.mu.Lock()
	defer u.mu.Unlock()
	out := make([]*pair, 0, len(u.pairs))
	for _, p := range u.pairs {
		out = append(out, p)
	}
	return out
}

// round is how often the timekeeper looks at all pairs.
func (u *Relay) round() time.Duration { return max(u.cfg.Idle/8, 10*time.Millisecond) }

// keepTime ends what nobody uses, and keeps the kernel's entries of the rest from running out.
func (u *Relay) keepTime() {
	tick := time.NewTicker(u.round())
	defer tick.Stop()
	for {
		select {
		case <-u.stop:
			return
		case <-tick.C:
		}
		for _, p := range u.all() {
			if u.idle(p, time.Now()) {
				u.end(p)
			}
		}
	}
}

// idle tells whether a pair has had its time. Sessions do not count: the kernel forwards for a client whose agent is
// away.
func (u *Relay) idle(p *pair, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mapping.IsZero() {
		return now.Sub(p.made) > provingTime
	}
	if p.inKernel {
		used, err := u.cfg.Kernel.Used(p.mapping)
		if used && err == nil {
			u.worked.Set(now)
		}
		if used || err != nil { // who cannot look does not judge
			p.passed.Set(now)
		}
		if now.Sub(p.since) > refreshKernel {
			u.write(p, p.mapping)
		}
	}
	return now.Sub(p.passed.Load()) > u.cfg.Idle
}

// Close lets go of the sockets. What the kernel forwards it goes on forwarding until its entries run out, so that a
// relay whose agent is renewed costs its clients nothing.
func (u *Relay) Close() {
	u.mu.Lock()
	if u.closed {
		u.mu.Unlock()
		return
	}
	u.closed = true
	u.mu.Unlock()
	close(u.stop)
	for _, p := range u.all() {
		p.mu.Lock()
		p.over = true
		p.forward(Mapping{})
		p.ends[0].port.close()
		p.ends[1].port.close()
		p.mu.Unlock()
	}
	u.done.Wait()
}

// Stats returns the counters.
func (u *Relay) Stats() Stats {
	c := &u.counters
	st := Stats{
		Ports: int(u.cfg.Last) - int(u.cfg.First) + 1, Reserved: c.reserved.Load(), Ended: c.ended.Load(),
		Denied: c.denied.Load(),
		Proven: c.ready.Load(), Rebound: c.rebound.Load(), Refused: c.refused.Load(), FellBack: c.fellBack.Load(),
		Repaired: c.repaired.Load(),
		Packets:  c.packets.Load(), Bytes: c.bytes.Load(), Lost: c.lost.Load(),
	}
	for _, p := range u.all() {
		p.mu.Lock()
		st.Pairs++
		if !p.mapping.IsZero() {
			st.Ready++
		}
		if p.inKernel {
			st.InKernel++
		}
		p.mu.Unlock()
	}
	return st
}
