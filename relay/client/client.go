package client

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/wire"
)

const (
	// A lost relay is suspected within 1.4 s: a ping is sent at most pingEvery after the last one that was answered; then
	// come suspectAfter and one tick. Suspected relays are used last; dead ones are dialled again.
	pulse         = 200 * time.Millisecond
	pingEvery     = 2 * pulse
	pingIdle      = 3 * time.Second // while no WireGuard packet has passed for idleAfter
	idleAfter     = 5 * time.Second
	quietPatience = 3 // factor on the time that an answer may then be missing
	suspectAfter  = 900 * time.Millisecond
	deadAfter     = 3 * time.Second

	firstRetry  = 150 * time.Millisecond
	minBackoff  = time.Second
	maxBackoff  = 30 * time.Second
	steadyAfter = 5 * time.Second // a session that lived so long resets the backoff

	farewellTime = time.Second // how long a session that is given up waits for its last answer

	rttSamples  = 8
	maxAccepts  = 64 // streams that one relay may offer at a time
	maxOutgoing = 16 // pings not answered
)

// queueStanding is how late a flow's packets may leave for some time before its oldest are dropped.
const queueStanding = 50 * time.Millisecond

// errNotNeeded ends the session with a relay that is not needed.
var errNotNeeded = errors.New("nobody needs this relay now")

// client keeps a session with one relay.
type client struct {
	pool    *Pool
	relay   Relay // addresses may change: see dialAddresses
	ctx     context.Context
	cancel  context.CancelFunc
	retry   chan struct{}             // dial now, without the rest of the backoff
	accept  chan struct{}             // counts streams being accepted
	wire    atomic.Pointer[wire.Conn] // of a session that answers; nil: there is none
	udp     atomic.Bool               // the relay reserves UDP ports
	tunnel  atomic.Uint64             // counts WireGuard's packets, singly or in bursts
	quiet   atomic.Bool               // no WireGuard packet has passed for idleAfter
	stirred chan struct{}             // a WireGuard packet passes again

	mu        sync.Mutex
	streams   map[*viaStream]struct{} // that pass through the relay
	addresses []string
	status    clientState
	pings     []ping
	rtts      [rttSamples]time.Duration
	rttCount  int
	lastErr   error
	failedAt  time.Duration // when lastErr came, or the relay became suspect
	early     []early       // packets of clients of this node's own relay
	need      need
	needAt    time.Duration // when need last changed
	leaving   *wire.Conn    // of a session that is being given up; nil: there is none
	farewell  uint64        // token of its last ping
	gaveUp    time.Duration // when the last session that was given up ended; 0: there was none
	planned   uint64        // value of tunnel at the last plan
	// The RTT outlives its session, so that a relay that is not dialed can be compared.
	knownRTT, measuredAt time.Duration

	shown atomic.Int64 // when this node last showed the relay its IPv4 address
	used  atomic.Int64 // when a peer's packets last passed, or needed the relay

	rxPackets, rxBytes, txPackets, txBytes, txDropped, reconnects, gone atomic.Uint64
}

type ping struct {
	token uint64
	at    time.Duration
}

// clientState is what the choice of a relay depends on.
type clientState struct {
	connected, suspect bool
	rtt                time.Duration // least of the last answers, with the processing time of both ends
	published          time.Duration // the network's RTT, for comparing relays; it changes only by enough to matter
}

func newClient(p *Pool, r Relay) *client {
	c := &client{
		pool: p, relay: r, addresses: r.Addresses, need: needNone,
		retry: make(chan struct{}, 1), accept: make(chan struct{}, maxAccepts), stirred: make(chan struct{}, 1),
	}
	c.ctx, c.cancel = context.WithCancel(p.ctx)
	return c
}

func (c *client) state() clientState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.status
}

func (c *client) dialAddresses() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.addresses
}

func (c *client) setAddresses(a []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Equal(a, c.addresses) {
		c.addresses = slices.Clone(a)
		c.again()
	}
}

// again ends a pause between two dials.
func (c *client) again() {
	select {
	case c.retry <- struct{}{}:
	default:
	}
}

// queue returns the queue of packets to this relay; nil without a session. c may be nil.
func (c *client) queue() *wire.Queue {
	if c == nil {
		return nil
	}
	if w := c.wire.Load(); w != nil {
		return w.Queue
	}
	return nil
}

// send queues one packet, and returns false if there is no session. c may be nil.
func (c *client) send(now time.Duration, node identity.ID, channel byte, b []byte) bool {
	q := c.queue()
	if q == nil || !q.Push(now, node, channel, b) {
		return false
	}
	q.Kick()
	if channel == wire.ChannelWireGuard && len(b) > 0 { // an empty packet only asks the relay whether the node is there
		c.stir()
	}
	return true
}

// run dials and serves until the relay is removed.
func (c *client) run() {
	defer c.cancel()
	for failures := 0; ; failures++ {
		for c.needIs(needNone) {
			failures = 0
			select {
			case <-c.ctx.Done():
				return
			case <-c.retry:
			}
		}
		began := time.Now()
		err := c.once()
		if c.ctx.Err() != nil {
			return
		}
		if errors.Is(err, errNotNeeded) {
			continue
		}
		if time.Since(began) > steadyAfter+dialTimeout {
			failures = 0
		}
		c.mu.Lock()
		c.lastErr, c.failedAt = err, c.pool.now()
		c.mu.Unlock()
		c.pool.planAgain()
		c.pool.cfg.Log.Debug("relay session ended", "relay", c.relay.ID, "error", err, "failures", failures)
		timer := time.NewTimer(backoff(failures, rand.Float64()))
		select {
		case <-c.ctx.Done():
			timer.Stop()
			return
		case <-c.retry:
			timer.Stop()
		case <-timer.C:
		}
		c.reconnects.Add(1)
	}
}

// backoff returns the wait before the next try: a short one first, then 1 s to 30 s. Half of it is random, so that the
// clients of a restarted relay do not come all at once.
func backoff(failures int, random float64) time.Duration {
	d := firstRetry
	if failures > 0 {
		d = min(minBackoff<<min(failures-1, 10), maxBackoff)
	}
	return d/2 + time.Duration(random*float64(d)/2)
}

// once runs one session from the dial to its end.
func (c *client) once() error {
	conn, err := c.pool.dialRelay(c.ctx, c.relay, c.dialAddresses(), identity.ALPNRelay)
	if err != nil {
		return err
	}
	q := wire.NewQueue(&c.pool.packets, sendPackets, sendBytes, queueStanding)
	w := wire.NewConn(conn, q, &c.pool.load, c.pool.now)
	stop := context.AfterFunc(c.ctx, func() { w.End(wire.ErrClosed) })
	defer stop()
	c.mu.Lock()
	c.pings, c.rttCount = c.pings[:0], 0
	c.mu.Unlock()
	c.ping(w)
	var wg sync.WaitGroup
	wg.Go(w.WriteLoop)
	wg.Go(func() { c.watch(w) })
	w.End(c.readLoop(w))
	wg.Wait()
	c.wire.Store(nil)
	c.mu.Lock()
	givenUp := c.leaving == w || errors.Is(w.Why(), errNotNeeded)
	c.status, c.leaving = clientState{}, nil
	if givenUp {
		c.gaveUp = c.pool.now()
	}
	c.mu.Unlock()
	c.txDropped.Add(w.Queue.Dropped())
	c.txPackets.Add(w.Queue.Sent())
	c.txBytes.Add(w.Queue.SentBytes())
	left := w.Queue.Reclaim()
	c.pool.relaysChanged()
	c.pool.resend(left)
	if givenUp {
		return errNotNeeded
	}
	c.cutStreams()
	return w.Why()
}

// giveUp ends a session that nothing needs. It takes no more packets, but it is read until the relay has answered a
// last ping: what the relay refuses, and what peers have sent by it, comes before that answer.
func (c *client) giveUp(w *wire.Conn) {
	token := rand.Uint64()
	c.mu.Lock()
	if c.leaving == w {
		c.mu.Unlock()
		return
	}
	answers := c.status.connected
	c.leaving, c.farewell, c.status = w, token, clientState{}
	c.wire.CompareAndSwap(w, nil)
	c.mu.Unlock()
	if !answers { // so nothing was sent by it
		w.End(errNotNeeded)
		return
	}
	w.Queue.Seal()
	left := w.Queue.Reclaim()
	w.Queue.PushControl(func(b []byte) []byte { return wire.AppendToken(b, wire.FramePing, token) })
	time.AfterFunc(farewellTime, func() { w.End(errNotNeeded) })
	c.pool.relaysChanged()
	c.pool.resend(left)
}

func (c *client) isLeaving(w *wire.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leaving == w
}

// viaStream is this node's end of a stream through a relay.
type viaStream struct {
	*tls.Conn
	client *client
}

// Close ends the stream.
func (s *viaStream) Close() error {
	s.client.mu.Lock()
	delete(s.client.streams, s)
	s.client.mu.Unlock()
	return s.Conn.Close()
}

// track remembers a stream until it is closed.
func (c *client) track(conn *tls.Conn) *viaStream {
	s := &viaStream{conn, c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.streams == nil {
		c.streams = map[*viaStream]struct{}{}
	}
	c.streams[s] = struct{}{}
	return s
}

// cutStreams ends the streams through a lost relay. Otherwise they would hang until TCP gives up, and nothing would
// dial another way.
func (c *client) cutStreams() {
	c.mu.Lock()
	cut := slices.Collect(maps.Keys(c.streams))
	clear(c.streams)
	c.mu.Unlock()
	for _, s := range cut {
		s.NetConn().Close()
	}
}

// watch pings the relay and judges it by its answers. It wakes when the next ping or judgement is due, and when an idle
// session is used again.
func (c *client) watch(w *wire.Conn) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	last := c.pool.now()
	busy, tunnel := last, uint64(0)
	due := time.Now()
	for {
		select {
		case <-w.Done():
			return
		case <-c.stirred:
		case <-timer.C:
			c.pool.cfg.Lag.Note(due, time.Now())
		}
		if c.needIs(needNone) { // the need may have ended before the session began
			c.giveUp(w)
		}
		if c.isLeaving(w) {
			<-w.Done()
			return
		}
		now := c.pool.now()
		if n := c.tunnel.Load(); n != tunnel { // only WireGuard's packets count: the control net repeats what is lost
			busy, tunnel = now, n
			c.demand(now)
		}
		every := pingEvery
		if c.quiet.Store(now-busy > idleAfter); now-busy > idleAfter {
			every = pingIdle
		}
		if now-last >= every {
			last = now
			c.ping(w)
		}
		next := last + every
		if at := c.judge(w, now); at > 0 {
			next = min(next, at)
		}
		due = time.Now().Add(next - now)
		timer.Reset(max(next-now, time.Millisecond))
	}
}

// stir counts WireGuard's packets, and wakes watch if the session was idle.
func (c *client) stir() {
	c.tunnel.Add(1)
	if c.quiet.Load() && c.quiet.CompareAndSwap(true, false) {
		select {
		case c.stirred <- struct{}{}:
		default:
		}
	}
}

func (c *client) ping(w *wire.Conn) {
	pg := ping{rand.Uint64(), c.pool.now()}
	c.mu.Lock()
	if len(c.pings) < maxOutgoing {
		c.pings = append(c.pings, pg)
	}
	c.mu.Unlock()
	w.Queue.PushControl(func(b []byte) []byte { return wire.AppendToken(b, wire.FramePing, pg.token) })
}

// missing returns how long an answer may be missing before a relay is suspect, and before it may be dead, by how long
// the last answers took. If one was slow, more will be: the machine is overloaded, and sending everything another way
// would add to its load.
func missing(rtts []time.Duration) (suspect, dead time.Duration) {
	if len(rtts) == 0 {
		return suspectAfter, deadAfter
	}
	least, most := slices.Min(rtts), slices.Max(rtts)
	return max(suspectAfter, 3*least, 2*most), max(deadAfter, 6*least, 3*most)
}

// judge checks whether answers are missing, and returns when to check again; zero: no ping is unanswered.
func (c *client) judge(w *wire.Conn, now time.Duration) (again time.Duration) {
	c.mu.Lock()
	var waited time.Duration
	if len(c.pings) > 0 {
		waited = now - c.pings[0].at
	}
	late := c.pool.cfg.Lag.Late(time.Now()) // of this host, and perhaps of the relay as well
	suspectFrom, deadFrom := missing(c.rtts[:min(c.rttCount, rttSamples)])
	if c.quiet.Load() { // no traffic waits; WireGuard's first packet ends this
		suspectFrom, deadFrom = quietPatience*suspectFrom, quietPatience*deadFrom
	}
	suspectFrom, deadFrom = suspectFrom+2*late, deadFrom+4*late
	suspect := waited > suspectFrom
	// A relay that delivers but answers late is overloaded: to dial anew would only add to its load.
	dead := waited > deadFrom && (w.Silent(now) > deadAfter || waited > wire.StuckWrite)
	turned := suspect && c.status.connected && !c.status.suspect
	if turned {
		c.status.suspect, c.failedAt = true, now
	}
	if suspect {
		again = now + pulse
	} else if len(c.pings) > 0 {
		again = c.pings[0].at + suspectFrom + time.Millisecond
	}
	c.mu.Unlock()
	switch {
	case dead:
		w.End(fmt.Errorf("no answer for %s", waited.Round(time.Millisecond)))
	case turned:
		c.pool.relaysChanged()
		c.pool.resend(w.Queue.Reclaim()) // packets that wait here go another way, if there is one
	}
	return again
}

// pong takes an answer to a ping. Only tokens that were sent count.
func (c *client) pong(w *wire.Conn, token uint64) {
	now := c.pool.now()
	c.mu.Lock()
	if c.leaving == w {
		last := token == c.farewell
		c.mu.Unlock()
		if last {
			w.End(errNotNeeded)
		}
		return
	}
	i := slices.IndexFunc(c.pings, func(p ping) bool { return p.token == token })
	if i < 0 {
		c.mu.Unlock()
		return
	}
	c.rtts[c.rttCount%rttSamples] = max(now-c.pings[i].at, 1)
	c.rttCount++
	c.pings = slices.Delete(c.pings, 0, i+1)
	st := &c.status
	st.rtt = slices.Min(c.rtts[:min(c.rttCount, rttSamples)])
	way, ofKernel := w.RoundTrip()
	if !ofKernel {
		way = st.rtt
	}
	if c.knownRTT = way; c.rttCount >= measured || ofKernel {
		c.measuredAt = now
	} else if c.measuredAt == 0 {
		c.knownRTT = 0 // the first round trip includes the work of a handshake
	}
	began := !st.connected
	changed := began || st.suspect || c.rttCount == measured
	if d := (way - st.published).Abs(); st.published == 0 || d > max(st.published/4, 3*time.Millisecond) {
		st.published, changed = way, true
	}
	st.connected, st.suspect = true, false
	c.wire.Store(w)
	if changed {
		c.lastErr = nil
	}
	c.mu.Unlock()
	if began {
		c.pool.askAgain(c)
		c.sendEarly()
	}
	if changed {
		c.pool.relaysChanged()
	}
}

// readLoop handles the relay's frames until the session ends.
func (c *client) readLoop(w *wire.Conn) error {
	r := wire.NewFrameReader()
	s := sink{client: c}
	turn := 0
	for {
		n, err := r.Fill(w.TLS)
		if err != nil {
			return fmt.Errorf("read from relay %s: %w", c.relay.ID, err)
		}
		s.begin(c.pool)
		w.Read(s.now, n)
		for {
			t, body, ok, err := r.Next()
			if err != nil {
				return fmt.Errorf("relay %s: %w", c.relay.ID, err)
			}
			if !ok {
				break
			}
			if err := c.frame(w, &s, t, body); err != nil {
				return err
			}
		}
		s.flush()
		if turn += n; turn >= wire.TurnBytes {
			turn = 0
			runtime.Gosched()
		}
	}
}

func (c *client) frame(w *wire.Conn, s *sink, t wire.FrameType, body []byte) error {
	switch t {
	case wire.FrameData:
		node, channel, payload := wire.DecodeData(body)
		s.data(node, channel, payload)
	case wire.FramePong:
		c.pong(w, wire.DecodeToken(body))
	case wire.FrameGone:
		node, channel, payload, handed := wire.DecodeRefused(body)
		var refused []wire.Unsent
		if handed {
			refused = []wire.Unsent{{Node: node, Channel: channel, Payload: slices.Clone(payload)}}
		}
		c.pool.absent(c, node, refused)
		c.gone.Add(1)
	case wire.FrameHere:
		c.pool.handleHere(c, c.pool.peer(wire.DecodeNode(body)), s.now)
	case wire.FrameOffer:
		c.offered(wire.DecodeOffer(body))
	case wire.FrameFar:
		via, node, channel, payload := wire.DecodeFar(body)
		s.far(via, node, channel, payload)
	case wire.FrameNoWay:
		c.pool.noWay(c, body)
	case wire.FrameSeen:
		node, addrs := wire.DecodeSeen(body)
		c.pool.questions.answer(c.relay.ID, node, addrs)
	case wire.FrameWindow:
		w.Queue.Grant(wire.DecodeWindow(body))
	case wire.FrameHello:
		h := wire.DecodeHello(body)
		if h.Version != 1 {
			return fmt.Errorf("relay %s speaks version %d, this node 1: upgrade the older", c.relay.ID, h.Version)
		}
		c.offersUDP(w, h.UDP)
	case wire.FramePair:
		c.granted(w, wire.DecodeGrant(body))
	case wire.FrameState:
		c.pairTold(wire.DecodeState(body))
	case wire.FrameDenied:
		c.denied(wire.DecodeDenied(body))
	default:
		if t < wire.Ignorable {
			return fmt.Errorf("relay %s: %w: a relay may not send frame type 0x%02x", c.relay.ID, wire.ErrProtocol, byte(t))
		}
	}
	return nil
}

// offered accepts this node's end of a stream that a peer asked for.
func (c *client) offered(o wire.Offer) {
	select {
	case c.accept <- struct{}{}:
	default:
		return // the peer learns it when the relay's wait times out
	}
	c.pool.wg.Go(func() {
		defer func() { <-c.accept }()
		conn, err := c.pool.splice(c.ctx, c, wire.AppendAccept(nil, o.Stream, o.Secret))
		if err != nil {
			c.pool.cfg.Log.Debug("stream offer not taken", "relay", c.relay.ID, "from", o.From, "error", err)
			return
		}
		go c.pool.cfg.OnStream(conn, o.From)
	})
}

// sink delivers the packets of one read burst.
type sink struct {
	client  *client
	now     time.Duration
	peer    *peerState // of the last packet
	proxies *Proxies
	batch   sendBatch
	packets uint64
	bytes   uint64
	tunnel  bool // WireGuard packets were among them
}

func (s *sink) begin(p *Pool) {
	s.now, s.proxies = p.now(), p.proxies.Load()
}

func (s *sink) data(from identity.ID, channel byte, payload []byte) {
	c := s.client
	if s.peer == nil || s.peer.id != from {
		s.peer = c.pool.peer(from)
	}
	c.pool.heardFrom(c, s.peer, s.now)
	s.hand(from, channel, payload)
}

func (s *sink) hand(from identity.ID, channel byte, payload []byte) {
	c := s.client
	s.packets++
	s.bytes += uint64(len(payload))
	s.tunnel = s.tunnel || channel == wire.ChannelWireGuard
	if channel == wire.ChannelWireGuard && s.proxies != nil {
		s.proxies.deliver(&s.batch, from, payload)
		return
	}
	c.pool.cfg.OnPacket(from, channel, payload)
}

// far handles a packet that came over two relays.
func (s *sink) far(via, from identity.ID, channel byte, payload []byte) {
	s.client.pool.heardFar(s.client, via, from, s.now)
	s.hand(from, channel, payload)
}

func (s *sink) flush() {
	if s.proxies != nil {
		s.proxies.flush(&s.batch)
	}
	s.client.rxPackets.Add(s.packets)
	s.client.rxBytes.Add(s.bytes)
	if s.tunnel {
		s.client.stir()
	}
	s.packets, s.bytes, s.tunnel = 0, 0, false
	s.peer = nil
}

// RelayStats describes the state of a relay.
type RelayStats struct {
	Relay              identity.ID
	Addresses          []string
	Need               string // warm | trial | on-demand | standby: why there is a session, or none
	Connected          bool   // has a session
	Suspect            bool   // the session has not answered in time
	RTT                time.Duration
	RxPackets, RxBytes uint64
	TxPackets, TxBytes uint64
	Dropped            uint64 // waited too long, or did not fit the send queue
	Gone               uint64 // packets that the relay refused because their peer has no session
	Reconnects         uint64
	Peers              int // peers whose packets go by this relay, unless their direct path works
	LastError          string
}

// Stats lists all relays of the pool, those in use first.
func (p *Pool) Stats() []RelayStats {
	users := p.users()
	p.mu.RLock()
	defer p.mu.RUnlock()
	all := make([]RelayStats, 0, len(p.relays))
	for _, c := range p.relays {
		one := c.stats()
		one.Peers = users[one.Relay]
		all = append(all, one)
	}
	slices.SortFunc(all, byNeed)
	return all
}

func (c *client) stats() RelayStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := RelayStats{
		Relay: c.relay.ID, Addresses: c.addresses,
		Connected: c.status.connected, Suspect: c.status.suspect, RTT: cmp.Or(c.status.rtt, c.knownRTT), Need: string(c.need),
		RxPackets: c.rxPackets.Load(), RxBytes: c.rxBytes.Load(),
		TxPackets: c.txPackets.Load(), TxBytes: c.txBytes.Load(),
		Dropped: c.txDropped.Load(), Gone: c.gone.Load(), Reconnects: c.reconnects.Load(),
	}
	if q := c.queue(); q != nil {
		s.Dropped += q.Dropped()
		s.TxPackets += q.Sent()
		s.TxBytes += q.SentBytes()
	}
	if c.lastErr != nil {
		s.LastError = c.lastErr.Error()
	}
	return s
}
