package path

import (
	"container/heap"
	"context"
	"errors"
	"maps"
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// owned is the state that only the loop may access.
type owned struct {
	settings Settings
	self     *Node
	peers    map[identity.ID]*peer
	timers   timers
	woken    []*peer             // in this turn of the loop
	pings    map[[12]byte]pinged // outstanding
	order    []sentPing          // of pings, oldest first
	crowd    int                 // largest size of pings since its last rebuild
	unready  map[identity.ID]bool
	others   map[identity.ID]bool // peers whose traffic others can carry
	spare    []event
	punches  []signalTo    // in this turn of the loop
	turns    turns         // of bursts
	late     time.Duration // as the machines were last told
	dirty    bool          // the path to a peer changed
	stale    bool          // only an RTT or a reason changed
	built    time.Time     // when Paths was last built
}

type pinged struct {
	peer identity.ID
	to   netip.AddrPort
	size int // as Action has it
	at   time.Time
}

type sentPing struct {
	tx [12]byte
	at time.Time
}

// peer is a machine with its place in the timer heap and the inputs that led to its state.
type peer struct {
	machine Machine
	wake    time.Time     // zero: never
	early   time.Duration // how much sooner the wake-up may come
	place   int           // index in timers; -1: not in it
	trace   trace
	last    Counters // the last reading; its time is zero before the first
	asked   questions
	relay   RelayChoice
}

// wakes reports whether a peer is woken in a turn that has already woken this many others.
func (p *peer) wakes(now time.Time, others int) bool {
	return !p.wake.After(now) || others < togetherMax && !p.wake.Add(-p.early).After(now)
}

// timers is a heap of peers by wake time.
type timers []*peer

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].wake.Before(t[j].wake) }
func (t timers) Swap(i, j int)      { t[i], t[j] = t[j], t[i]; t[i].place, t[j].place = i, j }
func (t *timers) Push(x any)        { p := x.(*peer); p.place = len(*t); *t = append(*t, p) }
func (t *timers) Pop() any {
	old := *t
	p := old[len(old)-1]
	old[len(old)-1] = nil
	*t, p.place = old[:len(old)-1], -1
	return p
}

func (m *Manager) loop(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		// Arrived inputs come before due timers: an answer in the queue must not look like a missing one.
		m.drain()
		m.due()
		m.runTurns()
		m.publish()
		m.signal() // after publish, so that no punch uses the path that has just died
		now, next := m.cfg.Clock(), time.Hour
		if len(m.o.timers) > 0 {
			next = max(m.o.timers[0].wake.Sub(now), 0)
		}
		timer.Reset(min(next, m.o.turns.next(now)))
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-timer.C:
		}
	}
}

func (m *Manager) drain() {
	for {
		m.mu.Lock()
		batch := m.queue
		m.queue, m.noisy = m.o.spare[:0], 0
		m.mu.Unlock()
		for _, e := range batch {
			m.handle(e)
		}
		clear(batch)
		m.o.spare = batch
		if len(batch) == 0 {
			return
		}
	}
}

func (m *Manager) handle(e event) {
	now := m.cfg.Clock()
	if e.do != nil {
		e.do(m, now)
		return
	}
	p, ok := m.o.peers[e.peer]
	if !ok {
		return
	}
	if e.in.Kind == InputPong {
		sent, ok := m.o.pings[e.tx]
		if !ok || sent.peer != e.peer {
			m.metrics.pongsUnknown.Add(1)
			return
		}
		delete(m.o.pings, e.tx)
		m.metrics.pongsReceived.Add(1)
		if sent.to != e.in.Endpoint {
			// A pong from another address proves no endpoint; it only names one to probe.
			e.in = Input{Kind: InputPing, Endpoint: e.in.Endpoint}
		} else {
			if !e.at.IsZero() {
				now = later(sent.at, e.at) // the time of arrival, not of this turn
			}
			e.in.RTT, e.in.Sent, e.in.Size = now.Sub(sent.at), sent.at, sent.size
		}
	}
	known, burst := len(p.machine.Probes), p.machine.BurstAt
	m.step(p, now, e.in)
	if e.in.Kind == InputPunch && !burst.Equal(p.machine.BurstAt) || e.in.Kind == InputPing &&
		known < len(p.machine.Probes) {
		m.note(now, e.peer, e.in) // only inputs that began something: a peer must not be able to flood the journal
	}
}

// due ticks the machines whose timers have expired, and some that may be early: a wake-up costs more than a ping, so
// pings are sent together where possible.
func (m *Manager) due() {
	now := m.cfg.Clock()
	if len(m.o.timers) > 0 && !m.o.timers[0].wake.After(now) {
		m.cfg.Lag.Note(m.o.timers[0].wake, now)
		for len(m.o.timers) > 0 && m.o.timers[0].wakes(now, len(m.o.woken)) {
			m.o.woken = append(m.o.woken, heap.Pop(&m.o.timers).(*peer))
		}
		for _, p := range m.o.woken {
			m.step(p, now, Input{Kind: InputTick})
		}
		clear(m.o.woken)
		m.o.woken = m.o.woken[:0]
	}
	for len(m.o.order) > 0 && now.Sub(m.o.order[0].at) > outstanding {
		delete(m.o.pings, m.o.order[0].tx)
		m.o.order = m.o.order[1:]
	}
	if m.o.crowd = max(m.o.crowd, len(m.o.pings)); m.o.crowd > 1024 && len(m.o.pings) < m.o.crowd/8 {
		// Maps never shrink, and a start pings all peers at once.
		m.o.pings, m.o.crowd = maps.Collect(maps.All(m.o.pings)), len(m.o.pings)
	}
}

// step feeds an input to one machine and carries out its actions.
func (m *Manager) step(p *peer, now time.Time, in Input) {
	before := p.machine.Path
	p.trace.add(p.machine, now, in)
	next, actions := Step(p.machine, now, in)
	lastPong := p.machine.LastPong
	p.machine = next
	var failed []Input
	for _, a := range actions {
		switch a.Kind {
		case ActionPing:
			// a padded ping may exceed the MTU of this host's own link
			if err := m.ping(p, next.Now, a.Endpoint, a.Size); err != nil && a.Size == 0 {
				failed = append(failed, Input{Kind: InputSendFailed, Endpoint: a.Endpoint, Error: cause(err)})
			}
		case ActionPunch:
			m.punch(p, a.Reply, a.Unheard)
		case ActionUse:
			m.use(p, before, lastPong)
		case ActionCheck:
			m.check(next.Peer)
		case ActionPredict:
			if m.cfg.Predict != nil {
				m.cfg.Predict(next.Peer, a.Predict)
			}
		case ActionReserve:
			m.reserve(p, a.Relay)
		case ActionPortDeaf, ActionGiveBack:
			if m.cfg.Ports != nil && a.Kind == ActionPortDeaf {
				m.cfg.Ports.ReservationFailed(a.Relay, next.Peer)
			} else if m.cfg.Ports != nil {
				m.cfg.Ports.GiveUpReservation(a.Relay, next.Peer)
			}
		case ActionBurst:
			m.o.turns.waiting = append(m.o.turns.waiting, p)
		case ActionWake:
			m.schedule(p, a.At, a.Early)
		}
	}
	if next.Path.Suspect != before.Suspect {
		m.suspected(p, before)
	}
	if next.Path.RTT != before.RTT || next.Path.Rule != before.Rule {
		m.o.stale = true
	}
	if next.Path.Rule != before.Rule && next.Path.same(before) {
		m.reasoned(p, before)
	}
	for _, in := range failed {
		m.step(p, now, in)
	}
}

// cause is the innermost error as text, since the caller names the operation.
func cause(err error) string {
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err.Error()
}

// reserve asks a relay for a port. The answer arrives through Reserved.
func (m *Manager) reserve(p *peer, relay identity.ID) {
	if m.cfg.Ports == nil {
		return
	}
	if err := m.cfg.Ports.Reserve(relay, p.machine.Peer); err != nil {
		m.log.Debug("no port reserved", "peer", p.machine.Peer, "error", err)
	}
}

func (m *Manager) schedule(p *peer, at time.Time, early time.Duration) {
	p.wake, p.early = at, early
	switch {
	case at.IsZero() && p.place >= 0:
		heap.Remove(&m.o.timers, p.place)
	case at.IsZero():
	case p.place < 0:
		heap.Push(&m.o.timers, p)
	default:
		heap.Fix(&m.o.timers, p.place)
	}
}

func (m *Manager) ping(p *peer, now time.Time, to netip.AddrPort, size int) (err error) {
	var tx [12]byte
	m.metrics.pingsSent.Add(1)
	if size == 0 {
		tx, err = m.cfg.Prober.SendPing(p.machine.Peer, to)
	} else {
		tx, err = m.cfg.Prober.SendPingSize(p.machine.Peer, to, Wire(size, p.machine.Settings.MTU))
	}
	if err != nil {
		m.metrics.pingErrors.Add(1)
		return err
	}
	m.o.pings[tx] = pinged{p.machine.Peer, to, size, now}
	m.o.order = append(m.o.order, sentPing{tx, now})
	return nil
}

// check requests a reading of the counters, and asks the relays whether the peer has a session.
func (m *Manager) check(id identity.ID) {
	if m.cfg.Relays != nil {
		m.cfg.Relays.Ask(id)
	}
	select {
	case m.count <- struct{}{}:
	default:
	}
}

func (m *Manager) punch(p *peer, reply, unheard bool) {
	if m.cfg.Signal == nil {
		return
	}
	punch := &skeinv1.Signal_Punch{Reply: reply, Unheard: unheard}
	if m.o.self != nil {
		for _, c := range sorted(m.o.self.Candidates) {
			if c.Type != relayC && len(punch.Addresses) < punchMax {
				punch.Addresses = append(punch.Addresses, c.Addr.String())
			}
		}
	}
	s := &skeinv1.Signal{From: m.cfg.Self.String(), Body: &skeinv1.Signal_Punch_{Punch: punch}}
	m.o.punches = append(m.o.punches, signalTo{p.machine.Peer, s})
}

// signal hands the turn's punches to the goroutine that sends them.
func (m *Manager) signal() {
	for _, s := range m.o.punches {
		select {
		case m.signals <- s:
			m.metrics.punchesSent.Add(1)
		default:
			m.metrics.punchErrors.Add(1)
		}
	}
	clear(m.o.punches)
	m.o.punches = m.o.punches[:0]
}

// use announces a new path, and records how it came about.
func (m *Manager) use(p *peer, before Path, lastPong time.Time) {
	now := p.machine.Path
	if before.Rule == ruleIdle && now.Kind == None && p.machine.Relay.Absent {
		m.o.stale = true // the peer is off by the relays' report, and no traffic waits for it: not urgent
	} else {
		m.o.dirty = true
	}
	m.metrics.switched(before, now, p.machine.Now, lastPong)
	m.log.Info("path", "peer", p.machine.Peer, "from", before.String(), "to", now.String(), "alive", now.Alive,
		"rule", now.Rule)
	m.decided(p, before)
	if m.cfg.OnLost != nil && before.Kind == Direct && before.Alive && !(now.Kind == Direct && now.Alive) {
		m.cfg.OnLost(p.machine.Peer)
	}
}

// suspected announces that a suspicion of a peer has begun or ended.
func (m *Manager) suspected(p *peer, before Path) {
	m.o.dirty = true
	if p.machine.Path.Suspect {
		m.metrics.suspicions.Add(1)
		m.log.Info("no answer: others carry what goes through the peer", "peer", p.machine.Peer, "path", before.String())
	}
}

func (m *Manager) add(id identity.ID, now time.Time) *peer {
	p := &peer{machine: NewMachine(m.cfg.Self, id, now), place: -1}
	p.machine.Unready, p.machine.Replaceable = m.o.unready[id], m.o.others[id]
	m.o.peers[id] = p
	m.o.dirty = true
	if s := m.o.settings; !s.equal(Settings{}) {
		m.step(p, now, Input{Kind: InputSettings, Settings: &s})
	}
	if m.o.self != nil {
		m.step(p, now, Input{Kind: InputSelf, Node: m.o.self})
	}
	m.setRelay(p, now, m.choose(id))
	return p
}

func (m *Manager) remove(id identity.ID) {
	p, ok := m.o.peers[id]
	if !ok {
		return
	}
	m.schedule(p, time.Time{}, 0)
	delete(m.o.peers, id)
	m.o.dirty = true
}

func (m *Manager) choose(id identity.ID) RelayChoice {
	if m.cfg.Relays == nil {
		return RelayChoice{}
	}
	relay, rtt, ok := m.cfg.Relays.Choose(id)
	if !ok {
		return RelayChoice{Absent: m.cfg.Relays.Absent(id)}
	}
	return RelayChoice{ID: relay, RTT: rtt}
}

func (m *Manager) setRelay(p *peer, now time.Time, r RelayChoice) {
	if p.relay == r {
		return
	}
	in := Input{Kind: InputRelay, Relay: r}
	if p.relay.ID != r.ID || p.relay.Absent != r.Absent {
		m.note(now, p.machine.Peer, in)
	}
	p.relay = r
	m.step(p, now, in)
}

func (m *Manager) broadcast(now time.Time, in Input) {
	for _, p := range m.o.peers {
		m.step(p, now, in)
	}
}

// traffic compares counters with the last reading.
func (m *Manager) traffic(p *peer, now time.Time, c Counters) {
	c.Endpoint = unmap(c.Endpoint)
	if c.At.IsZero() || c.At.After(now) {
		c.At = now
	}
	last := p.last
	c = c.WithoutControl(last)
	p.last = c
	if last.At.IsZero() {
		if c.direct() && now.Sub(c.Handshake) < sessionFor {
			in := Input{Kind: InputAdopted, Endpoint: c.Endpoint}
			m.note(now, p.machine.Peer, in)
			m.step(p, now, in)
		}
		return
	}
	for _, in := range observe(last, c) {
		if in.Kind == InputTraffic {
			m.talked.Set(now)
		}
		m.step(p, now, in)
	}
	if p.asked = p.asked.next(last, c, p.machine.byRelay(c.Endpoint)); p.machine.deaf(p.asked) {
		in := Input{Kind: InputUnheard}
		m.note(now, p.machine.Peer, in)
		m.step(p, now, in)
	}
}

// WithoutControl subtracts the control net's share from the counters. What the control net counted before WireGuard
// did is subtracted from the next reading only: a share estimated too large would otherwise hide traffic forever.
func (c Counters) WithoutControl(last Counters) Counters {
	c.rawRx, c.rawTx = c.RxBytes, c.TxBytes
	if c.rawRx < last.rawRx || c.rawTx < last.rawTx || last.At.IsZero() {
		return c // another device
	}
	rx, tx := c.rawRx-last.rawRx, c.rawTx-last.rawTx
	controlRx, controlTx := c.ControlRx-last.ControlRx, c.ControlTx-last.ControlTx
	shake := uint64(0)
	if !c.Handshake.Equal(last.Handshake) {
		shake = handshakeBytes
	}
	c.RxBytes = last.RxBytes + rest(rx, controlRx+c.AcksRx-last.AcksRx+last.earlyRx+shake)
	c.TxBytes = last.TxBytes + rest(tx, controlTx+c.AcksTx-last.AcksTx+last.earlyTx+shake)
	c.earlyRx, c.earlyTx = rest(controlRx, rx), rest(controlTx, tx)
	return c
}

// Unexplained reports whether more came from the peer since last, an earlier result of WithoutControl, than the
// control net and WireGuard's own messages explain. On a late host the control net may not have counted its packets
// yet.
func (c Counters) Unexplained(last Counters) bool {
	next := c.WithoutControl(last)
	return next.RxBytes > last.RxBytes && carries(next.RxBytes-last.RxBytes)
}

// handshakeBytes is the upper bound of WireGuard's own messages for a session in one direction: an initiation of 148
// bytes and a keepalive of 32, or a response of 92. Traffic that needed the session is counted besides.
const handshakeBytes = 148 + 32

// rest is all minus part, at least 0.
func rest(all, part uint64) uint64 { return all - min(part, all) }

func (c Counters) direct() bool { return c.Endpoint.IsValid() && !c.Endpoint.Addr().IsLoopback() }

// overRelay stands for any local proxy.
var overRelay = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0)

// observe derives inputs from two consecutive readings.
func observe(last, c Counters) (ins []Input) {
	if c.rawRx < last.rawRx || c.rawTx < last.rawTx {
		return nil // another device
	}
	if heard := c.ControlRx != last.ControlRx; heard || c.ControlTx != last.ControlTx {
		ins = append(ins, Input{Kind: InputControl, Reply: heard})
	}
	rx, tx := c.RxBytes-last.RxBytes, c.TxBytes-last.TxBytes
	moved := c.Endpoint != last.Endpoint
	if moved && c.direct() && rx > 0 {
		ins = append(ins, Input{Kind: InputEndpointSeen, Endpoint: c.Endpoint})
	}
	switch {
	case carries(rx) &&
		c.Relayed != last.Relayed: // over a relay, at least partly: userspace WireGuard's endpoint does not follow packets
		ins = append(ins, Input{Kind: InputTraffic, Endpoint: overRelay})
	case carries(rx) && moved: // some of it may have come from the earlier endpoint
		ins = append(ins, Input{Kind: InputTraffic, Endpoint: c.Endpoint})
	case carries(rx):
		ins = append(ins, Input{Kind: InputTraffic, Endpoint: c.Endpoint, Sent: last.At})
	case carries(tx):
		ins = append(ins, Input{Kind: InputTraffic})
	}
	return ins
}

// sessionFor is how long after a handshake WireGuard accepts packets of that session (REJECT_AFTER_TIME).
const sessionFor = 180 * time.Second

// carries reports whether n bytes include more than WireGuard's own messages between two readings: a keepalive has 32
// bytes, a handshake 148 and 92, and a packet with content at least 64.
func carries(n uint64) bool {
	switch n {
	case 0, 32, 92, 92 + 32, 148, 148 + 32, 148 + 92, 148 + 92 + 32:
		return false
	}
	return true
}

// publish replaces the snapshot if a change is due to be shown.
func (m *Manager) publish() {
	if !m.o.dirty && !m.o.stale {
		return
	}
	now := m.cfg.Clock()
	if !m.o.dirty && now.Sub(m.o.built) < refresh*time.Duration(1+len(m.o.peers)/refreshEach) {
		return
	}
	paths := make(map[identity.ID]Path, len(m.o.peers))
	for id, p := range m.o.peers {
		paths[id] = p.machine.Path
	}
	m.paths.Store(&paths)
	m.metrics.count(paths)
	dirty := m.o.dirty
	m.o.dirty, m.o.stale, m.o.built = false, false, now
	if dirty {
		select {
		case m.changed <- struct{}{}:
		default:
		}
	}
}
