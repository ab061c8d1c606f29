// Package rekey changes WireGuard keys while packets go on: this host's own, and it follows those of its peers.
//
// A host changes its key while its tunnels carry packets (docs/decisions/0069). Each peer first gets the next key as a
// second WireGuard peer that no packet is led to. When all are ready, the host tells them that it changes, changes, and
// begins the handshakes. A peer leads the host's addresses to the second peer when that has a session, and what is
// under way arrives in the old session. The event about the key comes last.
package rekey

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

const (
	askAgain  = 500 * time.Millisecond // after which a peer that has not answered is asked again
	tellAgain = 200 * time.Millisecond // after which a peer that has not followed is told again
	hold      = 10 * time.Minute       // for how long a next key stands that nobody has changed to
)

// own is this host's own change of its key: one at a time.
type own struct {
	one sync.Mutex // held by the request

	mu      sync.Mutex
	keys    *Keys // nil: no change is under way
	peers   []identity.ID
	phase   skeinv1.Signal_Rekey_Phase // that peers are to come to
	waits   map[identity.ID]bool       // for these
	changed chan struct{}              // closed when one is
	turned  chan struct{}              // closed when the device has the key; nil: it has
	agreed  chan struct{}              // closed when the log that this host knows has the key; nil: it has

	// telling is true while the log is asked to take the device's key, and a moment longer.
	telling atomic.Bool
}

// begin waits for peers to be ready for a key. turned is closed when the device has it, agreed when the log has.
func (r *own) begin(keys *Keys, peers []identity.ID) (turned, agreed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.peers, r.waits = keys, peers, make(map[identity.ID]bool, len(peers))
	r.changed, r.turned, r.phase = make(chan struct{}), make(chan struct{}), skeinv1.Signal_Rekey_READY
	r.agreed = make(chan struct{})
	for _, id := range peers {
		r.waits[id] = true
	}
	return r.turned, r.agreed
}

// agree notes that the log has the device's key.
func (r *own) agree() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.agreed != nil {
		close(r.agreed)
		r.agreed = nil
	}
}

// expect waits for peers once more.
func (r *own) expect(peers []identity.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.phase = skeinv1.Signal_Rekey_FOLLOWED
	clear(r.waits)
	for _, id := range peers {
		r.waits[id] = true
	}
}

// active reports whether a request is at it.
func (r *own) active() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keys != nil
}

// end forgets the change.
func (r *own) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys, r.peers, r.waits, r.agreed = nil, nil, nil, nil
}

// came notes how far a peer is with a key of this host's.
func (r *own) came(id identity.ID, phase skeinv1.Signal_Rekey_Phase, key identity.WireGuardKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waits[id] && phase == r.phase && r.keys.DevicePublic == key {
		delete(r.waits, id)
		close(r.changed)
		r.changed = make(chan struct{})
	}
}

// left are the peers that are waited for, and a channel that is closed when there is one less.
func (r *own) left() ([]identity.ID, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.waits)), r.changed
}

// turning is the change that a device goes through which gets a private key; nil: none. has is called when it has it.
func (r *own) turning(private dataplane.Key) (keys *Keys, peers []identity.ID, has func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys == nil || r.turned == nil || dataplane.Key(r.keys.Device) != private {
		return nil, nil, nil
	}
	return r.keys, r.peers, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.turned != nil {
			close(r.turned)
			r.turned = nil
		}
	}
}

// change is a WireGuard key that a peer changes to before the log says so.
type change struct {
	from, to identity.WireGuardKey // from: the log's
	heard    time.Time
	changed  bool                       // its device has the key
	switched bool                       // its addresses are led to the key
	told     skeinv1.Signal_Rekey_Phase // what the peer knows of this host
}

// peers are the changes of all peers.
type peers struct {
	mu    sync.Mutex
	peers map[identity.ID]change
}

// prepare takes a peer's next key, and refuses one that another peer has named.
func (r *peers) prepare(id identity.ID, from, to identity.WireGuardKey, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, k := range r.peers {
		if other != id && k.to == to && now.Sub(k.heard) < hold {
			return fmt.Errorf("node %s has named that key as its next one", other)
		}
	}
	k := r.peers[id]
	if k.from != from || k.to != to {
		switch {
		case k.from == from && k.changed:
			return errors.New("it has changed to another one, of which the log still has to be told")
		case now.Sub(k.heard) < askAgain:
			return errors.New("it named another one a moment ago")
		}
		k = change{from: from, to: to}
	}
	k.heard = now
	if !k.changed {
		k.told = 0 // the answer was lost
	}
	if r.peers == nil {
		r.peers = map[identity.ID]change{}
	}
	r.peers[id] = k
	return nil
}

// change notes that a peer's device has its next key, and reports whether that is news. A peer that did not hear this
// host's answer is answered again.
func (r *peers) change(id identity.ID, to identity.WireGuardKey, now time.Time) (news, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.peers[id]
	switch {
	case !ok || k.to != to:
		return false, false
	case !k.changed:
		k.changed, news = true, true
	case k.told == skeinv1.Signal_Rekey_FOLLOWED && now.Sub(k.heard) >= tellAgain/2:
		k.told, again = skeinv1.Signal_Rekey_READY, true
	default:
		return false, false
	}
	k.heard = now
	r.peers[id] = k
	return news, again
}

// follow has a peer's addresses led to its next key.
func (r *peers) follow(id identity.ID, to identity.WireGuardKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k, ok := r.peers[id]; ok && k.to == to {
		k.switched = true
		r.peers[id] = k
	}
}

// view is what a projection has to know, with the keys of members by the log and the owners of keys there. What the log
// has got past is forgotten, and so is a key that it has given to somebody else.
func (r *peers) view(agreed func(identity.ID) (identity.WireGuardKey, bool),
	free func(identity.ID, identity.WireGuardKey) error, now time.Time) map[identity.ID]projection.Rekey {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[identity.ID]projection.Rekey
	for id, k := range r.peers {
		key, known := agreed(id)
		over := !k.changed && now.Sub(k.heard) >= hold
		if !known || key != k.from || over || free(id, k.to) != nil {
			delete(r.peers, id)
			continue
		}
		if out == nil {
			out = map[identity.ID]projection.Rekey{}
		}
		out[id] = projection.Rekey{To: dataplane.Key(k.to), Switched: k.switched}
	}
	return out
}

// next are the keys that peers change to.
func (r *peers) next() map[identity.ID]identity.WireGuardKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[identity.ID]identity.WireGuardKey, len(r.peers))
	for id, k := range r.peers {
		out[id] = k.to
	}
	return out
}

// deviceKey is the key of a peer's device.
func (r *peers) deviceKey(id identity.ID, agreed identity.WireGuardKey) identity.WireGuardKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k, ok := r.peers[id]; ok && k.from == agreed && k.switched {
		return k.to
	}
	return agreed
}

// answer is what a peer is to hear of its next key.
type answer struct {
	Phase skeinv1.Signal_Rekey_Phase
	Key   identity.WireGuardKey
}

// answers are what peers do not know yet: that WireGuard has their next key here, and whether it leads addresses there.
func (r *peers) answers(peer func(dataplane.Key) (led, has bool)) map[identity.ID]answer {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[identity.ID]answer
	for id, k := range r.peers {
		led, has := peer(dataplane.Key(k.to))
		phase := k.told
		switch {
		case led && k.switched:
			phase = skeinv1.Signal_Rekey_FOLLOWED
		case has && k.told == 0:
			phase = skeinv1.Signal_Rekey_READY
		}
		if phase == k.told {
			continue
		}
		if out == nil {
			out = map[identity.ID]answer{}
		}
		k.told = phase
		r.peers[id], out[id] = k, answer{phase, k.to}
	}
	return out
}
