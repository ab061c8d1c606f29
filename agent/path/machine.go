package path

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// Machine is the complete state of the path to one peer. It is a value: Step returns a new one and leaves the old one
// unchanged. The fields are exported so that the journal can encode them; JSON flattens the embedded groups. Only
// Step changes them.
type Machine struct {
	Ends
	InUse
	Search
	Activity
	Relaying
	Counterpart

	Now   time.Time     // of the last step
	Woken time.Time     // the wake-up requested last
	Late  time.Duration // how late this process woke recently
}

// Ends identifies both ends of the path and holds the record of each.
type Ends struct {
	SelfID   identity.ID
	Peer     identity.ID
	Settings Settings
	Self     Node
	Remote   Node
	Known    bool // a record of the peer has been seen
	Unready  bool // the prober lacks the peer's key: pings can be neither sent nor answered
}

// InUse is the path in use, its heartbeats, and what remains of the previous path.
type InUse struct {
	Path         Path
	Pending      []time.Time // pings sent after the newest answered one
	LastPong     time.Time
	SRTT, RTTVar time.Duration
	Slack        time.Duration // extra patience, since late answers have brought a path back
	SlackUntil   time.Time
	Lates        uint8         // late answers that brought a path back while Slack lasts
	Replaceable  bool          // other peers can carry the traffic that goes through this one
	Stall        time.Duration // how long this process has slept since StallOf, the oldest unanswered ping
	StallOf      time.Time
	TrustUntil   time.Time      // no suspicion before
	Cleared      uint8          // consecutive suspicions that an answer ended
	SilentSince  time.Time      // the first unanswered ping of the path that died last
	Lost         string         // sentence saying what ended the last direct path; empty once another is in use
	DirectEnd    time.Time      // when the last direct path died
	LastDirect   netip.AddrPort // endpoint of the last direct path
	Follow       netip.AddrPort // endpoint that the peer sends from, used as soon as it answers
	VerifyUntil  time.Time      // the peer may have lost the path: verify with fast pings until then
}

// Search is the search for a direct path: endpoints, bursts of pings, punches and port prediction.
type Search struct {
	Plan       Plan
	Probes     []Probe
	Spent      []Spent         // ping budgets of addresses that have not answered
	Prediction PredictionState `json:"Guessing"` // name of the field in traces that older versions wrote
	BurstAt    time.Time       // start of the last burst
	BurstTo    time.Time       // when its last answer can arrive
	NextRetry  time.Time       // next burst; zero: none wanted
	Retries    int
	Wishes     bool      // a burst is requested, and begins when the manager allows it
	WishPunch  bool      // the requested burst includes a punch
	PunchAt    time.Time // last punch sent
	InvitedAt  time.Time // start of the last burst that a punch of the peer caused
	AwakenedAt time.Time // when the peer last asked to be probed
}

// Activity is what is known of the pair's traffic.
type Activity struct {
	BusyUntil time.Time // heartbeats are sent until then
	TrafficAt time.Time // when WireGuard last carried something
	StirredAt time.Time // the first sign of traffic while idle
	Idle      bool      // no traffic: no search for a direct path
	ControlAt time.Time // when the control net last heard the peer in the tunnel
}

// Relaying is the pair's relay, and the port that the relay has reserved for the pair.
type Relaying struct {
	Relay      RelayChoice
	AwaySince  time.Time // when the relays began to call the peer absent
	RelaySince time.Time // when the pair last gained or lost its relay; initially when the machine was made
	Reserving  Reserving
	UDPLost    string // sentence saying what ended the use of a relay's port; empty once another is in use
	PortDied   bool   // the port ended because its pings were unanswered, and no endpoint was proven since
}

// Counterpart is what is known of the peer's agent and of its tunnel, which can fail independently.
type Counterpart struct {
	AgentAt    time.Time      // last ping, pong or punch of the peer's agent
	HeardFrom  netip.AddrPort // where WireGuard heard the peer last
	HeardAt    time.Time      // the reading of the counters that showed HeardFrom
	HeardAfter time.Time      // the reading before that one
	Mute       time.Time      // since when WireGuard has sent and received nothing
	SilentAt   time.Time      // when the path became silent
	CheckOf    time.Time      // the silence that the checks concern, identified by its first unanswered ping
	Checks     uint8          // number of checks
	CheckedAt  time.Time      // last check

	UnheardUntil time.Time // no direct path until then: WireGuard's packets did not pass over the last one
	UnheardTimes uint8     // consecutive times
}

// Probe is what is known of one endpoint of the peer.
type Probe struct {
	Endpoint     netip.AddrPort
	Type         skeinv1.CandidateType
	Source       string
	Known        bool // in the peer's signed record
	Planned      bool // the strategy wants it probed
	After        time.Duration
	Sent         uint32
	Answered     uint32
	Unanswered   uint32 // pings since the last answer
	FirstSeen    time.Time
	LastSent     time.Time
	LastAnswered time.Time
	Heard        time.Time     // last ping of the peer received from there
	RTT          time.Duration // drops to a lower sample at once, approaches higher ones by an eighth
	Streak       uint8         // answers in a row
	BurstAt      time.Time     // start of this endpoint's burst
	Next         int           // next index into pacing or firstPacing
	WindowAt     time.Time
	WindowSent   uint8
	Died         time.Time // when a path over it last died
	HoldUntil    time.Time // the endpoint is on hold until then
	Flaps        uint8
	Error        string   // why the last ping could not be sent
	MTUProbe     MTUProbe `json:"Wide"` // name of the field in traces that older versions wrote

	// For a port that a relay has reserved.
	Relay   identity.ID
	Ready   bool  // the relay has seen both ends: packets should pass
	Old     bool  // ended or replaced; kept so that packets from there are not taken for a direct endpoint
	Unheard bool  // the relay was told that nothing passes
	Turns   uint8 // bursts in a row without an answer
}

// NewMachine returns the machine of a peer about which nothing is known yet.
func NewMachine(self, peer identity.ID, now time.Time) Machine {
	return Machine{Ends: Ends{SelfID: self, Peer: peer}, Now: now, Relaying: Relaying{RelaySince: now},
		InUse: InUse{Path: Path{Since: now, Rule: "no-record", Reason: "Nothing has been heard of this peer yet."}}}
}

// step is the working state of one Step.
type step struct {
	Machine
	now     time.Time
	allowed bool           // a burst may begin
	fresh   netip.AddrPort // endpoint that answered in this step, if any
	sent    time.Time      // when the answered ping was sent
	actions []Action
}

// Step folds one input into a machine. It is pure: the same values always give the same result.
func Step(m Machine, now time.Time, in Input) (Machine, []Action) {
	if now.Before(m.Now) {
		now = m.Now
	}
	s := &step{Machine: m, now: now}
	s.Now = now
	s.Probes, s.Spent = slices.Clone(m.Probes), slices.Clone(m.Spent)
	s.Pending = slices.Clone(m.Pending)
	before := m.Path
	s.noteStall()
	s.handle(in)
	s.heartbeats()
	s.burst()
	s.reserve()
	s.stepMTUProbes()
	s.choosePath()
	s.predict()
	s.stepMTUProbes() // first pings of the trials that settle began
	s.Path.MTU = s.pathMTU()
	if !s.Path.same(before) {
		s.actions = append(s.actions, Action{Kind: ActionUse, Path: s.Path})
	}
	if at, early := s.nextWake(); !at.Equal(m.Woken) || in.Kind == InputTick {
		s.Woken = at
		s.actions = append(s.actions, Action{Kind: ActionWake, At: at, Early: early})
	}
	return s.Machine, s.actions
}

func (s *step) handle(in Input) {
	switch in.Kind {
	case InputSelf:
		if in.Node != nil && !in.Node.Equal(s.Self) {
			s.Self = *in.Node
			s.PunchAt = time.Time{} // the peer may now be told at once where to send
			s.UnheardUntil = time.Time{}
			s.refund()
			s.replan()
		}
	case InputPeer:
		if in.Node != nil && !(s.Known && in.Node.Equal(s.Remote)) {
			s.Remote, s.Known, s.UnheardUntil = *in.Node, true, time.Time{}
			s.replan()
		}
	case InputSettings:
		if in.Settings != nil {
			s.handleSettings(*in.Settings)
		}
	case InputRelay:
		s.handleRelay(in.Relay)
	case InputNetwork:
		s.refund()
		s.UnheardUntil, s.UnheardTimes = time.Time{}, 0
		for i := range s.Probes {
			s.Probes[i].HoldUntil, s.Probes[i].Flaps = time.Time{}, 0
			s.Probes[i].MTUProbe.Failed = time.Time{}
		}
		s.restart()
	case InputPong:
		s.handlePong(unmap(in.Endpoint), in.RTT, in.Sent, in.Size)
	case InputPing:
		s.handlePing(unmap(in.Endpoint))
	case InputEndpointSeen:
		s.handleSeen(unmap(in.Endpoint))
	case InputPunch:
		s.handlePunch(in.Addresses, in.Reply)
	case InputTraffic:
		s.handleTraffic(unmap(in.Endpoint), in.Sent)
	case InputAdopted:
		s.handleAdopted(unmap(in.Endpoint))
	case InputPrediction:
		if in.Prediction != nil {
			s.onPrediction(unmap(in.Endpoint), *in.Prediction)
		}
	case InputUnheard:
		s.handleUnheard(in.Reply)
	case InputReserved:
		s.handleReserved(in.Relay.ID, unmap(in.Endpoint), in.Reply, in.Error)
	case InputSendFailed:
		s.handleSendFailed(unmap(in.Endpoint), in.Error)
	case InputReady:
		s.Unready = false
		s.restart()
	case InputControl:
		s.handleControl(in.Reply)
	case InputLate:
		s.Late = in.RTT
	case InputReplaceable:
		s.handleReplaceable(in.Reply)
	case InputGo:
		if s.Wishes {
			s.Wishes, s.allowed = false, true
			s.startBurst(s.WishPunch)
		}
	}
}

// handleSendFailed refunds a ping that was not sent.
func (s *step) handleSendFailed(e netip.AddrPort, why string) {
	i := s.find(e)
	if i < 0 {
		return
	}
	p := &s.Probes[i]
	p.Error = why
	if i == s.active() {
		return // on the path in use silence counts, whatever the cause
	}
	p.Sent -= min(p.Sent, 1)
	p.Unanswered -= min(p.Unanswered, 1)
	if k := slices.IndexFunc(s.Spent, func(b Spent) bool { return b.Endpoint == e }); k >= 0 && !p.proven(s.now) {
		s.Spent[k].Left = min(s.Spent[k].Left+1, unprovenPings)
	}
}

func (s *step) handleSettings(n Settings) {
	old := s.Settings
	s.resize(n.MTU)
	s.Settings = n
	if !slices.Equal(old.Exclude, n.Exclude) || !old.samePrediction(n) {
		s.replan()
	}
	if !s.NextRetry.IsZero() {
		s.NextRetry = earlier(s.NextRetry, s.now.Add(s.directRetry()))
	}
}

func (s *step) handleRelay(r RelayChoice) {
	old := s.Relay
	s.Relay = r
	if old.ID.IsZero() != r.ID.IsZero() {
		s.RelaySince = s.now
	}
	if r.Absent && !old.Absent {
		s.AwaySince = s.now
	}
	switch {
	case !old.ID.IsZero() && r.ID.IsZero() && s.Path.Kind == Relay:
		if s.Idle && s.stirred() && !r.Absent {
			s.noteTraffic() // the relay did not carry it
			s.Idle = false
		}
		s.restart() // no relay is left: look for a direct path at once
	case old.Absent && !r.ID.IsZero() && s.direct() < 0:
		s.restart() // the peer is back
	}
}

// replan asks Strategy again after either end's record has changed, and restarts the search.
func (s *step) replan() {
	if !s.Known {
		return
	}
	s.Plan = s.strategy()
	for i := range s.Probes {
		s.Probes[i].Known, s.Probes[i].Planned = false, false
	}
	for _, t := range s.Plan.Targets {
		s.enlist(t.Candidate, t.After, true)
	}
	for _, k := range s.Plan.Skipped {
		if i := s.find(k.Addr); i >= 0 {
			s.Probes[i].Known = true
		}
	}
	s.Probes = slices.DeleteFunc(s.Probes, func(p Probe) bool {
		return !p.Known && p.Type != prflx && p.Type != relayC && !(s.Path.Kind == Direct && s.Path.Endpoint == p.Endpoint)
	})
	s.restart()
}

// enlist adds a candidate of the record to the probes.
func (s *step) enlist(c Candidate, after time.Duration, planned bool) {
	i := s.find(c.Addr)
	if i < 0 {
		s.Probes = append(s.Probes, Probe{Endpoint: c.Addr, FirstSeen: s.now, Next: len(pacing)})
		i = len(s.Probes) - 1
	}
	p := &s.Probes[i]
	p.Type, p.Source, p.Known, p.Planned, p.After = c.Type, c.Source, true, planned, after
}

// restart searches for a direct path as if for the first time.
func (s *step) restart() {
	s.Retries = 0
	s.BusyUntil = later(s.BusyUntil, s.now.Add(verifyFor))
	s.startBurst(true)
}

// learn adds an address known only from a packet or a punch, if there is room.
func (s *step) learn(e netip.AddrPort, source string) int {
	if unfit(Candidate{Addr: e}, s.Self, s.Settings.Exclude) != "" {
		return -1
	}
	s.forget()
	learned := 0
	for _, p := range s.Probes {
		if !p.Known && p.Type != relayC {
			learned++
		}
	}
	if learned >= learnedMax {
		return -1
	}
	s.Probes = append(s.Probes, Probe{Endpoint: e, Type: prflx, Source: source, FirstSeen: s.now, Next: len(pacing)})
	return len(s.Probes) - 1
}

// forget drops learned addresses that have not answered for a while. Indices of probes and pointers to them are
// invalid afterwards. Callers are learn and startBurst, and through them die, restart and every function that handles
// a packet from a new address.
func (s *step) forget() {
	active := s.active()
	var keep netip.AddrPort
	if active >= 0 {
		keep = s.Probes[active].Endpoint
	}
	s.Probes = slices.DeleteFunc(s.Probes, func(p Probe) bool {
		last := later(later(p.FirstSeen, p.LastSent), later(p.LastAnswered, p.HoldUntil))
		return !p.Known && (p.Type != relayC || p.Old) && p.Endpoint != keep && s.now.Sub(last) > learnedFor
	})
}

func (s *step) handlePing(e netip.AddrPort) {
	s.AgentAt = s.now
	s.credit(e)
	s.tryBack(e)
}

// tryBack pings an address from which a packet of the peer came.
func (s *step) tryBack(e netip.AddrPort) {
	i := s.find(e)
	if i < 0 {
		if i = s.learn(e, "probe"); i < 0 {
			return
		}
	}
	p := &s.Probes[i]
	p.Heard = s.now
	if i == s.active() || s.now.Sub(p.LastAnswered) < trustAnswer || s.now.Sub(p.LastSent) < pingBackGap {
		return
	}
	if p.Next >= len(pacing) && !p.Known {
		p.BurstAt, p.Next = s.now, 0 // the address's budget bounds this
		return
	}
	s.ping(i)
}

// handleSeen handles the address from which WireGuard received packets. A new address is worth a ping. So is one that
// shows that the ends use different direct paths, since WireGuard's endpoint would then change with every packet: the
// end that is not on the LAN changes its path, otherwise the end with the higher ID.
func (s *step) handleSeen(e netip.AddrPort) {
	i := s.find(e)
	if i < 0 {
		s.tryBack(e)
		return
	}
	a := s.active()
	if a < 0 || a == i || s.above(a, i) || s.now.Sub(s.Path.Since) < streakGap {
		return
	}
	out, seenOut := addr.Public(s.Probes[a].Endpoint.Addr()), addr.Public(e.Addr())
	if out == seenOut && s.SelfID.Compare(s.Peer) < 0 || seenOut && !out {
		return
	}
	s.Follow = e
	s.ping(i)
}

func (s *step) handlePunch(addrs []netip.AddrPort, reply bool) {
	s.AgentAt = s.now
	if s.Unready {
		return // it starts its own burst when Ready
	}
	s.AwakenedAt, s.Idle = s.now, false
	if s.now.Sub(s.BurstAt) >= punchGap || s.BurstAt.IsZero() {
		s.InvitedAt = s.now
		s.startBurst(false)
		if !reply {
			s.punch(true)
		}
	}
	s.BusyUntil = later(s.BusyUntil, s.now.Add(verifyFor))
	if !reply {
		s.VerifyUntil = s.now.Add(verifyFor) // the peer may have lost the path that this host still uses
	}
	for _, e := range addrs[:min(len(addrs), punchMax)] {
		e = unmap(e)
		i := s.find(e)
		if i < 0 {
			i = s.learn(e, "punch")
		}
		if i >= 0 && !s.Probes[i].Known && s.Probes[i].Next >= len(pacing) {
			s.Probes[i].BurstAt, s.Probes[i].Next = s.now, 0
		}
	}
}

func (s *step) handlePong(e netip.AddrPort, rtt time.Duration, sent time.Time, size int) {
	i := s.find(e)
	if i < 0 || rtt < 0 || rtt > rttLimit {
		return
	}
	p := &s.Probes[i]
	if p.Sent == 0 || sent.After(later(p.LastSent, p.MTUProbe.Sent)) {
		return // no ping of this host can have caused this answer
	}
	if s.now.Sub(p.LastAnswered) > streakGap {
		p.Streak, p.RTT = 0, rtt
	}
	if rtt < p.RTT { // samples only err upwards: one late answer would let the router beat the LAN for minutes
		p.RTT = rtt
	}
	p.RTT += (rtt - p.RTT) / 8
	p.Streak = min(p.Streak+1, 100)
	p.Answered++
	p.Unanswered, p.Error, p.LastAnswered = 0, "", s.now
	if size > 0 {
		s.handlePadded(i, size)
	}
	s.fresh, s.sent, s.AgentAt = e, sent, s.now
	if i == s.active() {
		s.LastPong = s.now
		s.clearSuspicion()
		s.Pending = slices.DeleteFunc(s.Pending, func(t time.Time) bool { return !t.After(sent) })
		if size == 0 {
			s.measure(rtt)
		}
		s.Path.RTT = s.SRTT
	}
}

// measure is the estimator of RFC 6298.
func (s *step) measure(rtt time.Duration) {
	s.RTTVar += ((s.SRTT - rtt).Abs() - s.RTTVar) / 4
	s.SRTT += (rtt - s.SRTT) / 8
}

func (s *step) find(e netip.AddrPort) int {
	for i := range s.Probes {
		if s.Probes[i].Endpoint == e {
			return i
		}
	}
	return -1
}

// active is the probe of the path in use, direct or a relay's port, while that path is alive; otherwise -1.
func (s *step) active() int {
	if !s.Path.probed() || !s.Path.Alive {
		return -1
	}
	return s.find(s.Path.Endpoint)
}

// ping sends a ping if the endpoint's budget allows it.
func (s *step) ping(i int) {
	p := &s.Probes[i]
	if s.Unready || p.LastSent.Equal(s.now) && p.Sent > 0 {
		return
	}
	active := i == s.active()
	if !active && !s.mayPing(i) {
		return
	}
	p.Sent++
	p.Unanswered++
	p.LastSent = s.now
	if active {
		s.Pending = append(s.Pending, s.now)
		if len(s.Pending) > pendingMax {
			// Pings before this one stay: the oldest gives the age of the silence, and deadMissed of them are needed for a
			// death.
			s.Pending = slices.Delete(s.Pending, deadMissed, deadMissed+1)
		}
	}
	s.actions = append(s.actions, Action{Kind: ActionPing, Endpoint: p.Endpoint})
}

func (s *step) punch(reply bool) {
	if !reply && s.now.Sub(s.PunchAt) < punchGap && !s.PunchAt.IsZero() {
		return
	}
	s.PunchAt = s.now
	s.actions = append(s.actions, Action{Kind: ActionPunch, Reply: reply})
}

func (s *step) directRetry() time.Duration {
	if s.Settings.DirectRetry > 0 {
		return s.Settings.DirectRetry
	}
	return directRetry
}

func (s *step) keepalive() time.Duration {
	k := idleKeepalive
	for _, o := range []time.Duration{s.Settings.Keepalive, s.Self.Keepalive, s.Remote.Keepalive} {
		if o > 0 {
			k = min(k, o)
		}
	}
	return k
}

// jitter spreads a duration over its last tenth, differently for each peer and turn.
func (s *step) jitter(d time.Duration, turn int) time.Duration {
	x := (binary.BigEndian.Uint64(s.Peer[:]) + uint64(turn)) * 0x9e3779b97f4a7c15 // Fibonacci hashing
	return d - d/10*time.Duration(x>>56)/256
}

// proven reports whether the endpoint has answered within provenFor, so that it certainly is the peer's.
func (p *Probe) proven(now time.Time) bool {
	return p.Answered > 0 && now.Sub(p.LastAnswered) < provenFor
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// earlier ignores zero times, which mean never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
