package wireguard

import (
	"bytes"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/skeinmesh/skein/dataplane"
)

const (
	// crossWindow is how long after our own handshake initiation one from the other side counts as crossing
	// it: a generous round trip, and well below the five seconds after which either repeats it.
	crossWindow = time.Second
	// settleWindow is how long after an answer an initiation, either side's, counts as made before it.
	settleWindow = 250 * time.Millisecond
	// busyWindow is how long a handshake may take on a good path.
	busyWindow = 200 * time.Millisecond
	// initiationWindow is how long an initiation tells that somebody wants a session: as long as
	// wireguard-go waits before it repeats one that was not answered.
	initiationWindow = 6 * time.Second
	// answerWithin is how long wireguard-go may take from an initiation to its response.
	answerWithin = 25 * time.Millisecond
	// repeatAfter is when an initiation that stands, and was not answered, is sent again.
	repeatAfter = 2 * answerWithin
	// insistAfter is when one that the other side may have passed over is sent again, and yieldAfter from when
	// on such a one is let in: the first must be answered by then, if it can be, also on a way that takes half a second.
	insistAfter = 800 * time.Millisecond
	yieldAfter  = 700 * time.Millisecond
	// lostAfter is when any other is: it may be lost, or have come right behind an answer, where none is let in. On
	// ways slower than that the other side's, which crosses it, would come too late to keep it from being sent.
	lostAfter = 600 * time.Millisecond
	// insistFor is how long an initiation stands: wireguard-go makes another one after five seconds.
	insistFor = 4 * time.Second
	// answerable is how long an answer to ours may come: until wireguard-go has made another one.
	answerable = 6 * time.Second
	// A flood of forged initiations must cost no more than the real ones: with maxTracked parties remembered
	// the rest passes as it would without us, and what is old is looked for no more often than sweepEvery.
	maxTracked = 4096
	sweepEvery = 100 * time.Millisecond
)

// crossing looks after handshakes that cross, which a mesh meets at once and a road warrior hardly ever:
// a probe that succeeds makes both ends of a path start at the same moment. Each initiation then wipes out
// the other end's, nobody can use an answer, and both wait five seconds for the next try; or worse,
// initiation and response are consumed at the same time, the keys of the two handshakes are mixed, and
// packets pass one way only.
//
// Both ends see both initiations' random sender indexes, so they agree without a word: the lower one
// stands. Its sender drops the other, and repeats its own when no answer comes, for it may have come before
// the other side knew us. The other lets it in and drops what may still answer its own. An initiation right
// behind an answer is dropped, on the way out as on the way in: it was made before the session was noticed.
// One of ours that is made while theirs is being answered waits until it is. If it is not, ours has wiped
// out theirs, and only ours can still be answered: it is sent, and once more if the other side has passed
// over it, which lets in the second when its own has not been answered either.
//
// What crosses is told by whose it is (see identities), not by where it came from or goes to: one end may send by a
// relay while the other sends directly. Ours is sent again where theirs came from, which is a way that works.
//
// An initiation that is not answered is sent once more, since five seconds are long; whoever has answered it then sends
// the same answer again, for that may be what was lost.
//
// A forged initiation counts for nothing. Only when more come than are read can one make us pass over an initiation or
// a response here. The handshake then takes place at the next try; it needs the address, the port and the moment of one
// to do even that.
type crossing struct {
	send func(packet []byte, at netip.AddrPort)
	who  *identities

	mu      sync.Mutex
	parties map[party]*meeting
	started map[uint32]party // with whom our initiations are, by index
	swept   time.Time
}

// meeting is what passed lately between us and one party.
type meeting struct {
	ours, theirs initiation // the last ones
	passedOver   initiation // the last of theirs that was not let in for ours
	held         time.Time  // when one of ours was held back
	responded    time.Time  // when a response went to it
	response     []byte     // to the last of theirs
	initiated    time.Time  // when an initiation came from it
}

type initiation struct {
	at      time.Time // sent or heard, then answered; zero: none
	index   uint32
	packet  []byte // of ours
	again   bool   // of ours: sent once more
	outcome outcome
}

type outcome int

const (
	open outcome = iota
	answered
	yielded // ours, to the other side's
)

func newCrossing(send func(packet []byte, at netip.AddrPort)) *crossing {
	return &crossing{send: send, who: newIdentities(), parties: map[party]*meeting{}, started: map[uint32]party{}}
}

// reset forgets everything.
func (c *crossing) reset() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.parties)
	clear(c.started)
}

// leaves decides whether a packet of ours is sent now.
func (c *crossing) leaves(p []byte, to netip.AddrPort) bool {
	switch {
	case c == nil:
		return true
	case isResponse(p):
		c.responding(p, to)
	case isInitiation(p):
		return c.starting(p, to)
	}
	return true
}

// admit decides whether wireguard-go sees a packet of theirs.
func (c *crossing) admit(p []byte, from netip.AddrPort) bool {
	switch {
	case c == nil:
		return true
	case isInitiation(p):
		who, ok := c.who.initiator(p, from)
		if !ok {
			return true // wireguard-go sees what it is
		}
		ok, answer := c.admitInitiation(senderIndex(p), who, from)
		if answer != nil {
			c.send(answer, from)
		}
		return ok
	case isResponse(p):
		return c.admitResponse(receiverIndex(p))
	}
	return true
}

// starting decides about an initiation of ours.
func (c *crossing) starting(p []byte, to netip.AddrPort) bool {
	who := c.who.recipient(p, to)
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.meet(who)
	switch theirs := m.theirs; {
	case !theirs.within(settleWindow):
	case theirs.outcome == answered:
		return false
	case theirs.within(answerWithin):
		m.held = time.Now()
		p = bytes.Clone(p)
		time.AfterFunc(answerWithin, func() { c.release(p, who, to) })
		return false
	}
	c.begin(who, m, initiation{at: time.Now(), index: senderIndex(p), packet: bytes.Clone(p)})
	c.repeat(m.ours, who, to, lostAfter)
	return true
}

// begin notes an initiation of ours. The caller holds mu.
func (c *crossing) begin(who party, m *meeting, ours initiation) {
	c.end(who, m)
	m.ours = ours
	c.started[ours.index] = who
}

// end forgets the index of our last initiation. The caller holds mu.
func (c *crossing) end(who party, m *meeting) {
	if c.started[m.ours.index] == who {
		delete(c.started, m.ours.index)
	}
}

// release sends an initiation that was held back, unless theirs has been answered meanwhile.
func (c *crossing) release(p []byte, who party, to netip.AddrPort) {
	c.mu.Lock()
	m := c.meet(who)
	if m.theirs.outcome == answered && m.theirs.within(settleWindow) {
		c.mu.Unlock()
		return
	}
	c.begin(who, m, initiation{at: time.Now(), index: senderIndex(p), packet: p})
	c.repeat(m.ours, who, to, insistAfter)
	c.mu.Unlock()
	c.send(p, to)
}

// repeat sends an initiation of ours once more if it is still open some time later.
func (c *crossing) repeat(ours initiation, who party, to netip.AddrPort, after time.Duration) {
	time.AfterFunc(after, func() {
		c.mu.Lock()
		m := c.parties[who]
		still := m != nil && m.ours.index == ours.index && m.ours.outcome == open && !m.ours.again
		if still {
			m.ours.again = true
		}
		c.mu.Unlock()
		if still {
			c.send(ours.packet, to)
		}
	})
}

// responding notes that an initiation of theirs is being answered.
func (c *crossing) responding(p []byte, to netip.AddrPort) {
	who := c.who.recipient(p, to)
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.meet(who)
	theirs := receiverIndex(p)
	if n := c.parties[party{at: to}]; n != nil && m.theirs.index != theirs && n.theirs.index == theirs {
		m = n // it was not read
	}
	m.responded, m.response = time.Now(), nil
	if m.theirs.index == theirs {
		m.response = bytes.Clone(p)
		m.theirs.at, m.theirs.outcome = time.Now(), answered
		m.ours.yield()
	}
}

// admitInitiation decides about the other side's initiation. One that has been answered already gets the same answer
// once more.
func (c *crossing) admitInitiation(index uint32, who party, from netip.AddrPort) (ok bool, answer []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget()
	if len(c.parties) >= maxTracked && c.parties[who] == nil {
		return true, nil
	}
	m, now := c.meet(who), time.Now()
	m.initiated = now
	again := m.theirs.index == index && m.theirs.within(crossWindow)
	if again && m.theirs.within(answerWithin) {
		return false, nil // two workers would both answer it
	}
	if again && m.theirs.outcome == answered && m.response != nil {
		answer, m.response = m.response, nil
		return false, answer
	}
	return m.lets(index, again, func() { c.repeat(m.ours, who, from, repeatAfter) }), nil
}

// lets decides about an initiation of theirs by what is under way. repeat sends ours again.
func (m *meeting) lets(index uint32, again bool, repeat func()) bool {
	ours, now := &m.ours, time.Now()
	switch {
	case ours.outcome == answered && ours.within(settleWindow):
		return false
	case again:
		// Let in before, and perhaps wiped out by ours, which then must not yield; the answer will tell.
		if m.theirs.outcome == open {
			m.theirs.at = now
		}
		return true
	case ours.outcome == open && ours.within(crossWindow) && ours.index < index && !m.insists(index):
		if m.passedOver.index != index {
			m.passedOver = initiation{at: now, index: index}
			repeat()
		}
		return false
	}
	ours.yield()
	m.theirs = initiation{at: now, index: index}
	return true
}

// insists tells whether an initiation has been passed over long enough.
func (m *meeting) insists(index uint32) bool {
	return m.passedOver.index == index && !m.passedOver.within(yieldAfter) && m.passedOver.within(crossWindow)
}

// admitResponse decides about a response, which ends an initiation of ours, wherever that was sent to, and however long
// ago: a peer that stood still answers when it goes on, and starts a handshake of its own in the same moment.
func (c *crossing) admitResponse(index uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.parties[c.started[index]]
	if m == nil || m.ours.index != index {
		return true
	}
	if m.ours.outcome == yielded {
		return false
	}
	m.ours.at, m.ours.outcome = time.Now(), answered
	return true
}

// busy tells whether a handshake with a peer is under way: an initiation of ours left for it a moment ago, or a
// response. With that we have keys, which the other side uses as soon as it has it; an attempt of ours before then
// would take them from us again, and be passed over there.
func (c *crossing) busy(key dataplane.Key, endpoints ...netip.AddrPort) bool {
	return c.any(key, endpoints, func(m *meeting) bool {
		return m.ours.within(busyWindow) || within(m.responded, crossWindow) || within(m.held, busyWindow)
	})
}

// answering tells whether an initiation of a peer came a moment ago whose answer has not left yet. A handshake that we
// start at that moment would expire the keys that the answer is making.
func (c *crossing) answering(key dataplane.Key, endpoints ...netip.AddrPort) bool {
	return c.any(key, endpoints, func(m *meeting) bool {
		return m.theirs.outcome == open && m.theirs.within(answerWithin)
	})
}

// wanted tells whether an initiation came from a peer that may still wait for its answer.
func (c *crossing) wanted(key dataplane.Key, endpoints ...netip.AddrPort) bool {
	return c.any(key, endpoints, func(m *meeting) bool { return within(m.initiated, initiationWindow) })
}

// any tells whether something is so of a peer, or of one of its endpoints.
func (c *crossing) any(key dataplane.Key, endpoints []netip.AddrPort, is func(*meeting) bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(partiesOf(key, endpoints), func(who party) bool {
		m := c.parties[who]
		return m != nil && is(m)
	})
}

// partiesOf are those that a peer may be: itself, or somebody unknown at one of its endpoints.
func partiesOf(key dataplane.Key, endpoints []netip.AddrPort) []party {
	all := []party{{key: key}}
	for _, at := range endpoints {
		all = append(all, party{at: unmapped(at)})
	}
	return all
}

// insist sends an initiation of ours once more that went to a peer and stands unanswered, to the last of its endpoints,
// and tells whether there is one. A new one instead would make what answers the first useless, which on a slow way is
// still to come.
func (c *crossing) insist(key dataplane.Key, endpoints []netip.AddrPort) bool {
	c.mu.Lock()
	var newest initiation
	var with party
	for _, who := range partiesOf(key, endpoints) {
		if m := c.parties[who]; m != nil && m.ours.outcome == open && m.ours.within(insistFor) && m.ours.at.After(newest.at) {
			newest, with = m.ours, who
		}
	}
	to := unmapped(endpoints[len(endpoints)-1])
	if newest.packet == nil || !to.IsValid() {
		c.mu.Unlock()
		return false
	}
	newest.at, newest.again = time.Now(), true
	if with.at.IsValid() {
		with.at = to
	}
	c.begin(with, c.meet(with), newest)
	c.mu.Unlock()
	c.send(newest.packet, to)
	return true
}

// meet returns what is remembered of a party. The caller holds mu.
func (c *crossing) meet(who party) *meeting {
	c.forget()
	m := c.parties[who]
	if m == nil {
		m = &meeting{}
		c.parties[who] = m
	}
	return m
}

// forget drops what is older than any window.
func (c *crossing) forget() {
	if now := time.Now(); now.Sub(c.swept) >= sweepEvery {
		c.swept = now
		maps.DeleteFunc(c.parties, func(who party, m *meeting) bool {
			if m.old() {
				c.end(who, m)
				return true
			}
			return false
		})
	}
}

func (m *meeting) old() bool {
	return !m.ours.within(answerable) && !m.theirs.within(crossWindow) && !within(m.responded, crossWindow) &&
		!within(m.initiated, initiationWindow)
}

func (i *initiation) within(d time.Duration) bool { return within(i.at, d) }

func (i *initiation) yield() {
	if i.outcome == open {
		i.outcome = yielded
	}
}

func within(at time.Time, d time.Duration) bool { return !at.IsZero() && time.Since(at) <= d }

func isInitiation(p []byte) bool {
	return len(p) == device.MessageInitiationSize && binary.LittleEndian.Uint32(p) == device.MessageInitiationType
}

func isResponse(p []byte) bool {
	return len(p) == device.MessageResponseSize && binary.LittleEndian.Uint32(p) == device.MessageResponseType
}

// senderIndex is where an initiation names itself, receiverIndex where a response names it.
func senderIndex(initiation []byte) uint32 { return binary.LittleEndian.Uint32(initiation[4:]) }
func receiverIndex(response []byte) uint32 { return binary.LittleEndian.Uint32(response[8:]) }
