package tunnels

import (
	"maps"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/identity"
)

const (
	initiationSize    = 148              // bytes of a handshake initiation, as WireGuard counts them
	dataAligned       = 16               // packets with data in them have a multiple of so many bytes
	unansweredAfter   = 2                // initiations that nobody answers: one may be lost
	handshakeAskEvery = 15 * time.Second // between two times that one peer is asked
	handshakeKeepFor  = 10 * time.Second // how long a peer that has asked is sent handshakes
	handshakesMost    = 8                // of those at a time: who asks is answered by a handshake, and thousands may ask
	sessionEnds       = 3 * time.Minute  // WireGuard sends nothing with a session that is older
)

// Handshakes are the peers with which this node is to begin a session.
type Handshakes struct {
	mu    sync.Mutex
	until map[identity.ID]time.Time // of those that asked for it
	left  map[identity.ID]time.Time // when they ceased to be peers
}

// Leave notes that a member is not a peer any more.
func (k *Handshakes) Leave(id identity.ID, now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.left == nil {
		k.left = map[identity.ID]time.Time{}
	}
	k.left[id] = now
}

// Parted are those that left so lately that they may send with a session of before, and with which there was no
// handshake since. Nothing is sent to those that still are not peers.
func (k *Handshakes) Parted(now time.Time, handshake func(identity.ID) time.Time) (out []identity.ID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, at := range k.left {
		if now.Sub(at) >= sessionEnds || handshake(id).After(at) {
			delete(k.left, id)
			continue
		}
		out = append(out, id)
	}
	return out
}

// Request notes that a peer asks, and tells whether it is granted now. One that is granted already is no news: who
// repeats it has nothing done again.
func (k *Handshakes) Request(from identity.ID, now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.until, func(_ identity.ID, until time.Time) bool { return !until.After(now) })
	if _, stands := k.until[from]; stands || len(k.until) >= handshakesMost {
		return false
	}
	if k.until == nil {
		k.until = map[identity.ID]time.Time{}
	}
	k.until[from] = now.Add(handshakeKeepFor)
	return true
}

// Requested are those whose request stands.
func (k *Handshakes) Requested(now time.Time) map[identity.ID]bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[identity.ID]bool{}
	for id, until := range k.until {
		if until.After(now) {
			out[id] = true
		}
	}
	return out
}

// Unanswered watches for peers that answer no handshake, though they are there. A handshake carries the time by the
// wall clock, and is refused unless that is later than the last one's: when a host's clock goes back by an hour, or was
// an hour ahead and is put right, nobody who knows it lets it begin a session for an hour. Others may begin one with
// it.
type Unanswered map[identity.ID]attempts

type attempts struct {
	rx, tx      uint64
	initiations int       // since anything else was sent or heard
	asked       time.Time // when the peer was asked to begin
}

// Look takes a reading of WireGuard's counters, and returns whom to ask now to begin a session. It is one at most: what
// keeps all handshakes from being answered, such as a busy host, is made no better by asking everybody.
func (u *Unanswered) Look(
	counters map[identity.ID]path.Counters, alive func(identity.ID) bool, now time.Time,
) (ask identity.ID, any bool) {
	if *u == nil {
		*u = Unanswered{}
	}
	maps.DeleteFunc(*u, func(id identity.ID, _ attempts) bool { _, there := counters[id]; return !there })
	for id, c := range counters {
		x, known := (*u)[id]
		sent := c.TxBytes - x.tx
		switch {
		case !known || c.RxBytes != x.rx || c.TxBytes < x.tx || sent%initiationSize != 0:
			x.initiations = 0
		case sent > 0 && sent%dataAligned == 0: // data: four initiations between two readings hardly ever leave
			x.initiations = 0
		case sent > 0:
			x.initiations = min(x.initiations+int(sent/initiationSize), unansweredAfter)
		}
		x.rx, x.tx = c.RxBytes, c.TxBytes
		again := x.asked.IsZero() || now.Sub(x.asked) >= handshakeAskEvery
		if !any && x.initiations >= unansweredAfter && again && alive(id) {
			ask, any = id, true
			x.asked = now
		}
		(*u)[id] = x
	}
	return ask, any
}
