package path

import (
	"fmt"
	"net/netip"
	"time"
)

// A peer's agent and a peer's tunnel die apart: kernel WireGuard goes on forwarding when the agent is killed. Pings
// prove the agent, WireGuard's counters the tunnel. When the pings stay away both ways, but WireGuard goes on hearing
// the peer from where the path leads, only the agent is away, and a relay could not reach it either: the path stays.

// takeTraffic takes what WireGuard carried since the reading before: where it heard the peer, if it did.
func (s *step) takeTraffic(from netip.AddrPort, since time.Time) {
	if !s.stirs() {
		return
	}
	s.noteTraffic()
	s.awaken()
	switch {
	case !from.IsValid():
		if s.Mute.IsZero() {
			s.Mute = s.now
		}
		return
	case from.Addr().IsLoopback():
		s.AgentAt = s.now // a packet that came over a relay was sent by an agent
	default:
		s.HeardFrom, s.HeardAfter, s.HeardAt = from, since, s.now
	}
	s.Mute = time.Time{}
}

// noteTraffic notes that WireGuard has something to say.
func (s *step) noteTraffic() {
	s.BusyUntil, s.TrafficAt = later(s.BusyUntil, s.now.Add(busyFor)), s.now
}

// takeControl takes that the control net sent packets by the tunnel, or heard the peer there. Its own packets are not
// worth heartbeats: where they are answered the path works, and where they are not, one question shows why.
func (s *step) takeControl(heard bool) {
	if heard {
		s.ControlAt = s.now
		return
	}
	if s.now.Sub(later(s.ControlAt, s.LastPong)) >= controlQuiet {
		s.BusyUntil = later(s.BusyUntil, s.now.Add(time.Millisecond))
	}
}

// sure is when the silence of the path in use is no matter of packets still under way: what WireGuard hears later
// was sent after the pings had stopped getting through.
func (s *step) sure() time.Time { return s.Pending[0].Add(s.rto() + s.SRTT) }

// tunnelLives reports whether only the peer's agent is silent. An agent that lives pings whenever there is
// traffic, so that a way cut in one direction does not look like this.
func (s *step) tunnelLives() bool {
	sure := s.sure()
	return s.HeardFrom == s.Path.Endpoint && !s.HeardAfter.Before(sure) && s.AgentAt.Before(sure)
}

// check asks for what decides a silence: WireGuard's counters, and the relay's word about the peer. Twice, so that
// there are two readings to compare and the relay has answered by the time of the decision.
func (s *step) check() {
	at := s.nextCheck()
	if at.IsZero() || s.now.Before(at) {
		return
	}
	if !s.CheckOf.Equal(s.Pending[0]) {
		s.CheckOf, s.Checks = s.Pending[0], 0
	}
	s.Checks++
	s.CheckedAt = s.now
	s.actions = append(s.actions, Action{Kind: ActionCheck})
}

func (s *step) nextCheck() time.Time {
	if len(s.Pending) == 0 || s.Path.Silent {
		return time.Time{}
	}
	first := s.sure().Add(fastHeartbeat)
	switch {
	case s.Checks == 0 || !s.CheckOf.Equal(s.Pending[0]):
		return first
	case s.Checks > 1:
		return time.Time{}
	case s.busy():
		return later(first, s.Pending[0].Add(s.patience()-verdictIn))
	}
	return later(first, s.Pending[0].Add(idleRetries*max(idleRetry, s.rto())))
}

// heardOut reports whether both checks have had their time, which a process that slept past them has to give.
func (s *step) heardOut() bool {
	return s.Checks > 1 && s.CheckOf.Equal(s.Pending[0]) && s.now.Sub(s.CheckedAt) >= verdictIn
}

// unverified is the rule while an agent that was silent is heard again, but has not answered yet.
const unverified = "direct-unverified"

// silence keeps a path by WireGuard's word alone.
func (s *step) silence() {
	s.Path.Alive, s.Path.Silent, s.Path.Suspect, s.Path.Rule = true, true, false, "direct-silent"
	s.Path.Reason = fmt.Sprintf("The peer's agent answers no ping, but WireGuard hears the peer at %s: its tunnel "+
		"lives, and no relay reaches it without its agent.", s.Path.Endpoint)
	s.SilentAt = s.now
	if s.Path.Kind == Direct {
		s.LastDirect = s.Path.Endpoint
	}
	s.VerifyUntil, s.Mute = time.Time{}, time.Time{}
	s.Lost = ""
}

// heartbeatSilent watches a path whose peer has no agent.
func (s *step) heartbeatSilent(i int) {
	switch {
	case s.fresh == s.Path.Endpoint:
		s.use(i, "direct-proven")
	case s.fresh.IsValid(): // settle looks at it
	case s.AgentAt.After(s.SilentAt):
		// The agent is back, or the way is cut in our direction only. It has little time to answer.
		s.Path.Silent, s.Path.Rule = false, unverified
		s.Path.Reason = "The peer's agent is heard again, and asked whether it hears this host."
		s.Pending, s.VerifyUntil = nil, s.now.Add(verifyFor)
		s.BusyUntil = later(s.BusyUntil, s.now.Add(verifyFor))
		s.ping(i)
	case s.tunnelGone():
		s.die(i)
	case s.heartbeatDue(i):
		s.ping(i)
	}
}

// tunnelGone reports whether WireGuard, too, has stopped to hear the peer. Without traffic it tells nothing, and
// then a relay that claims to reach the peer is the better choice.
func (s *step) tunnelGone() bool {
	at := s.tunnelEnd()
	return !at.IsZero() && !s.now.Before(at)
}

func (s *step) tunnelEnd() time.Time {
	var at time.Time
	if !s.Mute.IsZero() {
		at = s.Mute.Add(muteAfter)
	}
	if !s.Relay.ID.IsZero() {
		at = earlier(at, s.HeardAt.Add(unheardFor))
	}
	return at
}

// followTunnel goes with a peer that has no agent to tell its new address: WireGuard roams, and the path with it.
// A path given up comes back the same way.
func (s *step) followTunnel() {
	if !s.Path.probed() || s.Path.Alive && !s.Path.Silent || !s.HeardAt.Equal(s.now) || s.HeardAfter.IsZero() {
		return
	}
	quiet := s.now.Sub(s.AgentAt)
	if quiet < agentQuiet || !s.Relay.Absent && quiet < agentGone || s.Path.Silent && s.HeardFrom == s.Path.Endpoint {
		return
	}
	i := s.know(s.HeardFrom)
	if i < 0 {
		return
	}
	s.lead(i)
	s.silence()
}

// know finds or remembers an endpoint at which WireGuard has heard the peer.
func (s *step) know(e netip.AddrPort) int {
	if i := s.find(e); i >= 0 {
		return i
	}
	return s.learn(e, "wireguard")
}

// takeAdopted takes the endpoint over which WireGuard talked to the peer when this agent started: better a tunnel
// that works than a relay that may not reach the peer's agent.
func (s *step) takeAdopted(e netip.AddrPort) {
	i := s.know(e)
	if s.LastDirect.IsValid() || s.Path.probed() || i < 0 {
		return
	}
	s.Path = Path{Since: s.now}
	s.lead(i)
	s.silence()
	s.Path.Rule = "direct-adopted"
	s.Path.Reason = fmt.Sprintf("WireGuard was in touch with the peer at %s when this agent started. The peer's agent "+
		"has not answered yet.", e)
	s.Pending, s.SRTT, s.RTTVar, s.HeardAt = nil, 0, 0, s.now
	s.BusyUntil = later(s.BusyUntil, s.now.Add(watchFor))
}

// backToDirect reports whether the last endpoint that worked is a better guess than a relay that says the peer is away:
// at once after a switch that the relay could not make good, else when the peer does not come back soon.
func (s *step) backToDirect() bool {
	return s.LastDirect.IsValid() && s.Relay.Absent && (s.now.Sub(s.DirectEnd) < awaySoon ||
		s.now.Sub(s.AwaySince) >= awayAfter)
}
