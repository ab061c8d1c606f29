package path

import (
	"net/netip"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

func behind(nat skeinv1.NatType, outside string, step int) Node {
	return Node{NAT: nat, PortStep: step, Candidates: []Candidate{
		{Type: host, Addr: ap("192.168.1.2:51820"), Source: "interface"}, {Type: srflx, Addr: ap(outside), Source: "stun"},
	}}
}

func TestWhoPredicts(t *testing.T) {
	const here, there = "203.0.113.1:40000", "198.51.100.1:50000"
	open := behind(natPortRestricted, there, 0)
	open.Candidates = append(open.Candidates, Candidate{Type: forced, Addr: ap("198.51.100.1:51820"), Source: "config"})
	unknown := behind(natPortRestricted, there, 0)
	unknown.Candidates = unknown.Candidates[:1]
	cases := []struct {
		name       string
		self, peer Node
		set        Settings
		want       Prediction
		rule       string
	}{
		{"port-restricted with symmetric", behind(natPortRestricted, here, 0), behind(natSymmetric, there, 0), Settings{},
			Prediction{PredictBirthday, PredictOne}, "birthday"},
		{"symmetric with port-restricted", behind(natSymmetric, here, 0), behind(natPortRestricted, there, 0), Settings{},
			Prediction{PredictBirthday, PredictMany}, "birthday"},
		{"port-restricted with a symmetric one that counts", behind(natPortRestricted, here, 0),
			behind(natSymmetric, there, 2), Settings{}, Prediction{PredictNext, PredictOne}, "port-prediction"},
		{"a symmetric one that counts with port-restricted", behind(natSymmetric, here, -1), behind(natPortRestricted, there,
			0), Settings{}, Prediction{PredictNext, PredictMany}, "port-prediction"},
		{"both count", behind(natSymmetric, here, 1), behind(natSymmetric, there, 1), Settings{},
			Prediction{PredictNext, PredictTwin}, "port-prediction"},
		{"one counts, both symmetric", behind(natSymmetric, here, 1), behind(natSymmetric, there, 0), Settings{},
			Prediction{},
			"symmetric-symmetric"},
		{"both symmetric", behind(natSymmetric, here, 0), behind(natSymmetric, there, 0), Settings{},
			Prediction{},
			"symmetric-symmetric"},
		{"both symmetric, enabled", behind(natSymmetric, here, 0), behind(natSymmetric, there, 0),
			Settings{BirthdayBoth: true}, Prediction{PredictBoth, PredictTwin}, "birthday-both"},
		{"both symmetric, enabled for the peer", behind(natSymmetric, here, 0), behind(natSymmetric, there, 0),
			Settings{BirthdayPeers: map[string]bool{nodeIDs[1].String(): true}}, Prediction{PredictBoth, PredictTwin},
			"birthday-both"},
		{"both symmetric, disabled for the peer", behind(natSymmetric, here, 0), behind(natSymmetric, there, 0),
			Settings{BirthdayBoth: true, BirthdayPeers: map[string]bool{nodeIDs[1].String(): false}}, Prediction{},
			"symmetric-symmetric"},
		{"disabled on this host", behind(natPortRestricted, here, 0), behind(natSymmetric, there, 0),
			Settings{NoPrediction: true}, Prediction{}, "port-restricted-symmetric"},
		{"behind one address", behind(natPortRestricted, here, 0), behind(natSymmetric, "203.0.113.1:7", 0), Settings{},
			Prediction{}, "no-candidate"},
		{"the address is not known yet", behind(natSymmetric, here, 0), unknown, Settings{}, Prediction{},
			"port-restricted-symmetric"},
		{"restricted with symmetric needs none", behind(natRestricted, here, 0), behind(natSymmetric, there, 0), Settings{},
			Prediction{}, "cone-symmetric"},
		{"a forwarded port needs none", behind(natSymmetric, here, 0), open, Settings{}, Prediction{}, "full-cone"},
		{"no UDP", behind(natBlocked, here, 0), behind(natSymmetric, there, 0), Settings{}, Prediction{}, "udp-blocked"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := step{Machine: Machine{Ends: Ends{SelfID: nodeIDs[0], Peer: nodeIDs[1], Self: c.self, Remote: c.peer,
				Settings: c.set}}}
			p := s.strategy()
			if p.Predict != c.want || p.Rule != c.rule || p.Reason == "" {
				t.Errorf("prediction %+v by rule %q (%s), want %+v by %q", p.Predict, p.Rule, p.Reason, c.want, c.rule)
			}
		})
	}
}

// predictor is a machine whose peer is reachable only by port prediction.
type predictor struct {
	t   *testing.T
	m   Machine
	now time.Time
}

func newPredictor(t *testing.T, self, peer identity.ID) *predictor {
	g := &predictor{t: t, m: NewMachine(self, peer, simStart), now: simStart}
	a, b := behind(natSymmetric, "203.0.113.1:40000", 0), behind(natPortRestricted, "198.51.100.1:50000", 0)
	g.do(Input{Kind: InputSelf, Node: &a})
	g.do(Input{Kind: InputPeer, Node: &b})
	return g
}

// do makes a step and returns its actions except wake-ups.
func (g *predictor) do(in Input) (out []Action) {
	var actions []Action
	g.m, actions = Step(g.m, g.now, in)
	for _, a := range actions {
		if a.Kind != ActionWake {
			out = append(out, a)
		}
	}
	return out
}

// until advances the time with the requested wake-ups until an action of a kind appears, and returns how long that
// took.
func (g *predictor) until(kind ActionKind, limit time.Duration) (Action, time.Duration) {
	g.t.Helper()
	began := g.now
	for !g.m.Woken.IsZero() && g.m.Woken.Sub(began) <= limit {
		g.now = later(g.now, g.m.Woken)
		for _, a := range g.do(Input{Kind: InputTick}) {
			if a.Kind == kind {
				return a, g.now.Sub(began)
			}
		}
	}
	g.t.Fatalf("no action of kind %d within %s", kind, limit)
	return Action{}, 0
}

func (g *predictor) outcome(p PredictionPhase, e string) []Action {
	in := Input{Kind: InputPrediction, Prediction: &PredictionEvent{Phase: p, Text: "it went so", Retry: 7 * time.Second}}
	if e != "" {
		in.Endpoint = netip.MustParseAddrPort(e)
	}
	return g.do(in)
}

func has(as []Action, k ActionKind) bool {
	for _, a := range as {
		if a.Kind == k {
			return true
		}
	}
	return false
}

func TestPredictionStartsWithTheRelayAndBacksOff(t *testing.T) {
	g := newPredictor(t, nodeIDs[0], nodeIDs[1])
	g.now = g.now.Add(time.Minute)
	if as := g.do(Input{Kind: InputTick}); has(as, ActionPredict) {
		t.Fatal("it predicts ports although nothing can carry the request")
	}
	if as := g.do(Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}}); !has(as, ActionPredict) {
		t.Fatalf("no attempt when the relay is there: %v", as)
	}
	for i, want := range []time.Duration{30 * time.Second, time.Minute, 2 * time.Minute, 4 * time.Minute, 8 * time.Minute,
		16 * time.Minute, 32 * time.Minute, time.Hour, time.Hour} {
		g.outcome(PredictionFailed, "")
		_, took := g.until(ActionPredict, 2*time.Hour)
		if took > want || took < want*9/10 {
			t.Errorf("after %d failures the next attempt comes in %s, want %s or a tenth less", i+1, took, want)
		}
	}
	g.outcome(PredictionRefused, "")
	if _, took := g.until(ActionPredict, time.Minute); took != 7*time.Second {
		t.Errorf("after a refusal for 7s the next comes in %s", took)
	}
	if _, took := g.until(ActionPredict, 2*time.Hour); took < predictLost {
		t.Errorf("an attempt that nobody reports on is given up after %s", took)
	}
}

func TestAHitIsProvenByPings(t *testing.T) {
	g := newPredictor(t, nodeIDs[0], nodeIDs[1])
	g.do(Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}})
	const at = "198.51.100.1:50000"
	if as := g.outcome(PredictionHit, at); !has(as, ActionPing) || has(as, ActionUse) {
		t.Fatalf("a hit leads to %v, want a ping and no switch before it is answered", as)
	}
	g.now = g.now.Add(20 * time.Millisecond)
	as := g.do(Input{Kind: InputPong, Endpoint: ap(at), RTT: 20 * time.Millisecond,
		Sent: g.now.Add(-20 * time.Millisecond)})
	if !has(as, ActionUse) || g.m.Path.Kind != Direct || g.m.Path.Endpoint != ap(at) {
		t.Fatalf("an answered ping leads to %v, path %s", as, g.m.Path)
	}
	if p := g.m.Probes[g.m.active0()]; p.Source != "birthday" {
		t.Errorf("the endpoint's source is %q", p.Source)
	}
	// The path dies; first the same port is tried again, then others.
	g.do(Input{Kind: InputTraffic})
	for g.m.Path.Kind == Direct {
		g.until(ActionUse, time.Minute)
	}
	if a, _ := g.until(ActionPing, predictBack); a.Endpoint != ap(at) {
		t.Errorf("after the death it pings %s", a.Endpoint)
	}
	if _, took := g.until(ActionPredict, time.Minute); took > predictBack {
		t.Errorf("the next attempt comes %s after that", took)
	}
}

// Pings spent on an address before its port was hit do not prevent pings after the hit.
func TestAHitIsPingedWhateverWasSpentBefore(t *testing.T) {
	g := newPredictor(t, nodeIDs[0], nodeIDs[1])
	g.do(Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}})
	const at = "198.51.100.1:50000"
	for _, port := range []string{"1", "2", "3", "4", "50000"} { // as many of one address as are counted
		g.m.Spent = append(g.m.Spent, Spent{Endpoint: ap("198.51.100.1:" + port), Last: g.now, Own: Refill{At: g.now},
			Invited: Refill{At: g.now}})
	}
	for _, e := range []string{at, "198.51.100.1:61000"} {
		g.now = g.now.Add(time.Second)
		if as := g.outcome(PredictionHit, e); !has(as, ActionPing) {
			t.Errorf("a hit at %s leads to %v, want a ping", e, as)
		}
	}
}

// A ping sent just before the hit left from another port, and does not prevent a ping from the port that was hit.
func TestAHitIsPingedRightBehindAnotherPing(t *testing.T) {
	for _, since := range []time.Duration{0, time.Millisecond, pingBackGap - 1, pingBackGap} {
		g := newPredictor(t, nodeIDs[0], nodeIDs[1])
		g.do(Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}})
		const at = "198.51.100.1:61000"
		if as := g.do(Input{Kind: InputPunch, Addresses: []netip.AddrPort{ap(at)}}); !has(as, ActionPing) {
			t.Fatalf("a punch leads to %v", as)
		}
		g.now = g.now.Add(since)
		if !has(g.outcome(PredictionHit, at), ActionPing) {
			if a, took := g.until(ActionPing, time.Second); a.Endpoint != ap(at) || took > pingBackGap {
				t.Errorf("hit %s after another ping: the next goes to %s, %s later", since, a.Endpoint, took)
			}
		}
	}
}

func (m Machine) active0() int { return (&step{Machine: m}).active() }

func TestOnlyOneEndBegins(t *testing.T) {
	low, high := newPredictor(t, nodeIDs[0], nodeIDs[1]), newPredictor(t, nodeIDs[1], nodeIDs[0])
	relay := Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}}
	if !has(low.do(relay), ActionPredict) || has(high.do(relay), ActionPredict) {
		t.Fatal("want the node with the lower ID to begin and the other to wait")
	}
	high.outcome(PredictionBegan, "")
	if _, took := high.until(ActionPredict, time.Hour); took < predictLost {
		t.Errorf("it begins an attempt of its own %s after the peer's", took)
	}
}

func TestAnAttemptEndsWhenItIsNotNeeded(t *testing.T) {
	g := newPredictor(t, nodeIDs[0], nodeIDs[1])
	g.do(Input{Kind: InputRelay, Relay: RelayChoice{ID: relayID}})
	at := ap("198.51.100.1:61000")
	if as := g.do(Input{Kind: InputPing, Endpoint: at}); !has(as, ActionPing) {
		t.Fatalf("the peer's ping leads to %v", as)
	}
	g.now = g.now.Add(time.Millisecond)
	as := g.do(Input{Kind: InputPong, Endpoint: at, RTT: time.Millisecond, Sent: g.now.Add(-time.Millisecond)})
	if !has(as, ActionUse) || !has(as, ActionPredict) {
		t.Fatalf("a proven path leads to %v, want the attempt ended", as)
	}
}
