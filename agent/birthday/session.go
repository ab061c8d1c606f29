package birthday

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// session is one attempt with one peer. Its goroutine owns all of it but in.
type session struct {
	e        *Engine
	peer     identity.ID
	id       uint64
	budgetID uint64
	sit      Situation
	theirs   *skeinv1.Signal_Birthday // the peer's request or agreement; nil: none yet
	in       chan event
	ctx      context.Context
	cancel   context.CancelFunc

	direct atomic.Bool // why ctx ended: the path has become direct

	advice  Advice
	base    uint16 // newest port of this end's NAT; 0: not predicted
	began   time.Time
	fan     *fan // nil: this end uses WireGuard's port
	ports   *Ports
	probes  int
	allowed int // probes that the budget has granted
	sent    int // sockets from which something was sent
	again   time.Time
	quiet   bool // the peer reports a hit: send no more
	heard   map[probe.TxID]found
	ended   bool       // the peer has just reported a hit
	chosen  probe.TxID // of a twin that does not decide: the ping that names the pair
	answers int
	failing int // sends in a row that failed
	sendErr error
}

// event is one input of a session; exactly one kind of its fields is set.
type event struct {
	signal  *skeinv1.Signal_Birthday
	settled bool
	ping    bool // the peer's ping arrived at WireGuard's port
	from    netip.AddrPort
	packet  bool // an authentic packet arrived at a socket
	socket  int
	message probe.Message
}

// found is a socket that a packet of the peer reached, and that packet's source.
type found struct {
	socket int
	from   netip.AddrPort
}

// deliver never blocks: a session whose queue is full misses the event.
func (s *session) deliver(ev event) {
	select {
	case s.in <- ev:
	default:
	}
}

// run is the session's goroutine.
func (s *session) run(unfit error) {
	st := &s.e.stats
	ev, err := s.begin(unfit)
	if err != nil {
		var r *Refusal
		if !errors.As(err, &r) {
			r = &Refusal{err.Error(), refusedRetry}
		}
		st.refused.Add(1)
		if s.theirs != nil {
			s.say(&skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_REFUSE, Reason: r.Text, RetryNanos: int64(r.Retry)})
			return // the peer asked, and has its answer
		}
		s.report(Event{Phase: Refused, Text: "This end does not begin: " + r.Text + ".", Retry: r.Retry})
		return
	}
	defer func() {
		if s.fan != nil {
			s.fan.close()
		}
	}()
	if ev.Phase == Began {
		s.began = time.Now()
		st.attempts.Add(1)
		s.report(ev)
		ev = s.search()
	}
	ev.Probes, ev.Sockets = s.probes, s.sockets()
	if !s.began.IsZero() {
		ev.Took = time.Since(s.began)
	}
	st.probes.Add(uint64(ev.Probes))
	st.sockets.Add(uint64(ev.Sockets))
	s.e.finish(s, ev, s.spent())
	switch ev.Phase {
	case Hit:
		st.hits.Add(1)
		ev.Text = fmt.Sprintf("A port was found in %s: %s.", ev.Took.Round(10*time.Millisecond), s.effort())
	case Failed:
		if s.ctx.Err() != nil {
			return // the attempt was cancelled: no report is wanted
		}
		st.failed.Add(1)
	case Refused:
		st.refused.Add(1)
	case Silent:
		st.silent.Add(1)
	}
	s.report(ev)
	if ev.Phase == Hit {
		s.holdOpen(ev)
	}
}

func (s *session) report(ev Event) {
	if s.ctx.Err() == nil || ev.Phase == Hit {
		s.e.c.Report(s.peer, ev)
	}
}

// effort describes the cost of the attempt in words.
func (s *session) effort() string {
	if s.sit.Role == One {
		return fmt.Sprintf("%d probes from WireGuard's port", s.probes)
	}
	return fmt.Sprintf("%d sockets", s.sockets())
}

func (s *session) sockets() int {
	if s.fan == nil {
		return 0
	}
	return s.fan.size()
}

// spent is how many mappings the attempt has opened in this end's NAT.
func (s *session) spent() int {
	if s.sit.Role == Many {
		return s.sockets()
	}
	return max(s.probes, s.sockets())
}

// begin checks the peer's address and the budget, opens what a prediction needs, and agrees with the peer.
func (s *session) begin(unfit error) (Event, error) {
	if unfit != nil {
		return Event{}, unfit
	}
	if s.theirs != nil && !s.sit.fits(s.theirs) {
		return Event{}, &Refusal{"the two ends do not agree about their NATs yet", busyRetry}
	}
	err := s.e.attest(s)
	if err != nil {
		return Event{}, err
	}
	if s.advice, err = s.e.permit(s); err != nil {
		return Event{}, err
	}
	s.allowed = s.sit.cost()
	if err := s.prepare(); err != nil {
		s.e.finish(s, Event{Phase: Refused}, s.spent())
		return Event{}, err
	}
	if s.theirs != nil {
		s.say(s.word(skeinv1.Signal_Birthday_ACCEPT))
		return Event{Phase: Began, Text: "The peer has asked for an attempt."}, nil
	}
	return s.agree(), nil
}

func (s *session) predicts() bool {
	return s.sit.Rule == skeinv1.PairOutcome_PREDICTION && (s.sit.Role == Twin || !s.advice.SkipPrediction)
}

// prepare opens the fan, and for a prediction the first mappings immediately after the one that was measured.
func (s *session) prepare() error {
	if !s.sit.many() {
		return nil
	}
	var err error
	if s.fan, err = openFan(s.e.c.Mark, s.arrived); err != nil {
		return err
	}
	if !s.predicts() || s.sit.Step == 0 || s.e.c.Newest == nil {
		return nil
	}
	newest, err := s.e.c.Newest(s.ctx)
	if err != nil {
		if s.sit.Role == Twin {
			s.fan.close()
			return err
		}
		return nil // random ports need no prediction
	}
	s.base = newest.Port()
	if s.sit.Role == Many {
		s.widen(predictSockets, predictSockets)
	}
	return nil
}

// word is a signal of a phase, with this end's role and prediction.
func (s *session) word(p skeinv1.Signal_Birthday_Phase) *skeinv1.Signal_Birthday {
	b := &skeinv1.Signal_Birthday{Phase: p, Role: s.sit.Role}
	if s.base != 0 {
		b.Base, b.Step = uint32(s.base), int32(s.sit.Step)
	}
	return b
}

func (s *session) say(b *skeinv1.Signal_Birthday) {
	b.Session = s.id
	if err := s.e.c.Signal(s.peer, &skeinv1.Signal{Body: &skeinv1.Signal_Birthday_{Birthday: b}}); err != nil {
		s.e.c.Log.Debug("a signal about port prediction was not sent", "peer", s.peer, "error", err)
	}
}

// agree asks the peer and waits for its answer. When both ask at once, each takes the other's request as the answer.
func (s *session) agree() Event {
	s.say(s.word(skeinv1.Signal_Birthday_START))
	again := time.NewTicker(requestAgain)
	defer again.Stop()
	limit := time.NewTimer(requestWait)
	defer limit.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return Event{Phase: Failed, Text: errCancelled.Error()}
		case <-limit.C:
			return Event{Phase: Silent, Text: "The peer did not answer the request to predict ports."}
		case <-again.C:
			s.say(s.word(skeinv1.Signal_Birthday_START))
		case ev := <-s.in:
			b := ev.signal
			switch b.GetPhase() {
			case skeinv1.Signal_Birthday_START, skeinv1.Signal_Birthday_ACCEPT:
				if !s.sit.fits(b) {
					return Event{Phase: Refused, Text: "The two ends do not agree about their NATs yet.", Retry: busyRetry}
				}
				s.theirs = b
				if s.id > b.GetSession() || b.GetPhase() == skeinv1.Signal_Birthday_ACCEPT {
					s.id = b.GetSession()
				}
				return Event{Phase: Began, Text: "The peer agrees."}
			case skeinv1.Signal_Birthday_REFUSE:
				retry := min(max(time.Duration(b.GetRetryNanos()), busyRetry), pauseLast)
				return Event{Phase: Refused, Text: "The peer does not begin: " + brief(b.GetReason()) + ".", Retry: retry}
			}
		}
	}
}

// brief limits the length of the peer's reason.
func brief(s string) string {
	if s == "" {
		return "it gives no reason"
	}
	return fmt.Sprintf("%.120s", s)
}

// arrived handles a packet at a socket, on the fan's goroutine.
func (s *session) arrived(i int, from netip.AddrPort, b []byte, at time.Time) {
	if m, ok := s.e.c.Prober.Authenticate(b, at); ok && m.Sender == s.peer {
		s.deliver(event{packet: true, socket: i, from: from, message: m})
	}
}

// holdOpen keeps the socket that was hit open until WireGuard's packets leave through its port.
func (s *session) holdOpen(ev Event) {
	limit := time.NewTimer(hitFor)
	defer limit.Stop()
	again := time.NewTicker(hitAgain)
	defer again.Stop()
	lastPing := time.Now()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-limit.C:
			return
		case <-again.C:
			s.reportHit(ev)
		case in := <-s.in:
			switch {
			case in.settled && s.sit.Role == Many:
				return
			case in.ping && in.from == ev.Remote && time.Since(lastPing) > hitAgain:
				lastPing = time.Now()
				s.report(ev) // repeated, since the peer may have become ready only now
			case in.signal.GetPhase() == skeinv1.Signal_Birthday_START && in.signal.GetSession() != s.id:
				return // the peer begins another attempt, so it has lost this hit
			}
		}
	}
}

// reportHit informs the peer that it was reached. Of two ends with many sockets, the one that decides names the pair.
func (s *session) reportHit(ev Event) {
	b := &skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_END, Hit: true}
	switch {
	case s.sit.Role == One || s.sit.Role == Twin && !s.sit.Decides:
		return
	case s.sit.Role == Twin:
		tx, err := s.e.c.Prober.PingBy(socketOf{s.fan, s.hitSocket(ev)}, s.peer, ev.Remote)
		if err != nil {
			return
		}
		b.Tx = tx[:]
	}
	s.say(b)
}

func (s *session) hitSocket(ev Event) int {
	for i := range s.fan.size() {
		if s.fan.port(i) == ev.Local {
			return i
		}
	}
	return -1
}
