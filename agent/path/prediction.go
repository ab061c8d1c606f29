package path

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Probing known addresses cannot work when nobody knows which port a NAT will use; then ports can be predicted. This
// file decides which pairs do that and when, and handles the outcome. Package agent/birthday carries out the attempt.

// PredictionKind is a method of port prediction.
type PredictionKind uint8

// The methods.
const (
	PredictNone     PredictionKind = iota
	PredictBirthday                // many sockets at one end, random ports tried from one port at the other
	PredictNext                    // ports predicted from the NAT's last one
	PredictBoth                    // many sockets and random ports at both ends
)

// String is the rule's name.
func (k PredictionKind) String() string {
	switch k {
	case PredictBirthday:
		return "birthday"
	case PredictNext:
		return "port-prediction"
	case PredictBoth:
		return "birthday-both"
	}
	return "none"
}

// PredictionRole is this end's part in an attempt.
type PredictionRole uint8

// The roles.
const (
	PredictOne  PredictionRole = iota // WireGuard's port tries many ports of the peer's NAT
	PredictMany                       // many sockets, each with a mapping of its own, try the peer's one port
	PredictTwin                       // many sockets try many ports, as the peer's do
)

// String is the role in words, for users.
func (r PredictionRole) String() string {
	switch r {
	case PredictMany:
		return "many sockets here, one port there"
	case PredictTwin:
		return "many sockets at both ends"
	}
	return "one port here, many sockets there"
}

// Prediction is how a pair may predict ports; the zero Prediction: not at all.
type Prediction struct {
	Kind PredictionKind
	Role PredictionRole
}

// PredictionPhase is the progress or outcome of an attempt.
type PredictionPhase uint8

// The phases.
const (
	PredictionBegan   PredictionPhase = iota // an attempt with the peer has begun, at either end's request
	PredictionHit                            // Input.Endpoint: where the peer was heard
	PredictionFailed                         // every port was tried
	PredictionRefused                        // a budget at either end allows no attempt before Retry
	PredictionSilent                         // the peer did not answer the request
)

// PredictionEvent is the content of an InputPrediction.
type PredictionEvent struct {
	Phase PredictionPhase
	Text  string        // one sentence
	Retry time.Duration // PredictionRefused
	// The cost of an attempt that was carried out.
	Probes  int // packets from WireGuard's port
	Sockets int
	Took    time.Duration
}

// PredictionState is the state of port prediction with one peer.
type PredictionState struct {
	Of      Prediction // as planned; another plan starts anew
	Since   time.Time  // start of the running attempt; zero: none
	Hit     bool       // an attempt found an endpoint that no ping has proven yet
	Next    time.Time  // no attempt before
	Tries   int        // attempts in a row without a hit
	Refused int        // requests in a row that were refused
	Outcome string     // of the last attempt
	At      time.Time
	Last    PredictionEvent // of the last attempt
	Died    time.Time       // death of the last direct path that predict has handled
}

// Times of port prediction. A failed attempt costs up to some thousand packets and mappings, so the pauses are long.
const (
	predictFirst  = 30 * time.Second // after a failed attempt: 30 s, 1, 2, 4 … min up to predictLast
	predictLast   = time.Hour
	predictSilent = 10 * time.Second // after an attempt the peer did not answer: 10, 20, 40 … s up to the setting
	predictAsk    = 15 * time.Second // limit after a refusal without a longer time: 1, 2, 4 … s
	predictDefer  = 500 * time.Millisecond
	predictLost   = 45 * time.Second // after so long without a report an attempt counts as failed
	predictSettle = 5 * time.Second  // after a hit, for pings to prove it
	predictBack   = 4 * time.Second  // after a death: the predicted port may still be open
)

// strategy is Strategy with port prediction added for pairs that need it.
func (s *step) strategy() Plan {
	p := Strategy(s.Self, s.Remote, s.Settings.Exclude)
	g, reason := PredictionFor(s.Self, s.Remote, s.Settings, s.Peer)
	switch {
	case g.Kind == PredictNone && reason != "" && !p.Probe:
		p.Reason += " " + reason
	case g.Kind != PredictNone:
		p.Predict = g
		if !p.Probe {
			p.Rule, p.Reason = g.Kind.String(), reason
		}
	}
	return p
}

// PredictionFor returns how two nodes may predict ports, and the reason in a sentence; empty where that is of no use.
func PredictionFor(self, peer Node, set Settings, id identity.ID) (Prediction, string) {
	a, b := openNAT(self), openNAT(peer)
	symmetric := a == natSymmetric || b == natSymmetric
	other := a == natPortRestricted || b == natPortRestricted || a == b
	switch {
	case !symmetric || !other || samePublicIP(self, peer) || !mapped4(self) || !mapped4(peer):
		return Prediction{}, ""
	case set.NoPrediction:
		return Prediction{}, "Port prediction is disabled on this host (natTraversal.portGuessing)."
	case a == b && self.PortStep != 0 && peer.PortStep != 0:
		return Prediction{PredictNext, PredictTwin}, "Both ends are behind symmetric NATs that count their ports, so each " +
			"end tries those that come next at the other."
	case a == b && set.both(self, peer, id):
		return Prediction{PredictBoth, PredictTwin}, "Both ends are behind symmetric NATs; many sockets at each try random " +
			"ports of the other, since birthdayAttack is enabled."
	case a == b:
		return Prediction{}, "Port prediction at both ends is not enabled (skein settings --birthday-attack)."
	}
	role, step := PredictOne, peer.PortStep
	if a == natSymmetric {
		role, step = PredictMany, self.PortStep
	}
	if step != 0 {
		return Prediction{PredictNext, role}, "One end's NAT is symmetric and counts its ports, and the other's lets in " +
			"only ports it has sent to, so the ports that come next are tried."
	}
	return Prediction{PredictBirthday, role}, "One end's NAT is symmetric, so its port is not known beforehand, and the " +
		"other's lets in only ports it has sent to: many sockets at the one end meet random ports tried from the other."
}

// mapped4 reports whether a node's public IPv4 mapping is known; NATs that need port prediction are IPv4 only.
func mapped4(n Node) bool { return len(Mapped4(n)) > 0 }

// Mapped4 returns a node's server-reflexive IPv4 addresses and ports.
func Mapped4(n Node) []netip.AddrPort {
	var out []netip.AddrPort
	for _, c := range n.Candidates {
		if c.Type == srflx && c.Addr.Addr().Is4() && c.Addr.Port() != 0 {
			out = append(out, c.Addr)
		}
	}
	return out
}

// predict begins an attempt when it is due, and ends one that is no longer needed.
func (s *step) predict() {
	g := &s.Prediction
	if s.Plan.Predict != g.Of {
		*g = PredictionState{Of: s.Plan.Predict}
		if s.SelfID.String() > s.Peer.String() {
			g.Next = s.now.Add(predictDefer) // one end asks first, so that two requests need not cross
		}
	}
	if s.direct() >= 0 && (g.Hit || !g.Since.IsZero()) {
		g.Since, g.Hit = time.Time{}, false
		s.actions = append(s.actions, Action{Kind: ActionPredict})
	}
	if g.Of.Kind == PredictNone || s.direct() >= 0 || s.Unready {
		return
	}
	if s.DirectEnd.After(g.Died) {
		g.Died, g.Next = s.DirectEnd, later(g.Next, s.now.Add(predictBack))
		s.pingPredicted()
	}
	if !g.Since.IsZero() && s.now.Sub(g.Since) >= predictLost {
		s.onPrediction(netip.AddrPort{}, PredictionEvent{Phase: PredictionFailed,
			Text: "Nothing was heard of the attempt any more."})
	}
	if at := s.predictionDue(); at.IsZero() || s.now.Before(at) || !g.Since.IsZero() {
		return
	}
	g.Since = s.now
	s.pingPredicted()
	s.actions = append(s.actions, Action{Kind: ActionPredict, Predict: g.Of})
}

// predictionDue is when predict must run again; zero: after another event.
func (s *step) predictionDue() time.Time {
	g := &s.Prediction
	switch {
	case g.Of.Kind == PredictNone || s.direct() >= 0 || s.Unready:
		return time.Time{}
	case !g.Since.IsZero():
		return g.Since.Add(predictLost)
	case s.Relay.ID.IsZero():
		return time.Time{} // nothing carries the request to the peer
	case s.asleep() || s.Settings.Lazy && s.now.Sub(s.TrafficAt) >= talkFor:
		return time.Time{} // no traffic needs a path
	}
	at := later(g.Next, s.Now)
	if s.Plan.Probe {
		at = later(at, s.BurstTo) // probing without prediction goes first
	}
	return at
}

// pingPredicted pings endpoints found by earlier predictions, since their mappings may still exist.
func (s *step) pingPredicted() {
	for i := range s.Probes {
		if p := &s.Probes[i]; p.predicted() && p.proven(s.now) {
			p.BurstAt, p.Next = later(s.now, p.HoldUntil), 0
		}
	}
}

func (p *Probe) predicted() bool {
	return p.Source == PredictBirthday.String() || p.Source == PredictNext.String() || p.Source == PredictBoth.String()
}

// onPrediction handles the progress or outcome of an attempt.
func (s *step) onPrediction(e netip.AddrPort, ev PredictionEvent) {
	g := &s.Prediction
	if ev.Phase == PredictionBegan {
		if s.direct() < 0 {
			g.Since = s.now
		}
		return
	}
	if ev.Phase == PredictionHit {
		again := ev == g.Last // another packet from the same endpoint
		if again {
			s.grant(e, 1)
		} else {
			s.grant(e, unprovenPings)
		}
		s.hit(e, again)
		if again {
			return
		}
	}
	g.Since, g.Hit = time.Time{}, ev.Phase == PredictionHit && s.direct() < 0
	g.Outcome, g.At, g.Last = ev.Text, s.now, ev
	if ev.Phase != PredictionRefused {
		g.Refused = 0
	}
	switch ev.Phase {
	case PredictionHit:
		g.Tries, g.Next = 0, s.now.Add(predictSettle)
	case PredictionRefused:
		g.Refused++
		g.Next = s.now.Add(max(ev.Retry, min(time.Second<<min(g.Refused-1, 10), predictAsk)))
	case PredictionSilent:
		g.Tries++
		g.Next = s.now.Add(s.jitter(min(predictSilent<<min(g.Tries-1, 10), s.directRetry()), g.Tries))
	default:
		g.Tries++
		g.Next = s.now.Add(s.jitter(min(predictFirst<<min(g.Tries-1, 10), predictLast), g.Tries))
	}
}

// grant renews the pings of an address that was hit, whatever was spent on it before: all of them after a new hit,
// one for each further packet from there.
func (s *step) grant(e netip.AddrPort, n uint8) {
	b := s.spent(e)
	if b == nil { // an earlier hit at the same NAT gives up its place
		if k := slices.IndexFunc(s.Spent, func(b Spent) bool {
			return b.Endpoint.Addr() == e.Addr() && !s.known(b.Endpoint)
		}); k >= 0 {
			s.Spent = slices.Delete(s.Spent, k, k+1)
			b = s.spent(e)
		}
	}
	if b != nil {
		b.Left = max(b.Left, n)
	}
}

// hit handles an endpoint from which an authenticated packet of the peer met a predicted port; again: not its first
// one.
func (s *step) hit(e netip.AddrPort, again bool) {
	i := s.find(e)
	if i < 0 {
		if i = s.learn(e, ""); i < 0 {
			return
		}
	}
	p := &s.Probes[i]
	p.Source = s.Plan.Predict.Kind.String()
	if s.Plan.Predict.Kind == PredictNone {
		p.Source = PredictBirthday.String() // adopted before the peer's record arrived
	}
	due := p.LastSent.Add(pingBackGap)
	if i == s.active() || again && p.Unanswered > 0 && s.now.Before(due) {
		return
	}
	// A ping sent a moment ago left from another local port, so this one is still needed.
	p.BurstAt, p.Next, p.Unanswered, p.WindowSent = s.now, 0, 0, 0
	if s.now.Equal(p.LastSent) {
		p.BurstAt = due
	}
}

// both reports whether port prediction at both ends is enabled with a peer. This host's configuration for the peer
// counts first, then either node's record, where disabled overrides enabled, then the mesh's setting.
func (s Settings) both(self, other Node, peer identity.ID) bool {
	if v, ok := s.BirthdayPeers[peer.String()]; ok {
		return v
	}
	switch {
	case self.Birthday == "disabled" || other.Birthday == "disabled":
		return false
	case self.Birthday == "enabled" || other.Birthday == "enabled":
		return true
	}
	return s.BirthdayBoth
}

// explain summarises port prediction for users; nil: not used for this pair.
func (g PredictionState) explain() *PredictionLine {
	if g.Of.Kind == PredictNone {
		return nil
	}
	return &PredictionLine{Rule: g.Of.Kind.String(), Role: g.Of.Role.String(), Running: !g.Since.IsZero(), Tries: g.Tries,
		Outcome: g.Outcome, At: g.At, Next: g.Next, Probes: g.Last.Probes, Sockets: g.Last.Sockets, Took: g.Last.Took}
}

// PredictionLine is the state of port prediction with a peer, for Explanation.
type PredictionLine struct {
	Rule, Role string
	Running    bool
	Tries      int    // consecutive failures
	Outcome    string // of the last attempt
	At, Next   time.Time
	Probes     int // sent from WireGuard's port in the last attempt
	Sockets    int
	Took       time.Duration
}

// text is the line without its heading.
func (l PredictionLine) text(now time.Time) string {
	out := l.Rule + " (" + l.Role + ")"
	switch {
	case l.Running:
		out += ", an attempt is under way"
	case l.Tries > 0:
		out += fmt.Sprintf(", %d failed, the next in %s", l.Tries, round(max(l.Next.Sub(now), 0)))
	}
	if l.Outcome != "" {
		out += "; " + round(now.Sub(l.At)).String() + " ago: " + l.Outcome
	}
	return out
}

// portStep is the port increment of the node's NAT; only a symmetric NAT's is used.
func portStep(r *skeinv1.Record) int { return int(r.GetTraits().GetPortStep()) }
