// Package carrier answers the plain WireGuard peers that this node may carry: hosts that run a stock WireGuard and no
// skein. Package plainpeer decides which node carries which.
package carrier

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/plainpeer"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plainwg"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

const (
	every        = time.Second // between two looks at the sessions of plain peers, on a node that carries some
	askFor       = time.Second // a carrier that has not answered by then has failed once
	silentAfter  = 2           // failures, one after the other, of a carrier that counts as silent
	gather       = 20 * time.Millisecond
	subject      = "plain peers"
	subjectStale = "plain peers' secrets"
)

// Config is what the agent gives to Peers. The functions may be called from any goroutine.
type Config struct {
	Self      identity.ID
	Port      uint16 // UDP, at which plain peers are answered
	Link      string // of the device for them
	Mark      uint32 // of the packets that WireGuard sends
	MTU       func() int
	Key       func() identity.WireGuardKey // of this host's device
	Source    func() []netip.Addr          // this host's overlay addresses
	Connected func() []netip.Prefix        // the networks on this host's links
	State     func() *events.State
	Records   func() map[identity.ID]gossip.Entry
	Now       func() time.Time // by the leader's clock
	// Ask asks another carrier for a word.
	Ask func(ctx context.Context, carrier identity.ID) error
	// Wake has the agent's loop look at View and Record again.
	Wake   func()
	Report func(subject string, severity part.Severity, message, advice string)
	Log    *slog.Logger
}

// Peers answers the plain peers that this node may carry.
type Peers struct {
	c        Config
	wake     chan struct{}
	followed *events.State // of the goroutine that calls Follow

	// Of run's goroutine.
	carrier  *plainwg.Carrier
	state    *events.State // that peers are of
	peers    []carried     // that this node may carry, by index
	memories map[uint64]plainpeer.Memory
	terms    map[uint64]uint64
	secrets  map[uint64]Secrets
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

// New answers nobody before Run.
func New(c Config) *Peers {
	p := &Peers{c: c, wake: make(chan struct{}, 1), memories: map[uint64]plainpeer.Memory{},
		terms:   map[uint64]uint64{},
		secrets: map[uint64]Secrets{}, failed: map[identity.ID]int{}, asking: map[identity.ID]bool{}}
	p.known.Store(&projection.Plain{})
	p.status.Store(&map[uint64]plainwg.Status{})
	return p
}

// View is what the projection needs to know.
func (p *Peers) View() projection.Plain {
	if p == nil {
		return projection.Plain{}
	}
	return *p.known.Load()
}

// Record adds to this node's record what others need to know.
func (p *Peers) Record(r *skeinv1.Record) {
	if p == nil {
		return
	}
	r.PlainPort = uint32(p.c.Port)
	terms := p.known.Load().Terms
	for _, index := range slices.Sorted(maps.Keys(terms)) {
		r.PlainSessions = append(r.PlainSessions, &skeinv1.PlainSession{Peer: index, Term: terms[index]})
	}
}

// Follow has the plain peers looked at again where something may have changed for them. The loop calls it in each
// round.
func (p *Peers) Follow(st *events.State) {
	if p == nil || st == p.followed && !p.known.Load().Carrying {
		return
	}
	p.followed = st
	p.wakeUp()
}

// wakeUp has run look at every plain peer again. It never blocks.
func (p *Peers) wakeUp() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Run carries plain peers until ctx ends.
func (p *Peers) Run(ctx context.Context) {
	defer p.close()
	tick := time.NewTimer(every)
	defer tick.Stop()
	for {
		p.round(ctx, time.Now())
		if p.carrier != nil || !p.retry.IsZero() {
			tick.Reset(every)
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
			case <-time.After(gather):
			}
		case <-tick.C:
		}
	}
}

func (p *Peers) close() {
	if p.carrier != nil {
		if err := p.carrier.Close(); err != nil {
			p.c.Log.Warn("end the sessions of plain peers", "error", err)
		}
		p.carrier = nil
	}
}

// round looks at every plain peer once.
func (p *Peers) round(ctx context.Context, now time.Time) {
	st := p.c.State()
	if st != p.state || slices.ContainsFunc(p.peers,
		func(c carried) bool { return projection.PlainExpired(c.PlainPeer, p.c.Now()) }) || !p.retry.IsZero() {
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
	records := p.c.Records()
	watched := map[identity.ID]bool{}
	for _, c := range p.peers {
		index := c.GetCreatedIndex()
		seen, ok := status[index]
		if !ok {
			continue
		}
		terms := projection.PlainTerms(index, c.carriers,
			func(id identity.ID) *skeinv1.Record { return records[id].Record })
		delete(terms, p.c.Self)
		if t := p.terms[index]; t > 0 {
			terms[p.c.Self] = t
		}
		memory, action := plainpeer.Step(p.memories[index], plainpeer.Input{
			Now: now, Self: p.c.Self, Carriers: c.carriers, Terms: terms, Silent: silent, Session: seen.Session,
			Way: seen.Way,
		})
		p.memories[index] = memory
		p.act(c, action)
		if !seen.Way.Heard.IsZero() && now.Sub(seen.Way.Heard) < plainpeer.Lately {
			for _, id := range c.carriers {
				watched[id] = watched[id] || id != p.c.Self
			}
		}
	}
	p.ask(ctx, watched)
	p.publish()
}

// act does what was decided for a peer.
func (p *Peers) act(c carried, do plainpeer.Action) {
	index := c.GetCreatedIndex()
	var err error
	switch {
	case do.Claim > 0:
		p.terms[index] = do.Claim
		p.c.Log.Info("a plain peer is carried from here", "peer", c.GetName(), "term", do.Claim)
	case do.Begin.IsValid():
		p.c.Log.Info("a session with a plain peer is begun", "peer", c.GetName(), "endpoint", do.Begin.String())
		err = p.carrier.Begin(index, do.Begin)
	case do.Drop:
		p.c.Log.Info("a plain peer is carried elsewhere", "peer", c.GetName())
		err = p.carrier.Drop(index)
	}
	if err != nil {
		p.c.Log.Warn("configuring a plain peer", "peer", c.GetName(), "error", err)
	}
}

// publish has the agent's loop act when something has changed for others.
func (p *Peers) publish() {
	next := projection.Plain{Carrying: p.carrier != nil, Terms: maps.Clone(p.terms)}
	if old := p.known.Load(); old.Carrying == next.Carrying && maps.Equal(old.Terms, next.Terms) {
		return
	}
	p.known.Store(&next)
	p.c.Wake()
}

// mine are the plain peers that this node may carry.
func (p *Peers) mine(st *events.State) (out []carried) {
	if st.Node(p.c.Self) == nil {
		return nil
	}
	now := p.c.Now()
	for _, peer := range st.PlainPeers() {
		carriers := projection.PlainCarriers(st, peer)
		if slices.Contains(carriers, p.c.Self) && !projection.PlainExpired(peer, now) {
			out = append(out, carried{peer, carriers})
		}
	}
	slices.SortFunc(out, func(x, y carried) int { return int(int64(x.GetCreatedIndex()) - int64(y.GetCreatedIndex())) })
	return out
}

// configure makes the carrier answer the peers, and reports whether there is one.
func (p *Peers) configure(now time.Time) bool {
	index := map[uint64]bool{}
	for _, c := range p.peers {
		index[c.GetCreatedIndex()] = true
	}
	gone := func(i uint64) bool { return !index[i] }
	maps.DeleteFunc(p.memories, func(i uint64, _ plainpeer.Memory) bool { return gone(i) })
	maps.DeleteFunc(p.terms, func(i, _ uint64) bool { return gone(i) })
	maps.DeleteFunc(p.secrets, func(i uint64, _ Secrets) bool { return gone(i) })
	p.c.Report(subjectStale, part.Warns, staleSecrets(p.peers), "give each of them new ones with skein peer add NAME "+
		"--replace")
	if len(p.peers) == 0 {
		p.close()
		p.retry = time.Time{}
		p.status.Store(&map[uint64]plainwg.Status{})
		p.c.Report(subject, part.Warns, "", "")
		return false
	}
	var errs []error
	if p.carrier == nil {
		carrier, err := plainwg.Open(plainwg.Config{Link: p.c.Link, Port: p.c.Port,
			Mark: p.c.Mark,
			MTU:  p.c.MTU(), OwnKey: dataplane.Key(p.c.Key()),
			Source: p.c.Source(), Log: p.c.Log, OnHandshake: p.wakeUp})
		if err != nil {
			p.retry = now
			p.c.Report(subject, part.Fails, err.Error(),
				"this node carries no plain peer until that is repaired; their other carriers do")
			return false
		}
		p.carrier = carrier
	}
	connected := p.c.Connected()
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
			CarrierKey: secrets.Key, PresharedKey: secrets.PSK}
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
	p.c.Report(subject, part.Warns, message, "what is named is not reached by this node")
	return true
}

// errNotSealed is for a carrier that the log has no secrets for.
var errNotSealed = errors.New("its secrets are not for this node")

// unseal reads what was sealed for this node.
func (p *Peers) unseal(c carried) (Secrets, error) {
	if have, ok := p.secrets[c.GetCreatedIndex()]; ok {
		return have, nil
	}
	i := slices.IndexFunc(c.GetCarriers(),
		func(v *skeinv1.PlainCarrier) bool { return v.GetNodeId() == p.c.Self.String() })
	if i < 0 {
		return Secrets{}, errNotSealed
	}
	raw, err := p.c.Key().Unseal(c.GetCarriers()[i].GetSealed())
	if err != nil {
		return Secrets{}, fmt.Errorf("its secrets for this node cannot be read (%w)", err)
	}
	defer clear(raw)
	out := Secrets{}
	if len(raw) != len(out.Key)+len(out.PSK) {
		return Secrets{}, errNotSealed
	}
	copy(out.Key[:], raw)
	copy(out.PSK[:], raw[len(out.Key):])
	if public, err := identity.WireGuardKey(out.Key).Public(); err != nil ||
		string(public[:]) != string(c.GetCarrierKey()) {
		return Secrets{}, errNotSealed
	}
	p.secrets[c.GetCreatedIndex()] = out
	return out, nil
}

// silent are the carriers that do not answer.
func (p *Peers) silent() map[identity.ID]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[identity.ID]bool{}
	for id, n := range p.failed {
		if n >= silentAfter {
			out[id] = true
		}
	}
	return out
}

// ask asks each of the other carriers for a word: an agent that is gone, or cut off, gives none.
func (p *Peers) ask(ctx context.Context, others map[identity.ID]bool) {
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
			asking, cancel := context.WithTimeout(ctx, askFor)
			defer cancel()
			err := p.c.Ask(asking, id)
			if err != nil { // one that refuses at once is asked no more often than one that is silent
				select {
				case <-asking.Done():
				case <-time.After(max(askFor-time.Since(asked), 0)):
				}
			}
			p.answered(id, err == nil)
		}()
	}
}

func (p *Peers) answered(id identity.ID, ok bool) {
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

// Status are the sessions of plain peers as last looked at, by the index at which each was created.
func (p *Peers) Status() map[uint64]plainwg.Status {
	if p == nil {
		return nil
	}
	return *p.status.Load()
}

// staleSecrets names the plain peers whose secrets somebody knows who is not a member any more; empty: there are none.
func staleSecrets(peers []carried) string {
	const shown = 3
	var stale []string
	for _, c := range peers {
		for _, former := range c.GetCarriers() {
			if !slices.ContainsFunc(c.carriers, func(id identity.ID) bool { return id.String() == former.GetNodeId() }) {
				stale = append(stale, fmt.Sprintf("%s (%s)", c.GetName(), former.GetNodeId()))
			}
		}
	}
	if len(stale) == 0 {
		return ""
	}
	more := ""
	if n := len(stale) - shown; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	stale = stale[:min(len(stale), shown)]
	return "carriers that are not members any more know the secrets of " + strings.Join(stale, ", ") + more
}
