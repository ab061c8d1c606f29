package wireguard

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/simtime"
)

func initiationMessage(index uint32) []byte {
	p := make([]byte, device.MessageInitiationSize)
	binary.LittleEndian.PutUint32(p, device.MessageInitiationType)
	binary.LittleEndian.PutUint32(p[4:], index)
	return p
}

func responseMessage(receiver uint32) []byte {
	p := make([]byte, device.MessageResponseSize)
	binary.LittleEndian.PutUint32(p, device.MessageResponseType)
	binary.LittleEndian.PutUint32(p[8:], receiver)
	return p
}

// side is one end's view of a meeting with another.
type side struct {
	*crossing
	at   netip.AddrPort
	sent []uint32 // initiations that left without wireguard-go's doing: held back or repeated

	replies []uint32 // answers that did, by whose they answer
}

func newSide() *side {
	s := &side{at: netip.MustParseAddrPort("192.0.2.1:51820")}
	s.crossing = newCrossing(func(p []byte, _ netip.AddrPort) {
		if isResponse(p) {
			s.replies = append(s.replies, receiverIndex(p))
			return
		}
		s.sent = append(s.sent, senderIndex(p))
	})
	return s
}

func (s *side) starts(index uint32) bool  { return s.leaves(initiationMessage(index), s.at) }
func (s *side) answers(index uint32) bool { return s.leaves(responseMessage(index), s.at) }
func (s *side) comes(p []byte) bool       { return s.admit(p, s.at) }

// pass lets time go by, and tells what was sent then.
func (s *side) pass(d time.Duration) []uint32 {
	time.Sleep(d) // virtual
	synctest.Wait()
	sent := s.sent
	s.sent = nil
	return sent
}

// Of two initiations that cross, the one with the lower index stands at both ends.
func TestCrossingInitiations(t *testing.T) {
	for name, test := range map[string]func(t *testing.T, s *side){
		"an initiation that meets none of ours is let in": func(t *testing.T, s *side) {
			if !s.comes(initiationMessage(5)) || !s.comes([]byte("short")) {
				t.Error("it was dropped")
			}
		},
		"the higher is passed over, and ours repeated once": func(t *testing.T, s *side) {
			s.starts(100)
			if s.comes(initiationMessage(101)) {
				t.Error("it was let in")
			}
			if sent := s.pass(time.Second); !slices.Equal(sent, []uint32{100}) {
				t.Errorf("sent again: %d", sent)
			}
		},
		"ours is repeated once when nothing comes back": func(t *testing.T, s *side) {
			s.starts(100)
			if sent := s.pass(4 * time.Second); !slices.Equal(sent, []uint32{100}) {
				t.Errorf("sent again: %d", sent)
			}
		},
		"ours is not repeated when theirs was let in instead": func(t *testing.T, s *side) {
			s.starts(100)
			if !s.comes(initiationMessage(99)) || !s.answers(99) {
				t.Error("not what the rule says")
			}
			if sent := s.pass(4 * time.Second); len(sent) > 0 {
				t.Errorf("sent again: %d", sent)
			}
		},
		"what was answered and comes again gets the same answer, once": func(t *testing.T, s *side) {
			if !s.comes(initiationMessage(5)) || !s.answers(5) {
				t.Error("not what the rule says")
			}
			s.pass(lostAfter)
			s.comes(initiationMessage(5))
			if s.comes(initiationMessage(5)); !slices.Equal(s.replies, []uint32{5}) {
				t.Errorf("answers sent again: %d", s.replies)
			}
		},
		"while an answer is under way the peer is busy": func(t *testing.T, s *side) {
			s.comes(initiationMessage(5))
			s.answers(5)
			if s.pass(2 * busyWindow); !s.busy(dataplane.Key{}, s.at) {
				t.Error("it is not: an attempt of ours would take the keys away that the answer has made")
			}
			if s.pass(crossWindow); s.busy(dataplane.Key{}, s.at) {
				t.Error("it is still")
			}
		},
		"an answer that has not left is waited for, and not for ever": func(t *testing.T, s *side) {
			answering := func() bool { return s.answering(dataplane.Key{}, s.at) }
			s.comes(initiationMessage(5))
			if s.pass(answerWithin / 2); !answering() {
				t.Error("it is not: an attempt of ours would take the keys away while the answer makes them")
			}
			if s.pass(answerWithin); answering() {
				t.Error("it is still, though none leaves")
			}
			s.comes(initiationMessage(6))
			if s.answers(6); answering() {
				t.Error("it is still, though the answer has left")
			}
		},
		"ours is not repeated once it was answered": func(t *testing.T, s *side) {
			s.starts(100)
			if s.comes(initiationMessage(101)) || !s.comes(responseMessage(100)) {
				t.Error("not what the rule says")
			}
			if sent := s.pass(time.Second); len(sent) > 0 {
				t.Errorf("sent again: %d", sent)
			}
		},
		"an answer to something else ends nothing": func(t *testing.T, s *side) {
			s.starts(100)
			if !s.comes(responseMessage(77)) || s.comes(initiationMessage(101)) {
				t.Error("it ended our initiation")
			}
		},
		"right behind the answer none is let in": func(t *testing.T, s *side) {
			s.starts(100)
			if !s.comes(responseMessage(100)) || s.comes(initiationMessage(101)) || s.comes(initiationMessage(99)) {
				t.Error("one was")
			}
			s.pass(settleWindow + 1)
			if !s.comes(initiationMessage(101)) {
				t.Error("some time later it was dropped")
			}
		},
		"the lower is let in, and ours no longer answered": func(t *testing.T, s *side) {
			s.starts(100)
			if !s.comes(initiationMessage(99)) || s.comes(responseMessage(100)) {
				t.Error("not what the rule says")
			}
		},
		"long after ours any is let in": func(t *testing.T, s *side) {
			s.starts(200)
			s.pass(crossWindow + 1)
			if !s.comes(initiationMessage(201)) {
				t.Error("it was dropped")
			}
		},
		"ours yields to theirs however old it is, and is no longer answered": func(t *testing.T, s *side) {
			for _, age := range []time.Duration{crossWindow + 1, insistFor + 1, 5 * time.Second} {
				s.starts(200)
				s.pass(age)
				if !s.comes(initiationMessage(201)) || s.comes(responseMessage(200)) {
					t.Errorf("after %s both can be consumed at a time", age)
				}
				s.pass(time.Minute)
			}
		},
		"right behind a late answer none is let in": func(t *testing.T, s *side) {
			s.starts(100)
			s.pass(5 * time.Second)
			if !s.comes(responseMessage(100)) || s.comes(initiationMessage(99)) || s.comes(initiationMessage(101)) {
				t.Error("one was")
			}
		},
		"ours is dropped when theirs is being answered": func(t *testing.T, s *side) {
			if !s.comes(initiationMessage(5)) || s.starts(1) || !s.answers(5) {
				t.Error("not what the rule says")
			}
			if sent := s.pass(time.Second); len(sent) > 0 {
				t.Errorf("sent all the same: %d", sent)
			}
		},
		"a repeated one is not let in twice at once": func(t *testing.T, s *side) {
			if !s.comes(initiationMessage(5)) || s.comes(initiationMessage(5)) {
				t.Error("not what the rule says")
			}
			s.pass(answerWithin + 1)
			if !s.comes(initiationMessage(5)) {
				t.Error("some time later, when it had not been answered, it was dropped")
			}
		},
	} {
		t.Run(name, func(t *testing.T) { simtime.Test(t, func(t *testing.T) { test(t, newSide()) }) })
	}
}

// A device that starts between consuming the other's initiation and answering it wipes it out. Then only
// its own can be answered, and it is, though it may have the higher index.
func TestInitiationThatWipesOutTheirs(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		here, there := newSide(), newSide()
		there.starts(5)
		if !here.comes(initiationMessage(5)) || here.starts(9) {
			t.Fatal("want theirs let in, and ours held back")
		}
		if sent := here.pass(answerWithin); !slices.Equal(sent, []uint32{9}) {
			t.Fatalf("sent %d when theirs was not answered", sent)
		}
		if there.comes(initiationMessage(9)) {
			t.Fatal("the higher was let in at once")
		}
		if sent := there.pass(repeatAfter); !slices.Equal(sent, []uint32{5}) {
			t.Fatalf("the lower was not repeated, but %d", sent)
		}
		here.comes(initiationMessage(5)) // for wireguard-go a replay, and no reason to give ours up
		if sent := here.pass(insistAfter); !slices.Equal(sent, []uint32{9}) {
			t.Fatalf("sent %d, want ours once more", sent)
		}
		if !there.comes(initiationMessage(9)) || there.comes(responseMessage(5)) {
			t.Error("the lower did not yield in the end")
		}
		if !here.comes(responseMessage(9)) {
			t.Error("the answer was dropped")
		}
	})
}

// An initiation that was let in before we knew its sender is repeated, and answered: ours, started meanwhile, yields.
func TestRepeatedInitiationIsAnsweredAfterAll(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSide()
		if !s.comes(initiationMessage(5)) { // wireguard-go knows nobody by that key
			t.Fatal("dropped")
		}
		s.pass(answerWithin + 1)
		if !s.starts(9) { // now it does
			t.Fatal("ours was held back")
		}
		if !s.comes(initiationMessage(5)) || !s.answers(5) {
			t.Error("the repeated one was not let in")
		}
		if s.comes(responseMessage(9)) {
			t.Error("an answer to ours was let in though theirs had been answered")
		}
	})
}

// A flood of forged initiations fills no more than its bound, passes on to wireguard-go, and is forgotten.
func TestForgedInitiationsAreBounded(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		c := newCrossing(func([]byte, netip.AddrPort) {})
		from := func(i int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), 51820)
		}
		for i := range 2 * maxTracked {
			if !c.admit(initiationMessage(uint32(i)), from(i)) {
				t.Fatalf("initiation %d was dropped", i)
			}
		}
		if len(c.parties) > maxTracked {
			t.Errorf("%d endpoints are remembered, want at most %d", len(c.parties), maxTracked)
		}
		if !c.wanted(dataplane.Key{}, from(0)) || c.wanted(dataplane.Key{}, from(2*maxTracked-1)) {
			t.Error("want the first to be remembered and the last not")
		}
		if !c.leaves(initiationMessage(7), from(2*maxTracked)) || !c.busy(dataplane.Key{}, from(2*maxTracked)) {
			t.Error("a handshake of ours is not looked after during the flood")
		}
		time.Sleep(initiationWindow + time.Second) // virtual
		c.admit(initiationMessage(1), from(1))
		if len(c.parties) != 1 {
			t.Errorf("%d endpoints are left after the window, want the new one alone", len(c.parties))
		}
	})
}
