package path

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"text/tabwriter"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
)

// ProbeLine is the outcome of probing one endpoint.
type ProbeLine struct {
	Endpoint               netip.AddrPort
	Source                 string // candidate type and what found it
	Sent, Answered         uint32
	LastSent, LastAnswered time.Time
	RTT                    time.Duration
	Outcome                string
}

// Explanation is the reason for the present path to a peer.
type Explanation struct {
	Peer        identity.ID
	At          time.Time
	Path        Path
	Self, Peers Node   // the records of both ends
	Strategy    string // what this pair of NATs allows
	Probes      []ProbeLine
	Decided     string // rule and reason
	NextTry     time.Time
	WouldChange []string
	Prediction  *PredictionLine // nil: no port prediction for this pair
}

// Explain explains the path to a peer; false if the peer is not known.
func (m *Manager) Explain(id identity.ID) (Explanation, bool) {
	type answer struct {
		e  Explanation
		ok bool
	}
	c := make(chan answer, 1)
	m.run(func(m *Manager, now time.Time) {
		p, ok := m.o.peers[id]
		if !ok {
			c <- answer{}
			return
		}
		c <- answer{Explain(p.machine, now), true}
	})
	select {
	case a := <-c:
		return a.e, a.ok
	case <-m.ended:
		return Explanation{}, false
	}
}

// Explain explains the path of a given machine. It is pure.
func Explain(m Machine, now time.Time) Explanation {
	e := Explanation{
		Peer: m.Peer, At: now, Path: m.Path, Self: m.Self, Peers: m.Remote, NextTry: m.NextRetry,
		Strategy: m.Plan.Rule + ": " + m.Plan.Reason,
		Decided:  m.Path.Rule + ": " + m.Path.Reason,
	}
	if !m.Known {
		e.Strategy = "no-record: The peer's record has not been heard yet."
	}
	for i := range m.Probes {
		p := &m.Probes[i]
		e.Probes = append(e.Probes, ProbeLine{
			Endpoint: p.Endpoint, Source: p.label(), Sent: p.Sent, Answered: p.Answered,
			LastSent: p.LastSent, LastAnswered: p.LastAnswered, RTT: p.RTT, Outcome: outcome(m, p, now),
		})
	}
	for _, k := range m.Plan.Skipped {
		if !hasProbe(m, k.Addr) {
			e.Probes = append(e.Probes, ProbeLine{Endpoint: k.Addr, Source: (&Probe{Type: k.Type, Source: k.Source}).label(),
				Outcome: "not probed: " + k.Why})
		}
	}
	e.WouldChange, e.Prediction = wouldChange(m, now), m.Prediction.explain()
	return e
}

func hasProbe(m Machine, a netip.AddrPort) bool { return (&step{Machine: m}).find(a) >= 0 }

func outcome(m Machine, p *Probe, now time.Time) string {
	_, more := p.due()
	switch {
	case m.Path.probed() && m.Path.Endpoint == p.Endpoint && m.Path.Silent:
		return "in use: WireGuard hears the peer there, its agent is silent"
	case m.Path.probed() && m.Path.Endpoint == p.Endpoint && m.Path.Alive:
		return "in use"
	case p.Type == relayC && p.Old:
		return "ended"
	case p.Error != "":
		return "not sent: " + p.Error
	case p.Flaps > 0 && now.Before(p.HoldUntil):
		return fmt.Sprintf("died %s ago, on trial for another %s", round(now.Sub(p.Died)), round(p.HoldUntil.Sub(now)))
	case p.Flaps > 0 && p.LastAnswered.Before(p.Died):
		return fmt.Sprintf("died %s ago, silent since", round(now.Sub(p.Died)))
	case p.Answered > 0:
		return "works"
	case p.Unanswered >= 3 && now.Sub(p.Heard) < streakGap:
		return "the peer's pings arrive from there, ours are not answered"
	case more:
		return "being probed"
	case p.Type == relayC && !p.Ready:
		return "reserved; the relay has not seen both ends yet"
	case p.Sent > 0:
		return "no answer"
	case !p.Planned:
		return "not probed: " + m.Plan.Rule
	}
	return "not probed yet"
}

// wouldChange lists events that would bring a better path.
func wouldChange(m Machine, now time.Time) []string {
	var out []string
	if m.Path.Silent {
		return []string{
			"The peer's agent, when it is started again: it answers, and the path is proven as usual.",
			fmt.Sprintf("%s of sending without hearing anything from the peer would move it to %s.", muteAfter, fallback(m)),
		}
	}
	if m.Path.Kind == Direct && m.Path.Alive {
		return []string{fmt.Sprintf("Silence for %s under traffic, or %d lost pings in a row without, would move it to %s.",
			deadAfter, idleRetries+1, fallback(m))}
	}
	if !m.Known {
		return []string{"The peer's record, by gossip or from its Kubernetes node, would start the search."}
	}
	switch m.Plan.Rule {
	case "udp-blocked":
		out = append(out, "Let UDP out at the end whose NAT type is blocked.")
	case "symmetric-symmetric", "port-restricted-symmetric":
		out = append(out, "A forwarded port at either end: port mapping on the router (PCP, NAT-PMP, UPnP) or "+
			"forceEndpoint in the configuration.",
			"A NAT with a stable port at the symmetric end, or IPv6 at both.")
	case "birthday", "port-prediction", "birthday-both":
		if g := m.Prediction; g.Since.IsZero() {
			out = append(out, fmt.Sprintf("A hit of the next attempt at port prediction, in %s.",
				round(max(g.Next.Sub(now), 0))))
		} else {
			out = append(out, "A hit of the attempt at port prediction that is under way.")
		}
		out = append(out, "A forwarded port at either end: port mapping on the router (PCP, NAT-PMP, UPnP) or "+
			"forceEndpoint in the configuration.")
	case "no-candidate":
		out = append(out, "An address in the peer's record that this host can reach, by IPv4 or IPv6.")
	}
	if m.Plan.Probe && !m.NextRetry.IsZero() {
		out = append(out, fmt.Sprintf("An answer to the next attempt, in %s.", round(max(m.NextRetry.Sub(now), 0))))
		if m.Self.NAT != natNone && m.Remote.NAT != natNone {
			out = append(out, "A firewall at either end that lets UDP to WireGuard's port pass.")
		}
	}
	if m.Relay.ID.IsZero() {
		out = append(out, "A relay that both ends can reach would carry traffic meanwhile.")
	}
	return append(out, "A changed record or network at either end starts a new attempt at once.")
}

func fallback(m Machine) string {
	if m.Relay.Absent {
		return "not alive, since the relays say that the peer is not there"
	}
	if m.Relay.ID.IsZero() {
		return "nowhere, since both ends share no relay"
	}
	return "relay " + m.Relay.ID.String()
}

// String is the explanation as text, for terminals and golden tests.
func (e Explanation) String() string {
	var b strings.Builder
	state := "alive"
	switch {
	case e.Path.Silent:
		state = "alive, its agent silent"
	case !e.Path.Alive:
		state = "not alive"
	}
	fmt.Fprintf(&b, "peer      %s\npath      %s, %s for %s", e.Peer, e.Path, state, round(e.At.Sub(e.Path.Since)))
	if e.Path.RTT > 0 {
		fmt.Fprintf(&b, ", rtt %s", round(e.Path.RTT))
	}
	fmt.Fprintf(&b, "\ndecided   %s\nstrategy  %s\nnat       self %s, peer %s\n", e.Decided, e.Strategy,
		candidate.NATName(e.Self.NAT), candidate.NATName(e.Peers.NAT))
	if e.Prediction != nil {
		fmt.Fprintf(&b, "prediction  %s\n", e.Prediction.text(e.At))
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nENDPOINT\tSOURCE\tSENT\tANSWERED\tRTT\tOUTCOME")
	for _, p := range e.Probes {
		rtt := "-"
		if p.Answered > 0 {
			rtt = round(p.RTT).String()
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%s\t%s\n", p.Endpoint, p.Source, p.Sent, p.Answered, rtt, p.Outcome)
	}
	_ = w.Flush() // a strings.Builder takes everything
	b.WriteString("\nwould change it:\n")
	for _, s := range e.WouldChange {
		b.WriteString("- " + s + "\n")
	}
	return b.String()
}

// Reader reads a journal; see agent/journal.
type Reader interface {
	Read(since, until time.Time, keep func(*skeinv1.JournalEntry) bool) ([]*skeinv1.JournalEntry, error)
}

// Past is the journal's record of the path to a peer at some time.
type Past struct {
	At       time.Time
	Path     string // as in PathDecision; empty when the journal does not reach back far enough
	Rule     string
	Reason   string
	Since    time.Time
	History  []*skeinv1.JournalEntry // inputs and decisions before it, oldest first, without traces
	Restarts bool                    // the agent started between the decision and At, so the path at At is unknown
}

// historyMax bounds Past.History.
const historyMax = 40

// ExplainAt reads from the journal the path that a peer had at a time, and the entries before it.
func ExplainAt(j Reader, id identity.ID, at time.Time) (Past, error) {
	peer := id.String()
	entries, err := j.Read(time.Time{}, at, func(e *skeinv1.JournalEntry) bool {
		if in := e.GetPathInput(); in != nil {
			return in.GetKind() != kindTrace && (in.GetPeer() == peer || in.GetPeer() == "")
		}
		return e.GetPathDecision().GetPeer() == peer || e.GetAgentStarted() != nil || e.GetNatObserved() != nil
	})
	if err != nil {
		return Past{}, fmt.Errorf("path of peer %s at %s: %w", peer, at.Format(time.RFC3339), err)
	}
	p := Past{At: at}
	for _, e := range entries {
		p.apply(e)
	}
	p.History = entries[max(0, len(entries)-historyMax):]
	return p, nil
}

// apply updates p from a decision about the peer or a start of the agent.
func (p *Past) apply(e *skeinv1.JournalEntry) {
	if d := e.GetPathDecision(); d != nil {
		if d.GetTo() != p.Path || p.Restarts {
			p.Since = time.Unix(0, e.GetTime())
		}
		p.Path, p.Rule, p.Reason, p.Restarts = d.GetTo(), d.GetRule(), d.GetReason(), false
	}
	if e.GetAgentStarted() != nil {
		p.Restarts = p.Path != ""
	}
}

// Alive reports whether the path carried packets, judging by its rule: a dead endpoint stays the path while there is
// no other, but its rule says that it is dead.
func (p Past) Alive() bool {
	proved := p.Rule == ruleRelayUDP || strings.HasPrefix(p.Rule, "direct-") && p.Rule != RuleDirectDead
	switch kind, where, _ := strings.Cut(p.Path, ":"); kind {
	case "direct":
		return proved
	case "relay":
		return proved || !strings.Contains(where, ",")
	}
	return false
}

// Then is the journal's record of the paths to all peers at some time, and of the nodes' records.
type Then struct {
	Paths  map[identity.ID]Past // without History
	Nodes  map[identity.ID]Node // from the peers' newest records
	Self   *Node                // nil: not known
	Begins time.Time            // when the journal's oldest entry was written; zero: it has none
}

// ThenAt reads the same as ExplainAt for all peers, in one pass.
func ThenAt(j Reader, at time.Time) (Then, error) {
	t := Then{Paths: map[identity.ID]Past{}, Nodes: map[identity.ID]Node{}}
	entries, err := j.Read(time.Time{}, time.Time{}, func(e *skeinv1.JournalEntry) bool {
		if written := time.Unix(0, e.GetTime()); t.Begins.IsZero() || written.Before(t.Begins) {
			t.Begins = written
		}
		kind := e.GetPathInput().GetKind()
		known := kind == InputSelf.String() || kind == InputPeer.String()
		return e.GetTime() <= at.UnixNano() && (known || e.GetPathDecision() != nil || e.GetAgentStarted() != nil)
	})
	if err != nil {
		return Then{}, fmt.Errorf("paths at %s: %w", at.Format(time.RFC3339), err)
	}
	heard := map[string]string{} // details of the newest record inputs, by peer; empty: this node
	for _, e := range entries {
		switch {
		case e.GetPathInput() != nil:
			heard[e.GetPathInput().GetPeer()] = e.GetPathInput().GetDetail()
		case e.GetAgentStarted() != nil:
			for id, p := range t.Paths {
				p.apply(e)
				t.Paths[id] = p
			}
		default:
			id, err := identity.ParseID(e.GetPathDecision().GetPeer())
			if err != nil {
				continue // a damaged entry, which names no node
			}
			p := t.Paths[id]
			p.At = at
			p.apply(e)
			t.Paths[id] = p
		}
	}
	for peer, detail := range heard {
		t.hear(peer, detail)
	}
	return t, nil
}

// hear adds a node's record. Details that another version wrote may not parse; that node then stays unknown.
func (t *Then) hear(peer, detail string) {
	var in struct{ Node *Node }
	if json.Unmarshal([]byte(detail), &in) != nil || in.Node == nil {
		return
	}
	if peer == "" {
		t.Self = in.Node
		return
	}
	if id, err := identity.ParseID(peer); err == nil {
		t.Nodes[id] = *in.Node
	}
}
