package birthday

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Limits of one session.
const (
	answersMax  = 256 // pings of the peer that a twin which does not decide answers with a ping
	heardMax    = 1024
	failingMax  = 64 // sends in a row that may fail
	afterHitFor = 3 * time.Second
)

// search tries ports until one is hit, all were tried, or time is up.
func (s *session) search() Event {
	s.heard = map[probe.TxID]found{}
	s.ports = s.order()
	limit := attemptFor
	if s.sit.Role == Twin {
		limit = twinFor
	}
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	pace := time.NewTicker(tick)
	defer pace.Stop()
	for {
		select {
		case <-s.ctx.Done():
			if s.direct.Load() && s.sit.Role == One && s.probes > 0 {
				return Event{Phase: Hit}
			}
			s.say(&skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_END, Reason: errCancelled.Error()})
			return Event{Phase: Failed, Text: errCancelled.Error()}
		case <-deadline.C:
			s.say(&skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_END, Reason: "no port was hit"})
			return Event{Phase: Failed, Text: fmt.Sprintf("No port was hit in %s with %s.", limit, s.effort())}
		case in := <-s.in:
			if ev, done := s.handle(in); done {
				return ev
			}
			if s.ended {
				deadline.Reset(afterHitFor)
				s.ended = false
			}
		case <-pace.C:
			s.pace(time.Now())
			if s.failing > failingMax {
				s.say(&skeinv1.Signal_Birthday{Phase: skeinv1.Signal_Birthday_END, Reason: "this host cannot send"})
				return Event{Phase: Failed, Text: fmt.Sprintf("Probes could not be sent: %v.", s.sendErr)}
			}
		}
	}
}

// order is the order in which this end tries the peer's ports.
func (s *session) order() *Ports {
	base, step, ahead := uint16(0), 0, 0
	if s.predicts() && s.theirs.GetBase() != 0 {
		base, step, ahead = uint16(s.theirs.GetBase()), int(s.theirs.GetStep()), predictSockets+predictSlack
	}
	return NewPorts(s.e.c.Seed(), s.e.c.Ports, base, step, ahead)
}

// handle takes one event; true ends the search.
func (s *session) handle(in event) (Event, bool) {
	switch {
	case in.signal != nil:
		return s.handleSignal(in.signal)
	case in.ping && in.from.Addr() == s.sit.Theirs.Addr(): // pings from elsewhere take other paths, such as a relay
		return Event{Phase: Hit, Remote: in.from}, true
	case in.packet && (s.sit.Role == Many || s.sit.Role == Twin && s.sit.Decides):
		return s.hit(found{in.socket, in.from}), true
	case in.packet && in.message.Type == probe.TypePing:
		if len(s.heard) < heardMax {
			s.heard[in.message.Tx] = found{in.socket, in.from}
		}
		if in.message.Tx == s.chosen {
			return s.hit(found{in.socket, in.from}), true
		}
		if s.answers < answersMax { // the peer decides, so it must learn that this socket works
			s.answers++
			s.from(in.socket, in.from)
		}
	}
	return Event{}, false
}

// hit closes all sockets but one. Nothing that arrives there is answered before WireGuard's packets leave through it.
func (s *session) hit(f found) Event {
	s.fan.keep(f.socket)
	ev := Event{Phase: Hit, Local: s.fan.port(f.socket), Remote: f.from}
	s.reportHit(ev)
	return ev
}

func (s *session) handleSignal(b *skeinv1.Signal_Birthday) (Event, bool) {
	switch b.GetPhase() {
	case skeinv1.Signal_Birthday_START:
		if b.GetSession() == s.id || s.sit.fits(b) { // this end's signal was lost, or crossed the peer's
			s.say(s.word(skeinv1.Signal_Birthday_ACCEPT))
		}
	case skeinv1.Signal_Birthday_END, skeinv1.Signal_Birthday_REFUSE:
		if b.GetSession() != s.id {
			return Event{}, false // of an earlier attempt
		}
		if !b.GetHit() {
			return Event{Phase: Failed, Text: "The peer has ended the attempt: " + brief(b.GetReason()) + "."}, true
		}
		if len(b.GetTx()) == len(probe.TxID{}) {
			s.chosen = probe.TxID(b.GetTx())
			if f, ok := s.heard[s.chosen]; ok && s.sit.Role == Twin && !s.sit.Decides {
				return s.hit(f), true
			}
		}
		s.ended, s.quiet = true, true // the peer's ping is on the way
	}
	return Event{}, false
}

// pace sends the packets that are due.
func (s *session) pace(now time.Time) {
	switch {
	case s.sit.Role == One:
		for range probesPerTick {
			port, ok := s.next(MaxProbes)
			if !ok {
				break
			}
			_, err := s.e.c.Prober.SendPing(s.peer, netip.AddrPortFrom(s.sit.Theirs.Addr(), port))
			s.sentOne(err)
		}
	case s.sit.Role == Many:
		want := MaxSockets
		if s.base != 0 && now.Sub(s.began) < predictFor {
			want = predictSockets
		}
		s.widen(want, socketsPerTick)
	case s.sit.Rule == skeinv1.PairOutcome_PREDICTION:
		s.paceWaves(now)
	default:
		s.growTo(min(s.fan.size()+socketsPerTick, MaxSockets))
		for range probesPerTick {
			if port, ok := s.next(twinProbes); ok && s.fan.size() > 0 {
				s.from(s.probes%s.fan.size(), netip.AddrPortFrom(s.sit.Theirs.Addr(), port))
			}
		}
	}
}

// next is the next port to try; false at the limit, without budget, or once the peer has been reached.
func (s *session) next(limit int) (uint16, bool) {
	if s.probes >= limit || s.quiet {
		return 0, false
	}
	if s.probes >= s.allowed {
		if !s.e.more(s) {
			return 0, false // other attempts use the budget now; there may be room in a moment
		}
		s.allowed += probesReserved
	}
	port, ok := s.ports.Next()
	if !ok { // a narrow range is exhausted; repeat it with other sockets
		s.ports = s.order()
		port, ok = s.ports.Next()
	}
	if ok {
		s.probes++
	}
	return port, ok
}

// widen opens up to n more sockets, at most want in total, and sends from each. When all are open it repeats the
// round every socketsAgain.
func (s *session) widen(want, n int) {
	if s.quiet {
		return
	}
	s.growTo(min(s.sent+n, want))
	if s.sent >= want && time.Since(s.again) >= socketsAgain {
		s.sent = 0
	}
	if s.sent == 0 {
		s.again = time.Now()
	}
	for ; n > 0 && s.sent < s.fan.size(); n-- {
		s.from(s.sent, s.sit.Theirs)
		s.sent++
	}
}

// paceWaves has each socket try the port that its counterpart should get; both ends number their sockets alike.
// Mappings of other hosts in between shift the ports, so the end that decides adds one to the shift in each wave.
func (s *session) paceWaves(now time.Time) {
	wave := min(int(now.Sub(s.began)/waveEvery), waves-1)
	first := s.fan.size() < (wave+1)*waveSize
	if !first && now.Sub(s.again) < waveAgain || s.quiet {
		return
	}
	s.again = now
	s.growTo((wave + 1) * waveSize)
	shift := 0
	if s.sit.Decides {
		shift = wave
	}
	ports := Predict(uint16(s.theirs.GetBase()), int(s.theirs.GetStep()), waves*waveSize+waves)
	for i := wave * waveSize; i < min((wave+1)*waveSize, s.fan.size()) && i+shift < len(ports); i++ {
		s.from(i, netip.AddrPortFrom(s.sit.Theirs.Addr(), ports[i+shift]))
	}
}

func (s *session) growTo(n int) {
	var err error
	s.e.within(func() { err = s.fan.grow(n) })
	if err != nil {
		s.sentOne(err)
	}
}

// from pings the peer from one of the sockets.
func (s *session) from(socket int, to netip.AddrPort) {
	_, err := s.e.c.Prober.PingBy(socketOf{s.fan, socket}, s.peer, to)
	s.sentOne(err)
}

func (s *session) sentOne(err error) {
	if err == nil {
		s.failing = 0
		return
	}
	s.failing++
	s.sendErr = err
}
