package plainpeer

import (
	"net/netip"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane/plainwg"
	"github.com/skeinmesh/skein/identity"
)

var (
	one, two, three = identity.ID{1}, identity.ID{2}, identity.ID{3}
	order           = []identity.ID{one, two, three}
	start           = time.Unix(1000, 0)
	home            = netip.MustParseAddrPort("198.51.100.7:4444")
	away            = netip.MustParseAddrPort("203.0.113.9:1")
)

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// heard is a peer that has begun a session then, and was last heard then.
func heard(begun, last float64, where netip.AddrPort) plainwg.Seen {
	return plainwg.Seen{Handshake: at(begun), Heard: at(last), Endpoint: where, Received: 1}
}

// The highest term holds a peer, and of equal ones the first in order.
func TestHolder(t *testing.T) {
	for _, c := range []struct {
		terms map[identity.ID]uint64
		want  identity.ID
		ok    bool
	}{
		{nil, identity.ID{}, false},
		{map[identity.ID]uint64{one: 0}, identity.ID{}, false},
		{map[identity.ID]uint64{two: 1}, two, true},
		{map[identity.ID]uint64{one: 1, two: 2, three: 1}, two, true},
		{map[identity.ID]uint64{three: 4, two: 4}, two, true},
		{map[identity.ID]uint64{{9}: 7, three: 4}, three, true}, // who is not a carrier has no say
	} {
		if have, ok := Holder(order, c.terms); have != c.want || ok != c.ok {
			t.Errorf("%v is held by %s %v, want %s", c.terms, have, ok, c.want)
		}
	}
}

// A peer that begins a session is claimed with a term above all others; the same session is claimed once.
func TestASessionIsClaimed(t *testing.T) {
	in := Input{Now: at(1), Self: two, Carriers: order, Terms: map[identity.ID]uint64{one: 3}, Session: heard(1, 1,
		home)}
	m, do := Step(Memory{}, in)
	if do != (Action{Claim: 4}) {
		t.Fatalf("it does %+v", do)
	}
	in.Terms = map[identity.ID]uint64{one: 3, two: 4}
	if m, do = Step(m, in); do != (Action{}) {
		t.Fatalf("once more it does %+v", do)
	}
	in.Session = heard(120, 120, home) // rekeyed: it is its own already
	if m, do = Step(m, in); do != (Action{}) {
		t.Fatalf("a new key does %+v", do)
	}
	in.Terms = map[identity.ID]uint64{one: 5, two: 4}
	if m, do = Step(m, in); do != (Action{Drop: true}) {
		t.Fatalf("when another has it, it does %+v", do)
	}
	if _, do = Step(m, in); do != (Action{}) {
		t.Fatalf("and then %+v", do)
	}
	in.Terms, in.Session = map[identity.ID]uint64{}, heard(200, 200,
		home) // the others' records are gone: terms still rise
	if _, do = Step(m, in); do.Claim != 6 {
		t.Fatalf("a later session is claimed by %+v", do)
	}
}

// A carrier takes a peer over that it has heard lately, once the holder is silent and those before it had their turn.
func TestTakeOver(t *testing.T) {
	in := Input{Now: at(10), Self: three, Carriers: order, Terms: map[identity.ID]uint64{one: 1}, Way: heard(0, 9,
		home)}
	m, do := Step(Memory{}, in)
	if do != (Action{}) {
		t.Fatalf("while the holder answers, it does %+v", do)
	}
	in.Silent = map[identity.ID]bool{one: true}
	if m, do = Step(m, in); do != (Action{}) {
		t.Fatalf("in the second's turn it does %+v", do)
	}
	in.Now = at(12)
	late, do := Step(m, in)
	if do.Begin != home {
		t.Fatalf("in its own turn it does %+v", do)
	}
	in.Silent[two] = true
	in.Now = at(10.5)
	if m, do = Step(m, in); do.Begin != home {
		t.Fatalf("with the second silent, too, it does %+v", do)
	}
	in.Now = at(15)
	if m, do = Step(m, in); do != (Action{}) {
		t.Fatalf("WireGuard tries by itself, and it does %+v", do)
	}
	in.Way = heard(14, 14, away)
	if m, do = Step(m, in); do.Begin != away {
		t.Fatalf("when the peer has moved, it does %+v", do)
	}
	in.Silent = nil
	if m, do = Step(m, in); do != (Action{Drop: true}) {
		t.Fatalf("when the holder is back first, it does %+v", do)
	}
	if !m.Begun.IsZero() || late.Begun.IsZero() {
		t.Error("it does not remember what it tries")
	}
}

// Nobody begins sessions with a peer that is not there.
func TestASilentPeerIsLeftAlone(t *testing.T) {
	in := Input{Now: at(500), Self: two, Carriers: order, Terms: map[identity.ID]uint64{one: 1},
		Silent: map[identity.ID]bool{one: true}}
	for what, way := range map[string]plainwg.Seen{"never heard": {}, "heard long ago": heard(0,
		500-Lately.Seconds()-1, home)} {
		in.Way = way
		if _, do := Step(Memory{}, in); do != (Action{}) {
			t.Errorf("%s: it does %+v", what, do)
		}
	}
}

// A peer that comes while its first carrier is away, or whose holder has begun anew and knows nothing of it, is taken.
func TestAPeerWithoutHolder(t *testing.T) {
	in := Input{Now: at(1), Self: two, Carriers: order, Way: heard(0, 1, home)}
	if _, do := Step(Memory{}, in); do != (Action{}) {
		t.Errorf("at once it does %+v", do)
	}
	in.Silent = map[identity.ID]bool{one: true}
	if _, do := Step(Memory{}, in); do.Begin != home {
		t.Errorf("with the first one silent it does %+v", do)
	}
	in.Silent = nil
	m, _ := Step(Memory{}, Input{Now: at(0), Self: two, Carriers: order, Terms: map[identity.ID]uint64{one: 1},
		Way: heard(0, 0, home)})
	m, do := Step(m, in)
	if do != (Action{}) { // the first one's turn
		t.Errorf("when the holder has begun anew it does %+v", do)
	}
	in.Now = at(1 + Turn.Seconds())
	if _, do := Step(m, in); do.Begin != home {
		t.Errorf("after the first one's turn it does %+v", do)
	}
	in = Input{Now: at(Patience.Seconds() + 1), Self: one, Carriers: order, Way: heard(0, 1, home)}
	if _, do := Step(Memory{}, in); do.Begin != home {
		t.Errorf("a peer that nobody has for long: %+v", do)
	}
}

// A holder follows its peer that has begun anew somewhere else, and asks a carrier that is away.
func TestAHolderFollows(t *testing.T) {
	in := Input{Now: at(50), Self: two, Carriers: order, Terms: map[identity.ID]uint64{two: 2}, Session: heard(0, 20,
		home), Way: heard(40, 50, away)}
	m := Memory{Handshake: at(0), Held: true}
	if _, do := Step(m, in); do.Begin != away {
		t.Errorf("it does %+v", do)
	}
	in.Session.Heard = at(45)
	if _, do := Step(m, in); do != (Action{}) {
		t.Errorf("a session that was heard since is ended by %+v", do)
	}
	in.Session.Heard, in.Way.Endpoint = at(20), home
	if _, do := Step(m, in); do != (Action{}) {
		t.Errorf("a peer at the same place: %+v", do)
	}
}
