package path

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// choosePath chooses the path, as the last part of a step.
func (s *step) choosePath() {
	active := s.active()
	if i := s.find(s.fresh); i >= 0 && i != active && s.usable(i) && s.fits(i) {
		if active < 0 || s.Path.Silent || s.above(i, active) || s.renews(i, active) {
			s.use(i, "direct-proven")
			return
		}
		if s.above(active, i) || s.Probes[i].Old {
			return // a port is second to every direct path, and one that ended to every other path
		}
		if s.fresh == s.Follow {
			s.use(i, "direct-follows")
			return
		}
		if s.better(i, active) {
			if s.Probes[i].Streak >= 2 {
				s.use(i, "direct-better")
				return
			}
			s.ping(i) // one more answer confirms it
		}
	}
	if active >= 0 {
		return
	}
	s.useRelay()
}

// usable reports whether one answer is enough to use an endpoint.
func (s *step) usable(i int) bool {
	p := &s.Probes[i]
	if s.muted(p) {
		return false
	}
	if p.Flaps == 0 || s.Relay.ID.IsZero() && !s.Path.Alive {
		return true
	}
	if s.wasLate(p) {
		return true
	}
	if s.now.Before(p.HoldUntil) {
		return false
	}
	if p.Streak < holdStreak {
		s.ping(i)
		return false
	}
	return true
}

// wasLate reports whether an endpoint was given up although its answer was only late, as on a machine that is short
// of CPU. The path then returns, the death does not count, and patience grows.
func (s *step) wasLate(p *Probe) bool {
	if !s.sent.Before(p.Died) || s.now.Sub(p.Died) > lateWindow || p.Died.IsZero() {
		return false
	}
	if s.now.After(s.SlackUntil) {
		s.Lates, s.Slack = 0, 0
	}
	if s.Slack >= slackMax {
		return false // so late that the usual hold applies
	}
	// A needless death is not free: the burst that follows is work for a machine that has too much of it.
	limit := min(slackFirst<<s.Lates, slackMax)
	s.Lates = min(s.Lates+1, 10)
	s.Slack = min(max(s.Slack, s.now.Sub(s.SilentSince)-deadAfter+fastHeartbeat), limit)
	s.SlackUntil = s.now.Add(slackFor * time.Duration(min(s.Lates, 5)))
	p.Flaps--
	p.HoldUntil = time.Time{}
	p.RTT = s.SRTT // the machine caused the delay, not the path
	return true
}

// better reports whether a should replace b while both work. The margins keep similar endpoints from alternating.
func (s *step) better(a, b int) bool {
	if s.Path.Rule == "direct-follows" && s.now.Sub(s.Path.Since) < calmAfter {
		return false // one endpoint for both ends is worth more than the best for one
	}
	p, q := &s.Probes[a], &s.Probes[b] // both smoothed the same way
	now, rtt := q.RTT, p.RTT
	if ah, bh := p.Type == host, q.Type == host; ah != bh {
		if ah {
			return rtt <= now+now/2+hostHandicap
		}
		return now > rtt+rtt/2+hostHandicap
	}
	return rtt+max(betterBy, now/5) < now
}

// use makes an endpoint that has just answered the path.
func (s *step) use(i int, rule string) {
	if s.Probes[i].Type == relayC {
		s.usePort(i)
		return
	}
	p := &s.Probes[i]
	s.Path = Path{
		Kind: Direct, Endpoint: p.Endpoint, Since: s.now, RTT: p.RTT, Alive: true, Rule: rule,
		Reason: fmt.Sprintf("A ping to %s (%s) was answered after %s, so packets pass both ways.", p.Endpoint,
			p.label(), round(p.RTT)),
	}
	switch rule {
	case "direct-better":
		s.Path.Reason = fmt.Sprintf("%s (%s) answers after %s, clearly sooner or nearer than the endpoint used before.",
			p.Endpoint, p.label(), round(p.RTT))
	case "direct-follows":
		s.Path.Reason = fmt.Sprintf("The peer sends from %s (%s), which answers after %s, so both ends use the same way.",
			p.Endpoint, p.label(), round(p.RTT))
	}
	s.noteReducedMTU(p)
	s.LastDirect, s.Lost, s.PortDied = p.Endpoint, "", false
	s.Retries = 0
	s.NextRetry = s.now.Add(s.jitter(s.directRetry(), 0))
	s.watch(i)
	for k := range s.Probes {
		if k != i && !s.worthwhile(k, i) {
			s.Probes[k].Next = len(pacing)
		}
	}
}

// watch starts heartbeats on the path in use.
func (s *step) watch(i int) {
	p := &s.Probes[i]
	s.Follow, s.Pending = netip.AddrPort{}, nil
	s.SRTT, s.RTTVar = p.RTT, p.RTT/2
	s.LastPong = s.now
	s.BusyUntil = later(s.BusyUntil, s.now.Add(watchFor))
	p.Next = len(pacing)
}

// useRelay makes the relay the path, or keeps a dead path if there is no relay.
func (s *step) useRelay() {
	next := Path{Kind: Relay, Relay: s.Relay.ID, RTT: s.Relay.RTT, Alive: true}
	if s.Idle || !s.Known && s.Settings.Lazy {
		next.Relay, next.RTT = identity.ID{}, 0 // the relay is chosen when a packet comes
	}
	if s.Relay.ID.IsZero() {
		next = Path{}
		switch {
		case s.Path.probed():
			// keep the last endpoint that worked until another does
			next = Path{Kind: s.Path.Kind, Endpoint: s.Path.Endpoint, Relay: s.Path.Relay}
		case s.backToDirect():
			next = Path{Kind: Direct, Endpoint: s.LastDirect}
		}
	}
	rule := s.ruleWithoutDirect()
	if next.Kind == Direct && s.Relay.Absent {
		rule = "peer-away"
	}
	next.Since = s.Path.Since
	if !next.same(s.Path) {
		next.Since = s.now
	}
	next.Rule, next.Reason = s.Path.Rule, s.Path.Reason
	if rule != s.Path.Rule || !next.same(s.Path) {
		next.Rule, next.Reason = rule, s.reasonWithoutDirect(rule)
	}
	s.Path = next
}

// ruleWithoutDirect names the rule that explains why there is no direct path.
func (s *step) ruleWithoutDirect() string {
	switch {
	case !s.Known:
		return "no-record"
	case s.Idle:
		return ruleIdle
	case s.Lost != "":
		return RuleDirectDead
	case s.PortDied:
		return RuleRelayDead
	case !s.Plan.Probe:
		return s.Plan.Rule
	case s.Unready || s.Wishes || s.now.Before(s.BurstTo):
		return "relay-first"
	}
	return "no-answer"
}

func (s *step) reasonWithoutDirect(rule string) string {
	text := ""
	switch rule {
	case "no-record":
		text = "Nothing has been heard of this peer yet."
	case RuleDirectDead:
		text = s.Lost
	case RuleRelayDead:
		if !s.Plan.Probe {
			text = s.Plan.Reason
		}
	case "peer-away":
		return "The peer's agent answers no ping and has no session with a relay. Its tunnel may still work, so the last " +
			"endpoint that worked is kept."
	case ruleIdle:
		text = "There is no traffic: the first packet goes by the relay, and begins the search for a direct path."
	case "relay-first":
		text = "Direct paths are being probed."
	case "no-answer":
		text = fmt.Sprintf("No endpoint answered, of %d probed.", len(s.Plan.Targets))
	default:
		text = s.Plan.Reason
	}
	if s.UDPLost != "" {
		text = strings.TrimSpace(text + " " + s.UDPLost)
	}
	switch {
	case s.Relay.Absent:
		text += " The relays say that the peer is not there."
	case s.Relay.ID.IsZero():
		text += " Both ends share no relay now."
	}
	return text
}

// label describes the endpoint's type and source.
func (p *Probe) label() string {
	name := "learned"
	switch p.Type {
	case host:
		name = "host"
	case srflx:
		name = "srflx"
	case prflx:
		name = "prflx"
	case forced:
		name = "forced"
	case relayC:
		return "relay"
	}
	if p.Source != "" {
		name += ", " + p.Source
	}
	return name
}

// round makes a duration readable.
func round(d time.Duration) time.Duration {
	if d >= time.Second {
		return d.Round(100 * time.Millisecond)
	}
	if d >= 10*time.Millisecond {
		return d.Round(time.Millisecond)
	}
	return d.Round(10 * time.Microsecond)
}
