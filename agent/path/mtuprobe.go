package path

import (
	"fmt"
	"time"
)

// A path that carries small packets and drops large ones passes pings while every transfer hangs. So before an
// endpoint is used, it must answer a ping padded to the tunnel's largest packet with a pong of the same size. If only
// smaller sizes pass, the route to the peer gets a smaller MTU; if no size of at least mtuLeast passes, the endpoint
// is not used. On a busy path one heartbeat every two seconds is padded, so that later changes are found, too.

// MTUProbe is the state of finding the largest packet that an endpoint carries.
type MTUProbe struct {
	MTU    int       `json:",omitzero"`       // largest packet of the tunnel that went there and back; 0: none yet
	At     time.Time `json:",omitzero"`       // when a padded ping was last answered
	Sent   time.Time `json:",omitzero"`       // last padded ping
	Missed uint8     `json:",omitzero"`       // padded heartbeats lost in a row while small ones were answered
	Began  time.Time `json:",omitzero"`       // start of the running trial; zero: none
	Next   int       `json:",omitzero"`       // next index into mtuProbeSteps
	Best   int       `json:",omitzero"`       // the largest answered in it
	Failed time.Time `json:"Narrow,omitzero"` // when a trial ended without an answer; zero: the last one had an answer
}

const (
	mtuLeast     = 1280             // IPv6 requires it (RFC 8200): an endpoint that carries less is not used
	mtuStep      = 16               // between the sizes tried: WireGuard pads to multiples of 16
	mtuFresh     = 10 * time.Second // how long an answered padded ping vouches for the size
	paddedEvery  = 2 * time.Second  // between padded heartbeats on a busy path
	mtuLost      = 3                // lost in a row before smaller sizes are tried
	mtuProbeLast = 300 * time.Millisecond
)

// mtuProbeSteps are the times of a trial's pings. From step mtuLadderFrom on, every size of the ladder is sent.
var mtuProbeSteps = [...]time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond,
	700 * time.Millisecond}

const mtuLadderFrom = 2

// Wire is the size of the UDP payload that carries a tunnel packet: 32 bytes of header and tag, and the packet padded
// to a multiple of 16, but not beyond the link's MTU.
func Wire(packet, link int) int { return min((packet+15)&^15, max(packet, link)) + 32 }

// ladder lists the packet sizes that are tried, the largest first.
func ladder(full int) []int {
	out := []int{full}
	for n := (full - 1) &^ (mtuStep - 1); n >= mtuLeast; n -= mtuStep {
		out = append(out, n)
	}
	return out
}

// fits reports whether the endpoint carries packets large enough for use, and begins a trial if that is not known.
func (s *step) fits(i int) bool {
	w := &s.Probes[i].MTUProbe
	switch {
	case s.Settings.MTU == 0, w.MTU > 0 && s.now.Sub(w.At) < mtuFresh && w.Began.IsZero():
		return true
	case s.Relay.ID.IsZero() && !s.Path.Alive:
		s.startMTUProbe(i) // nothing else reaches the peer: small packets are better than none
		return true
	}
	if w.Began.IsZero() && (w.Failed.IsZero() || s.now.Sub(w.Failed) >= s.directRetry()) {
		s.startMTUProbe(i)
	}
	return false
}

// startMTUProbe begins a trial.
func (s *step) startMTUProbe(i int) {
	if w := &s.Probes[i].MTUProbe; w.Began.IsZero() && s.Settings.MTU > 0 {
		w.Began, w.Next, w.Best, w.Missed = s.now, 0, 0, 0
	}
}

// stepMTUProbes continues the trials under way.
func (s *step) stepMTUProbes() {
	lost := false
	for i := range s.Probes {
		w := &s.Probes[i].MTUProbe
		if w.Began.IsZero() {
			continue
		}
		if !s.now.Before(s.mtuProbeEnd(i)) {
			lost = s.endMTUProbe(i) || lost
			continue
		}
		for w.Next < len(mtuProbeSteps) && !s.now.Before(w.Began.Add(mtuProbeSteps[w.Next])) {
			sizes := []int{s.Settings.MTU}
			if w.Next >= mtuLadderFrom {
				sizes = ladder(s.Settings.MTU)
			}
			if w.Next++; w.Next < len(mtuProbeSteps) && !s.now.Before(w.Began.Add(mtuProbeSteps[w.Next])) {
				continue // this process slept past this step
			}
			for _, n := range sizes {
				s.pingPadded(i, n)
			}
		}
	}
	if lost { // after the loop, since a path that dies begins a burst, which forgets probes
		s.leaveBlackHole()
	}
}

func (s *step) mtuProbeEnd(i int) time.Time {
	return s.Probes[i].MTUProbe.Began.Add(mtuProbeSteps[len(mtuProbeSteps)-1] + max(mtuProbeLast, 3*s.Probes[i].RTT))
}

// endMTUProbe ends a trial in which no packet of full size was answered, and reports whether the path in use must be
// given up.
func (s *step) endMTUProbe(i int) (lost bool) {
	p := &s.Probes[i]
	w := &p.MTUProbe
	active := i == s.active()
	w.MTU, w.Began = w.Best, time.Time{}
	switch {
	case w.Best > 0:
		w.Failed = time.Time{}
		if active {
			s.noteReducedMTU(p)
		} else if !s.fresh.IsValid() && p.Streak > 0 {
			s.fresh, s.sent = p.Endpoint, p.LastAnswered
		}
	case active && s.LastPong.Before(p.MTUProbe.Sent):
		// Small pings are unanswered, too: the heartbeats decide.
	default:
		w.Failed = s.now
		return active && !s.Relay.ID.IsZero()
	}
	return false
}

// leaveBlackHole gives up the path in use, which carries small packets only.
func (s *step) leaveBlackHole() {
	direct, endpoint := s.direct() >= 0, s.Path.Endpoint
	s.die(s.active())
	why := fmt.Sprintf("%s carries small packets only: no ping padded to %d bytes or more was answered.", endpoint,
		Wire(mtuLeast, s.Settings.MTU))
	if direct {
		s.Lost = "The direct path to " + why
	} else {
		s.UDPLost, s.PortDied = "UDP through the relay's port "+why, false
	}
}

// noteReducedMTU puts a reduced MTU into the reason of the path in use.
func (s *step) noteReducedMTU(p *Probe) {
	if p.MTUProbe.MTU > 0 && p.MTUProbe.MTU < s.Settings.MTU {
		s.Path.Reason = fmt.Sprintf("%s (%s) answers, and carries packets of up to %d bytes, not of %d, so packets to this "+
			"peer are made smaller.", p.Endpoint, p.label(), p.MTUProbe.MTU, s.Settings.MTU)
	}
}

// padHeartbeat adds a padded ping to a heartbeat when one is due.
func (s *step) padHeartbeat(i int) {
	w := &s.Probes[i].MTUProbe
	if s.Settings.MTU == 0 || !s.busy() || !w.Began.IsZero() {
		return
	}
	missing := w.Sent.After(w.At)
	switch {
	case missing && s.now.Sub(w.Sent) < s.rto():
		return
	case missing && s.LastPong.After(w.Sent):
		w.Missed++
	case s.now.Sub(w.Sent) < paddedEvery:
		return
	}
	if w.Missed >= mtuLost || w.MTU == 0 {
		s.startMTUProbe(i)
		return
	}
	s.pingPadded(i, w.MTU)
}

func (s *step) pingPadded(i, size int) {
	p := &s.Probes[i]
	p.Sent++
	p.MTUProbe.Sent = s.now
	s.actions = append(s.actions, Action{Kind: ActionPing, Endpoint: p.Endpoint, Size: size})
}

// handlePadded handles the answer to a padded ping.
func (s *step) handlePadded(i, size int) {
	w := &s.Probes[i].MTUProbe
	if size > s.Settings.MTU {
		return // sent before the tunnel's MTU changed
	}
	w.At, w.Missed, w.Failed = s.now, 0, time.Time{}
	w.MTU, w.Best = max(w.MTU, size), max(w.Best, size)
	if size == s.Settings.MTU {
		w.Began = time.Time{}
	}
}

// pathMTU is the largest tunnel packet on the path in use; 0: no limit below the tunnel's.
func (s *step) pathMTU() int {
	i := s.active()
	if i < 0 || s.Settings.MTU == 0 {
		return 0
	}
	switch w := s.Probes[i].MTUProbe; {
	case w.MTU == 0 && !w.Failed.IsZero():
		return min(mtuLeast, s.Settings.MTU)
	case w.MTU < s.Settings.MTU:
		return w.MTU
	}
	return 0
}

// mtuProbeWake is when stepMTUProbes must run again; zero: no trial is running.
func (s *step) mtuProbeWake() (at time.Time) {
	for i := range s.Probes {
		w := &s.Probes[i].MTUProbe
		switch {
		case w.Began.IsZero():
		case w.Next < len(mtuProbeSteps):
			at = earlier(at, w.Began.Add(mtuProbeSteps[w.Next]))
		default:
			at = earlier(at, s.mtuProbeEnd(i))
		}
	}
	return at
}

// resize discards all trials when the tunnel's own MTU has changed.
func (s *step) resize(mtu int) {
	if s.Settings.MTU == mtu {
		return
	}
	for i := range s.Probes {
		s.Probes[i].MTUProbe = MTUProbe{}
	}
	if i := s.active(); i >= 0 {
		s.BusyUntil = later(s.BusyUntil, s.now.Add(verifyFor))
	}
}
