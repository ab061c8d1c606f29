package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/plainpeer"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plainwg"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	plainEvery   = time.Second // between two looks at the sessions of plain peers, on a node that carries some
	plainAsk     = time.Second // a carrier that has not answered by then has failed once
	plainSilent  = 2           // failures, one after the other, of a carrier that counts as silent
	plainSettle  = 20 * time.Millisecond
	subjectPlain = "plain peers"
	subjectStale = "plain peers' secrets"
)

// plainPeers answers the plain peers that this node may carry.
type plainPeers struct {
	a        *Agent
	wake     chan struct{}
	followed *events.State // of the agent's loop

	// Of run's goroutine.
	carrier  *plainwg.Carrier
	state    *events.State // that peers are of
	peers    []carried     // that this node may carry, by index
	memories map[uint64]plainpeer.Memory
	terms    map[uint64]uint64
	secrets  map[uint64]plainSecrets
	retry    time.Time // when opening is tried again

	known  atomic.Pointer[projection.Plain]
	status atomic.Pointer[map[uint64]plainwg.Status]

	mu     sync.Mutex
	failed map[identity.ID]int  // of other carriers: questions without an answer, one after the other
	asking map[identity.ID]bool // questions under way
}

// carried is a plain peer that this node may carry.
type carried struct {
	*skeinv1.PlainPeer
	carriers []identity.ID // that are members, in order
}

func newPlainPeers(a *Agent) *plainPeers {
	p := &plainPeers{a: a, wake: make(chan struct{}, 1), memories: map[uint64]plainpeer.Memory{},
		terms:   map[uint64]uint64{},
		secrets: map[uint64]plainSecrets{}, failed: map[identity.ID]int{}, asking: map[identity.ID]bool{}}
	p.known.Store(&projection.Plain{})
	p.status.Store(&map[uint64]plainwg.Status{})
	return p
}

// view is what the projection needs to know.
func (p *plainPeers) view() projection.Plain {
	if p == nil {
		return projection.Plain{}
	}
	return *p.known.Load()
}

// record adds to this node's record what others need to know.
func (p *plainPeers) record(r *skeinv1.Record) {
	if p == nil {
		return
	}
	r.PlainPort = uint32(p.a.cfg.Ports.Plain)
	terms := p.known.Load().Terms
	for _, index := range slices.Sorted(maps.Keys(terms)) {
		r.PlainSessions = append(r.PlainSessions, &skeinv1.PlainSession{Peer: index, Term: terms[index]})
	}
}

// follow has the plain peers looked at again where something may have changed for them. The loop calls it in each
// round.
func (p *plainPeers) follow() {
	if p == nil || p.a.loop.state == p.followed && !p.known.Load().Carrying {
		return
	}
	p.followed = p.a.loop.state
	p.wakeUp()
}

// wakeUp has run look at every plain peer again. It never blocks.
func (p *plainPeers) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run carries plain peers until ctx ends.
func (p *plainPeers) run(ctx context.Context) {
	defer p.close()
	tick := time.NewTimer(plainEvery)
	defer tick.Stop()
	for {
		p.round(ctx, time.Now())
		if p.carrier != nil || !p.retry.IsZero() {
			tick.Reset(plainEvery)
		} else {
			tick.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
			select { // what comes together is looked at together, and a handshake needs a moment
			case <-ctx.Done():
				return
			case <-time.After(plainSettle):
			}
		case <-tick.C:
		}
	}
}

func (p *plainPeers) close() {
	if p.carrier != nil {
		if err := p.carrier.Close(); err != nil {
			p.a.log.Warn("end the sessions of plain peers", "error", err)
		}
		p.carrier = nil
	}
}

// round looks at every plain peer once.
func (p *plainPeers) round(ctx context.Context, now time.Time) {
	st := p.a.replica.State()
	if st != p.state || slices.ContainsFunc(p.peers,
		func(c carried) bool { return projection.PlainExpired(c.PlainPeer, p.a.leaderTime()) }) || !p.retry.IsZero() {
		p.state = st
		p.peers = p.mine(st)
		if !p.configure(now) {
			p.publish()
			return
		}
	}
	if p.carrier == nil {
		return
	}
	status := p.carrier.Status(now)
	p.status.Store(&status)
	silent := p.silent()
	records := p.a.gossip.Records()
	watched := map[identity.ID]bool{}
	for _, c := range p.peers {
		index := c.GetCreatedIndex()
		seen, ok := status[index]
		if !ok {
			continue
		}
		terms := projection.PlainTerms(index, c.carriers,
			func(id identity.ID) *skeinv1.Record { return records[id].Record })
		delete(terms, p.a.id)
		if t := p.terms[index]; t > 0 {
			terms[p.a.id] = t
		}
		memory, action := plainpeer.Step(p.memories[index], plainpeer.Input{
			Now: now, Self: p.a.id, Carriers: c.carriers, Terms: terms, Silent: silent, Session: seen.Session,
			Way: seen.Way,
		})
		p.memories[index] = memory
		p.act(c, action)
		if !seen.Way.Heard.IsZero() && now.Sub(seen.Way.Heard) < plainpeer.Lately {
			for _, id := range c.carriers {
				watched[id] = watched[id] || id != p.a.id
			}
		}
	}
	p.ask(ctx, watched)
	p.publish()
}

// act does what was decided for a peer.
func (p *plainPeers) act(c carried, do plainpeer.Action) {
	index := c.GetCreatedIndex()
	var err error
	switch {
	case do.Claim > 0:
		p.terms[index] = do.Claim
		p.a.log.Info("a plain peer is carried from here", "peer", c.GetName(), "term", do.Claim)
	case do.Begin.IsValid():
		p.a.log.Info("a session with a plain peer is begun", "peer", c.GetName(), "endpoint", do.Begin.String())
		err = p.carrier.Begin(index, do.Begin)
	case do.Drop:
		p.a.log.Info("a plain peer is carried elsewhere", "peer", c.GetName())
		err = p.carrier.Drop(index)
	}
	if err != nil {
		p.a.log.Warn("configuring a plain peer", "peer", c.GetName(), "error", err)
	}
}

// publish has the agent's loop act when something has changed for others.
func (p *plainPeers) publish() {
	next := projection.Plain{Carrying: p.carrier != nil, Terms: maps.Clone(p.terms)}
	if old := p.known.Load(); old.Carrying == next.Carrying && maps.Equal(old.Terms, next.Terms) {
		return
	}
	p.known.Store(&next)
	p.a.wakeUp()
}

// mine are the plain peers that this node may carry.
func (p *plainPeers) mine(st *events.State) (out []carried) {
	if st.Node(p.a.id) == nil {
		return nil
	}
	now := p.a.leaderTime()
	for _, peer := range st.PlainPeers() {
		carriers := projection.PlainCarriers(st, peer)
		if slices.Contains(carriers, p.a.id) && !projection.PlainExpired(peer, now) {
			out = append(out, carried{peer, carriers})
		}
	}
	slices.SortFunc(out, func(x, y carried) int { return int(int64(x.GetCreatedIndex()) - int64(y.GetCreatedIndex())) })
	return out
}

// configure makes the carrier answer the peers, and reports whether there is one.
func (p *plainPeers) configure(now time.Time) bool {
	index := map[uint64]bool{}
	for _, c := range p.peers {
		index[c.GetCreatedIndex()] = true
	}
	gone := func(i uint64) bool { return !index[i] }
	maps.DeleteFunc(p.memories, func(i uint64, _ plainpeer.Memory) bool { return gone(i) })
	maps.DeleteFunc(p.terms, func(i, _ uint64) bool { return gone(i) })
	maps.DeleteFunc(p.secrets, func(i uint64, _ plainSecrets) bool { return gone(i) })
	p.a.report(subjectStale, warning, staleSecrets(p.peers), "give each of them new ones with skein peer add NAME "+
		"--replace")
	if len(p.peers) == 0 {
		p.close()
		p.retry = time.Time{}
		p.status.Store(&map[uint64]plainwg.Status{})
		p.a.report(subjectPlain, warning, "", "")
		return false
	}
	var errs []error
	if p.carrier == nil {
		carrier, err := plainwg.Open(plainwg.Config{Link: p.a.numbers.PlainLink, Port: p.a.cfg.Ports.Plain,
			Mark: p.a.numbers.MarkWG,
			MTU:  p.a.linkMTU(), OwnKey: dataplane.Key(p.a.wg.Load().Device),
			Source: p.a.overlayAddrs(), Log: p.a.log, OnHandshake: p.wakeUp})
		if err != nil {
			p.retry = now
			p.a.report(subjectPlain, failure, err.Error(),
				"this node carries no plain peer until that is repaired; their other carriers do")
			return false
		}
		p.carrier = carrier
	}
	connected := p.a.links.Connected(p.a.cfg.Dataplane.Link)
	var peers []plainwg.Peer
	for _, c := range p.peers {
		secrets, err := p.unseal(c)
		if err != nil {
			errs = append(errs,
				fmt.Errorf("plain peer %s: %w: give it new secrets with skein peer add %[1]s --replace", c.GetName(),
					err))
			continue
		}
		peer := plainwg.Peer{ID: c.GetCreatedIndex(), PublicKey: dataplane.Key(c.GetPublicKey()),
			CarrierKey: secrets.key, PresharedKey: secrets.psk}
		for _, prefix := range projection.PlainPrefixes(c.PlainPeer) {
			if i := slices.IndexFunc(connected, prefix.Overlaps); i >= 0 {
				errs = append(errs,
					fmt.Errorf("plain peer %s: %s overlaps %s, the network on a link of this host: it is not led from here",
						c.GetName(), prefix, connected[i]))
				continue
			}
			peer.Prefixes = append(peer.Prefixes, prefix)
		}
		peers = append(peers, peer)
	}
	if err := p.carrier.Set(peers); err != nil {
		errs = append(errs, err)
		p.retry = now
	} else {
		p.retry = time.Time{}
	}
	message := ""
	if err := errors.Join(errs...); err != nil {
		message = err.Error()
	}
	p.a.report(subjectPlain, warning, message, "what is named is not reached by this node")
	return true
}

// plainSecrets are what the carriers of a plain peer share.
type plainSecrets struct{ key, psk dataplane.Key }

// errNotSealed is for a carrier that the log has no secrets for.
var errNotSealed = errors.New("its secrets are not for this node")

// unseal reads what was sealed for this node.
func (p *plainPeers) unseal(c carried) (plainSecrets, error) {
	if have, ok := p.secrets[c.GetCreatedIndex()]; ok {
		return have, nil
	}
	i := slices.IndexFunc(c.GetCarriers(),
		func(v *skeinv1.PlainCarrier) bool { return v.GetNodeId() == p.a.id.String() })
	if i < 0 {
		return plainSecrets{}, errNotSealed
	}
	raw, err := p.a.wg.Load().Device.Unseal(c.GetCarriers()[i].GetSealed())
	if err != nil {
		return plainSecrets{}, fmt.Errorf("its secrets for this node cannot be read (%w)", err)
	}
	defer clear(raw)
	out := plainSecrets{}
	if len(raw) != len(out.key)+len(out.psk) {
		return plainSecrets{}, errNotSealed
	}
	copy(out.key[:], raw)
	copy(out.psk[:], raw[len(out.key):])
	if public, err := identity.WireGuardKey(out.key).Public(); err != nil ||
		string(public[:]) != string(c.GetCarrierKey()) {
		return plainSecrets{}, errNotSealed
	}
	p.secrets[c.GetCreatedIndex()] = out
	return out, nil
}

// seal makes a carrier's secrets readable for that node alone.
func (s plainSecrets) seal(node *skeinv1.Node) ([]byte, error) {
	raw := append(append([]byte(nil), s.key[:]...), s.psk[:]...)
	defer clear(raw)
	return identity.Seal(identity.WireGuardKey(node.GetWireguardKey()), raw)
}

// silent are the carriers that do not answer.
func (p *plainPeers) silent() map[identity.ID]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[identity.ID]bool{}
	for id, n := range p.failed {
		if n >= plainSilent {
			out[id] = true
		}
	}
	return out
}

// ask asks each of the other carriers for a word: an agent that is gone, or cut off, gives none.
func (p *plainPeers) ask(ctx context.Context, others map[identity.ID]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.failed, func(id identity.ID, _ int) bool { return !others[id] })
	for id, want := range others {
		if !want || p.asking[id] {
			continue
		}
		p.asking[id] = true
		go func() {
			asked := time.Now()
			asking, cancel := context.WithTimeout(ctx, plainAsk)
			defer cancel()
			_, err := p.a.egressBy(p.a.conns, id).Clock(asking, &skeinv1.ClockRequest{})
			if err != nil { // one that refuses at once is asked no more often than one that is silent
				select {
				case <-asking.Done():
				case <-time.After(max(plainAsk-time.Since(asked), 0)):
				}
			}
			p.answered(id, err == nil)
		}()
	}
}

func (p *plainPeers) answered(id identity.ID, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.asking, id)
	if ok {
		p.failed[id] = 0
		return
	}
	p.failed[id]++
	p.wakeUp()
}

// leaderTime is the present by the leader's clock, as far as this node knows it.
func (a *Agent) leaderTime() time.Time {
	now := time.Now()
	if a.clockSeen.Load() {
		now = now.Add(-time.Duration(a.clock.Load()))
	}
	return now
}

// expirePlainPeers removes plain peers whose time is over, while this server leads.
func (a *Agent) expirePlainPeers(ctx context.Context, lead consensus.Lead) {
	for ctx.Err() == nil {
		st := lead.State()
		next := st.NextPlainExpiry()
		if next == nil {
			_ = a.replica.Wait(ctx, st.Index())
			continue
		}
		left := time.Until(time.Unix(0, next.GetExpiresAt()))
		if left <= 0 {
			_, err := lead.Propose(ctx, &skeinv1.Command{RequestId: newRequestID(), Issuer: a.id.String(),
				Body: &skeinv1.Command_RemovePlainPeer{
					RemovePlainPeer: &skeinv1.RemovePlainPeer{Name: next.GetName(), Reason: "expired",
						CreatedIndex: next.GetCreatedIndex()}}})
			if err == nil {
				continue
			}
			if ctx.Err() == nil {
				a.log.Warn("a plain peer has expired and cannot be removed; it will be tried again", "peer",
					next.GetName(), "error", err)
			}
			left = plainEvery
		}
		due, cancel := context.WithTimeout(ctx, left)
		_ = a.replica.Wait(due, st.Index()) // until its time is over, or the log says something new
		cancel()
	}
}
