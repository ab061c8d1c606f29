package path

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Where probing known addresses cannot work because nobody knows the port that a NAT will use, ports can be guessed.
// This file decides which pairs do that, when, and what an attempt's outcome means. The attempt itself is
// agent/birthday's.

// GuessKind is a way of guessing ports.
type GuessKind uint8

// The ways.
const (
	GuessNone       GuessKind = iota
	GuessBirthday             // one end's many sockets against random ports tried from the other's one
	GuessPrediction           // ports that follow from the NAT's last one
	GuessBoth                 // many sockets and random ports at both ends
)

// String is the rule's name.
func (k GuessKind) String() string {
	switch k {
	case GuessBirthday:
		return "birthday"
	case GuessPrediction:
		return "port-prediction"
	case GuessBoth:
		return "birthday-both"
	}
	return "none"
}

// GuessRole is what this end does.
type GuessRole uint8

// The roles.
const (
	GuessOne  GuessRole = iota // WireGuard's port tries many ports of the peer's NAT
	GuessMany                  // many sockets, each with a mapping of its own, try the peer's one port
	GuessTwin                  // many sockets try many ports, as the peer's do
)

// String is the role in words.
func (r GuessRole) String() string {
	switch r {
	case GuessMany:
		return "many sockets here, one port there"
	case GuessTwin:
		return "many sockets at both ends"
	}
	return "one port here, many sockets there"
}

// Guess is how a pair may guess ports; the zero Guess means not at all.
type Guess struct {
	Kind GuessKind
	Role GuessRole
}

// GuessPhase is what became of an attempt.
type GuessPhase uint8

// The phases.
const (
	GuessBegan   GuessPhase = iota // the peer began it, or it was begun with the peer
	GuessHit                       // Input.Endpoint: where the peer was heard
	GuessFailed                    // every port was tried
	GuessRefused                   // a budget, here or there, says not before Retry
	GuessSilent                    // the peer did not answer the request
)

// GuessEvent is the outcome of an attempt, of an InputGuess.
type GuessEvent struct {
	Phase GuessPhase
	Text  string        // one sentence
	Retry time.Duration // GuessRefused
	// What it took, of an attempt that was carried out.
	Probes  int // packets from WireGuard's port
	Sockets int
	Took    time.Duration
}

// Guessing is how guessing with one peer goes.
type Guessing struct {
	Of      Guess     // what the plan said; another plan starts anew
	Since   time.Time // start of the running attempt; zero: none
	Hit     bool      // it has found something, which no ping has proven yet
	Next    time.Time // no attempt before
	Tries   int       // attempts in a row without a hit
	Refused int       // requests in a row that were refused
	Outcome string    // of the last one
	At      time.Time
	Last    GuessEvent // what the last one took
	Died    time.Time  // of the last path whose death was noticed here
}

// Times of guessing. A failed attempt costs up to some thousand packets and mappings, so the pauses are long.
const (
	guessFirst  = 30 * time.Second // after a failed attempt: 30 s, 1, 2, 4 … min up to guessLast
	guessLast   = time.Hour
	guessSilent = 10 * time.Second // after one that the peer did not answer: 10, 20, 40 … s up to the setting
	guessAsk    = 15 * time.Second // at most after a refusal that names no longer time: 1, 2, 4 … s
	guessDefer  = 500 * time.Millisecond
	guessLost   = 45 * time.Second // an attempt that nobody reports on any more
	guessSettle = 5 * time.Second  // after a hit, for pings to prove it
	guessBack   = 4 * time.Second  // after a death: the port that was found may still be open
)

// strategy is Strategy with guessing added where that is all that is left.
func (s *step) strategy() Plan {
	p := Strategy(s.Self, s.Remote, s.Settings.Exclude)
	g, reason := GuessFor(s.Self, s.Remote, s.Settings, s.Peer)
	switch {
	case g.Kind == GuessNone && reason != "" && !p.Probe:
		p.Reason += " " + reason
	case g.Kind != GuessNone:
		p.Guess = g
		if !p.Probe {
			p.Rule, p.Reason = g.Kind.String(), reason
		}
	}
	return p
}

// GuessFor is what guessing ports can do for two nodes, and why, in a sentence; empty where it is not the question.
func GuessFor(self, peer Node, set Settings, id identity.ID) (Guess, string) {
	a, b := openNAT(self), openNAT(peer)
	symmetric := a == natSymmetric || b == natSymmetric
	other := a == natPortRestricted || b == natPortRestricted || a == b
	switch {
	case !symmetric || !other || samePublicIP(self, peer) || !mapped4(self) || !mapped4(peer):
		return Guess{}, ""
	case set.NoGuessing:
		return Guess{}, "Guessing ports is disabled on this host (natTraversal.portGuessing)."
	case a == b && self.PortStep != 0 && peer.PortStep != 0:
		return Guess{GuessPrediction, GuessTwin}, "Both ends are behind symmetric NATs that count their ports, so each end " +
			"tries those that come next at the other."
	case a == b && set.both(self, peer, id):
		return Guess{GuessBoth, GuessTwin}, "Both ends are behind symmetric NATs; many sockets at each try random ports of " +
			"the other, since birthdayAttack is enabled."
	case a == b:
		return Guess{}, "Guessing ports at both ends is not enabled (skein settings --birthday-attack)."
	}
	role, step := GuessOne, peer.PortStep
	if a == natSymmetric {
		role, step = GuessMany, self.PortStep
	}
	if step != 0 {
		return Guess{GuessPrediction, role}, "One end's NAT is symmetric and counts its ports, and the other's lets in " +
			"only ports it has sent to, so the ports that come next are tried."
	}
	return Guess{GuessBirthday, role}, "One end's NAT is symmetric, so its port is not known beforehand, and the " +
		"other's lets in only ports it has sent to: many sockets at the one end meet random ports tried from the other."
}

// mapped4 tells nodes that know how the internet sees them; the NATs that this is about are all IPv4.
func mapped4(n Node) bool { return len(Mapped4(n)) > 0 }

// Mapped4 are a node's IPv4 addresses and ports as the internet sees them.
func Mapped4(n Node) []netip.AddrPort {
	var out []netip.AddrPort
	for _, c := range n.Candidates {
		if c.Type == srflx && c.Addr.Addr().Is4() && c.Addr.Port() != 0 {
			out = append(out, c.Addr)
		}
	}
	return out
}

// guess begins an attempt when it is due, and ends one that is not needed any more.
func (s *step) guess() {
	g := &s.Guessing
	if s.Plan.Guess != g.Of {
		*g = Guessing{Of: s.Plan.Guess}
		if s.SelfID.String() > s.Peer.String() {
			g.Next = s.now.Add(guessDefer) // one end begins, so that two requests need not cross
		}
	}
	if s.direct() >= 0 && (g.Hit || !g.Since.IsZero()) {
		g.Since, g.Hit = time.Time{}, false
		s.actions = append(s.actions, Action{Kind: ActionGuess})
	}
	if g.Of.Kind == GuessNone || s.direct() >= 0 || s.Unready {
		return
	}
	if s.DirectEnd.After(g.Died) {
		g.Died, g.Next = s.DirectEnd, later(g.Next, s.now.Add(guessBack))
		s.tryGuessed()
	}
	if !g.Since.IsZero() && s.now.Sub(g.Since) >= guessLost {
		s.takeGuess(netip.AddrPort{}, GuessEvent{Phase: GuessFailed, Text: "Nothing was heard of the attempt any more."})
	}
	if at := s.guessWake(); at.IsZero() || s.now.Before(at) || !g.Since.IsZero() {
		return
	}
	g.Since = s.now
	s.tryGuessed()
	s.actions = append(s.actions, Action{Kind: ActionGuess, Guess: g.Of})
}

// guessWake is when guess has something to do; zero: when something else happens.
func (s *step) guessWake() time.Time {
	g := &s.Guessing
	switch {
	case g.Of.Kind == GuessNone || s.direct() >= 0 || s.Unready:
		return time.Time{}
	case !g.Since.IsZero():
		return g.Since.Add(guessLost)
	case s.Relay.ID.IsZero():
		return time.Time{} // nothing carries the request to the peer
	case s.asleep() || s.Settings.Lazy && s.now.Sub(s.TrafficAt) >= talkFor:
		return time.Time{} // nothing would use it
	}
	at := later(g.Next, s.Now)
	if s.Plan.Probe {
		at = later(at, s.BurstTo) // what needs no guessing comes first
	}
	return at
}

// tryGuessed pings what was found by guessing before: the mapping may still be there.
func (s *step) tryGuessed() {
	for i := range s.Probes {
		if p := &s.Probes[i]; p.guessed() && p.proven(s.now) {
			p.BurstAt, p.Next = later(s.now, p.HoldUntil), 0
		}
	}
}

func (p *Probe) guessed() bool {
	return p.Source == GuessBirthday.String() || p.Source == GuessPrediction.String() || p.Source == GuessBoth.String()
}

// takeGuess takes what became of an attempt.
func (s *step) takeGuess(e netip.AddrPort, ev GuessEvent) {
	g := &s.Guessing
	if ev.Phase == GuessBegan {
		if s.direct() < 0 {
			g.Since = s.now
		}
		return
	}
	if ev.Phase == GuessHit {
		again := ev == g.Last // the peer's next packet from there
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
	g.Since, g.Hit = time.Time{}, ev.Phase == GuessHit && s.direct() < 0
	g.Outcome, g.At, g.Last = ev.Text, s.now, ev
	if ev.Phase != GuessRefused {
		g.Refused = 0
	}
	switch ev.Phase {
	case GuessHit:
		g.Tries, g.Next = 0, s.now.Add(guessSettle)
	case GuessRefused:
		g.Refused++
		g.Next = s.now.Add(max(ev.Retry, min(time.Second<<min(g.Refused-1, 10), guessAsk)))
	case GuessSilent:
		g.Tries++
		g.Next = s.now.Add(s.jitter(min(guessSilent<<min(g.Tries-1, 10), s.directRetry()), g.Tries))
	default:
		g.Tries++
		g.Next = s.now.Add(s.jitter(min(guessFirst<<min(g.Tries-1, 10), guessLast), g.Tries))
	}
}

// grant gives an address that was hit its pings, whatever was spent on it before: as many as for any other address
// after a new hit, and one for each further packet from there.
func (s *step) grant(e netip.AddrPort, n uint8) {
	b := s.spent(e)
	if b == nil { // an earlier hit at the same NAT makes room
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

// hit takes an endpoint at which an authenticated packet of the peer met a port that was guessed, again if that is not
// the first.
func (s *step) hit(e netip.AddrPort, again bool) {
	i := s.find(e)
	if i < 0 {
		if i = s.learn(e, ""); i < 0 {
			return
		}
	}
	p := &s.Probes[i]
	p.Source = s.Plan.Guess.Kind.String()
	if s.Plan.Guess.Kind == GuessNone {
		p.Source = GuessBirthday.String() // adopted before the peer's record came
	}
	due := p.LastSent.Add(pingBackGap)
	if i == s.active() || again && p.Unanswered > 0 && s.now.Before(due) {
		return
	}
	// What left a moment ago went by another port: it is no reason not to ping.
	p.BurstAt, p.Next, p.Unanswered, p.WindowSent = s.now, 0, 0, 0
	if s.now.Equal(p.LastSent) {
		p.BurstAt = due
	}
}

// both tells whether guessing at both ends is enabled with a peer: this host's configuration for the peer counts first,
// then what either node says of itself, where one that does not want it is heard, then the mesh's setting.
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

// explain tells how guessing goes, nil where there is none.
func (g Guessing) explain() *GuessLine {
	if g.Of.Kind == GuessNone {
		return nil
	}
	return &GuessLine{Rule: g.Of.Kind.String(), Role: g.Of.Role.String(), Running: !g.Since.IsZero(), Tries: g.Tries,
		Outcome: g.Outcome, At: g.At, Next: g.Next, Probes: g.Last.Probes, Sockets: g.Last.Sockets, Took: g.Last.Took}
}

// GuessLine is how guessing ports with a peer goes, for Explanation.
type GuessLine struct {
	Rule, Role string
	Running    bool
	Tries      int    // in a row that failed
	Outcome    string // of the last attempt
	At, Next   time.Time
	Probes     int // of the last attempt, from WireGuard's port
	Sockets    int
	Took       time.Duration
}

// text is the line without its name.
func (l GuessLine) text(now time.Time) string {
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

// portStep is what a record tells of how its NAT counts; only a symmetric one's is of use.
func portStep(r *skeinv1.Record) int { return int(r.GetTraits().GetPortStep()) }
