package path

import (
	"fmt"
	"net/netip"
	"time"
)

// A peer's agent and its tunnel fail independently: kernel WireGuard continues to forward when the agent is killed.
// Pings prove the agent, WireGuard's counters the tunnel. When pings fail both ways but WireGuard still receives from
// the path's endpoint, only the agent is down. A relay needs that agent, so the path stays.

// handleTraffic handles WireGuard's traffic since the previous reading: the address it received from, if it received.
func (s *step) handleTraffic(from netip.AddrPort, since time.Time) {
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
		s.AgentAt = s.now // a packet over a relay was sent by the peer's agent
	default:
		s.HeardFrom, s.HeardAfter, s.HeardAt = from, since, s.now
	}
	s.Mute = time.Time{}
}

// noteTraffic records that WireGuard carries traffic.
func (s *step) noteTraffic() {
	s.BusyUntil, s.TrafficAt = later(s.BusyUntil, s.now.Add(busyFor)), s.now
}

// handleControl handles packets of the control net in the tunnel: sent, or received from the peer. They are no reason
// for heartbeats: answers prove the path, and if none come, one ping shows why.
func (s *step) handleControl(heard bool) {
	if heard {
		s.ControlAt = s.now
		return
	}
	if s.now.Sub(later(s.ControlAt, s.LastPong)) >= controlQuiet {
		s.BusyUntil = later(s.BusyUntil, s.now.Add(time.Millisecond))
	}
}

// sure is when packets sent before the silence can no longer be in flight. What WireGuard receives later was sent
// after the pings had begun to fail.
func (s *step) sure() time.Time { return s.Pending[0].Add(s.rto() + s.SRTT) }

// tunnelLives reports whether only the peer's agent is silent. A live agent pings whenever there is traffic, so a cut
// in one direction is not mistaken for this.
func (s *step) tunnelLives() bool {
	sure := s.sure()
	return s.HeardFrom == s.Path.Endpoint && !s.HeardAfter.Before(sure) && s.AgentAt.Before(sure)
}

// check requests the evidence that decides a silence: WireGuard's counters, and whether the relay has a session of
// the peer. It does so twice, so that two readings can be compared and the relay has answered before the decision.
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

// heardOut reports whether both checks have had time for their results, also after this process has slept.
func (s *step) heardOut() bool {
	return s.Checks > 1 && s.CheckOf.Equal(s.Pending[0]) && s.now.Sub(s.CheckedAt) >= verdictIn
}

// unverified is the rule while a silent agent is heard again and has not yet answered.
const unverified = "direct-unverified"

// silence keeps a path on the evidence of WireGuard's counters alone.
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

// heartbeatSilent supervises a path whose peer's agent is silent.
func (s *step) heartbeatSilent(i int) {
	switch {
	case s.fresh == s.Path.Endpoint:
		s.use(i, "direct-proven")
	case s.fresh.IsValid(): // settle decides
	case s.AgentAt.After(s.SilentAt):
		// The agent is back, or only this host's packets are lost. The verification time is short.
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

// tunnelGone reports whether WireGuard has stopped receiving from the peer, too. Without traffic the counters cannot
// show it, and a relay that reports a session of the peer is the better choice.
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

// followTunnel moves the path to the address to which WireGuard has roamed, for a peer without an agent that could
// announce it. A path that was given up returns in the same way.
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

// know returns the probe of an endpoint at which WireGuard has received from the peer, and adds it if needed.
func (s *step) know(e netip.AddrPort) int {
	if i := s.find(e); i >= 0 {
		return i
	}
	return s.learn(e, "wireguard")
}

// handleAdopted makes the endpoint over which WireGuard reached the peer before this agent started the path: a working
// tunnel is better than a relay that may not reach the peer's agent.
func (s *step) handleAdopted(e netip.AddrPort) {
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

// backToDirect reports whether the last endpoint that worked is a better guess than a relay that reports the peer
// absent. It is: at once after the death of a direct path, otherwise when the absence lasts.
func (s *step) backToDirect() bool {
	return s.LastDirect.IsValid() && s.Relay.Absent && (s.now.Sub(s.DirectEnd) < awaySoon ||
		s.now.Sub(s.AwaySince) >= awayAfter)
}
