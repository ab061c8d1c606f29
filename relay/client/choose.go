package client

import (
	"time"

	"github.com/skeinmesh/skein/identity"
)

// knowledge is what a node knows about a peer's session with a relay; lower is better.
type knowledge int

const (
	knownHere knowledge = iota // the peer's record lists the relay, or its packets came from there recently
	unknown                    // nothing is known of the peer
	unlisted                   // the peer's record lists relays, but not this one
	knownGone                  // the relay has said that the peer is not there
)

// option is one relay that could carry packets to a peer.
type option struct {
	relay   identity.ID
	healthy bool
	know    knowledge
	own     time.Duration // RTT between this node and the relay
	peer    time.Duration // RTT between the peer and the relay; 0: unknown
}

// unknownPeerRTT stands for a peer's RTT to a relay that its record does not list (yet).
const unknownPeerRTT = 50 * time.Millisecond

func (o option) rtt() time.Duration {
	if o.peer == 0 {
		return o.own + unknownPeerRTT
	}
	return o.own + o.peer
}

// rank returns an option's rank; lower is better. An unhealthy relay comes after every healthy one that is not known to
// fail.
func (o option) rank() int {
	r := int(o.know)
	if !o.healthy {
		r += int(knownGone)
	}
	return r
}

// settled is how long a chosen relay stays at least before a nearer one replaces it.
const settled = 10 * time.Second

// clearGain is by how much another relay's RTT must be less: a fifth, 5 ms, and twice how late this process wakes,
// since its measurements include that.
func clearGain(rtt, late time.Duration) time.Duration { return max(rtt/5, 5*time.Millisecond, 2*late) }

// pick chooses the relay of the best rank, and among equals the one with the least RTT over both hops. The current
// relay stays among its equals if stay is set, or unless another one is clearly better. A relay that is known not to
// have the peer is never picked.
func pick(options []option, current identity.ID, stay bool, late time.Duration) (option, bool) {
	var best, now option
	found, has := false, false
	for _, o := range options {
		if o.know == knownGone {
			continue
		}
		if o.relay == current {
			now, has = o, true
		}
		if !found || better(o, best) {
			best, found = o, true
		}
	}
	if has && now.rank() == best.rank() && (stay || best.rtt()+clearGain(now.rtt(), late) >= now.rtt()) {
		return now, true
	}
	return best, found
}

func better(a, b option) bool {
	if a.rank() != b.rank() {
		return a.rank() < b.rank()
	}
	if a.rtt() != b.rtt() {
		return a.rtt() < b.rtt()
	}
	return string(a.relay[:]) < string(b.relay[:])
}
