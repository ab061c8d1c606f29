package agent

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// A host changes its WireGuard key while its tunnels carry packets (docs/decisions/0069). Each peer first gets the next
// key as a second WireGuard peer that no packet is led to. When all are ready, the host tells them that it changes,
// changes, and begins the handshakes. A peer leads the host's addresses to the second peer when that has a session, and
// what is under way arrives in the old session. The event about the key comes last.

const (
	rekeyWait  = 3 * time.Second        // for peers to be ready
	rekeyAgain = 500 * time.Millisecond // until a peer that has not answered is asked again
	rekeyHold  = 10 * time.Minute       // for how long a next key stands that nobody has changed to
	rekeyRetry = 2 * time.Second        // until the event is asked for again
	// rekeyAwait is how long a peer that hears of a change waits, at most, for the handshake that the host begins. Were
	// both to begin one, each would answer the other and drop what it is answered, and WireGuard tries again only after
	// five seconds. So the peer begins one only where the host's was lost.
	rekeyAwait = time.Second
	rekeyRead  = 10 * time.Millisecond  // between two looks at WireGuard meanwhile, and as long as a look takes
	rekeyTurn  = 10 * time.Second       // for the device to take its key
	rekeyHeld  = 2 * time.Second        // at most, for what the host sends meanwhile; 1.6 s of 10,000 packets a second fit
	rekeyTell  = 200 * time.Millisecond // until a peer that has not followed is told again
	rekeyQueue = 5117                   // NFQUEUE
)

// rekey is a WireGuard key that a peer changes to before the log says so.
type rekey struct {
	from, to identity.WireGuardKey // from: the log's
	heard    time.Time
	changed  bool                       // its device has the key
	switched bool                       // its addresses are led to the key
	told     skeinv1.Signal_Rekey_Phase // what the peer knows of this host
}

// rekeys are those of all peers.
type rekeys struct {
	mu    sync.Mutex
	peers map[identity.ID]rekey
}

// prepare takes a peer's next key, and refuses one that another peer has named.
func (r *rekeys) prepare(id identity.ID, from, to identity.WireGuardKey, now time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, k := range r.peers {
		if other != id && k.to == to && now.Sub(k.heard) < rekeyHold {
			return fmt.Errorf("node %s has named that key as its next one", other)
		}
	}
	k := r.peers[id]
	if k.from != from || k.to != to {
		switch {
		case k.from == from && k.changed:
			return errors.New("it has changed to another one, of which the log still has to be told")
		case now.Sub(k.heard) < rekeyAgain:
			return errors.New("it named another one a moment ago")
		}
		k = rekey{from: from, to: to}
	}
	k.heard = now
	if !k.changed {
		k.told = 0 // the answer was lost
	}
	if r.peers == nil {
		r.peers = map[identity.ID]rekey{}
	}
	r.peers[id] = k
	return nil
}

// change notes that a peer's device has its next key, and reports whether that is news. A peer that did not hear this
// host's answer is answered again.
func (r *rekeys) change(id identity.ID, to identity.WireGuardKey, now time.Time) (news, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	k, ok := r.peers[id]
	switch {
	case !ok || k.to != to:
		return false, false
	case !k.changed:
		k.changed, news = true, true
	case k.told == skeinv1.Signal_Rekey_FOLLOWED && now.Sub(k.heard) >= rekeyTell/2:
		k.told, again = skeinv1.Signal_Rekey_READY, true
	default:
		return false, false
	}
	k.heard = now
	r.peers[id] = k
	return news, again
}

// follow has a peer's addresses led to its next key.
func (r *rekeys) follow(id identity.ID, to identity.WireGuardKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k, ok := r.peers[id]; ok && k.to == to {
		k.switched = true
		r.peers[id] = k
	}
}

// view is what a projection has to know, with the keys of members by the log and the owners of keys there. What the log
// has got past is forgotten, and so is a key that it has given to somebody else.
func (r *rekeys) view(agreed func(identity.ID) (identity.WireGuardKey, bool),
	free func(identity.ID, identity.WireGuardKey) error, now time.Time) map[identity.ID]projection.Rekey {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[identity.ID]projection.Rekey
	for id, k := range r.peers {
		key, known := agreed(id)
		over := !k.changed && now.Sub(k.heard) >= rekeyHold
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
func (r *rekeys) next() map[identity.ID]identity.WireGuardKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make(map[identity.ID]identity.WireGuardKey, len(r.peers))
	for id, k := range r.peers {
		out[id] = k.to
	}
	return out
}

// device is the key of a peer's device.
func (r *rekeys) device(id identity.ID, agreed identity.WireGuardKey) identity.WireGuardKey {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k, ok := r.peers[id]; ok && k.from == agreed && k.switched {
		return k.to
	}
	return agreed
}

// answer is what a peer is to hear of its next key.
type answer struct {
	phase skeinv1.Signal_Rekey_Phase
	key   identity.WireGuardKey
}

// answers are what peers do not know yet: that WireGuard has their next key here, and whether it leads addresses there.
func (r *rekeys) answers(peer func(dataplane.Key) (led, has bool)) map[identity.ID]answer {
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

// takeRekey hears from a peer about its next key, or about this host's. A node without tunnels has nothing to lead.
func (a *Agent) takeRekey(from identity.ID, s *skeinv1.Signal_Rekey) {
	if len(s.GetKey()) != len(identity.WireGuardKey{}) || a.plane == nil {
		return
	}
	key := identity.WireGuardKey(s.GetKey())
	switch s.GetPhase() {
	case skeinv1.Signal_Rekey_PREPARE:
		m, known := a.roster.get(from)
		if !known {
			return
		}
		err := a.keyFree(from, key)
		if err == nil {
			err = a.checkNextKey(from, key, s.GetProof())
		}
		if err == nil {
			err = a.rekeys.prepare(from, m.wg, key, time.Now())
		}
		if err != nil {
			a.log.Warn("a peer's next WireGuard key is refused", "peer", a.roster.Name(from), "error", err)
			return
		}
		a.wakeUp()
	case skeinv1.Signal_Rekey_SWITCHED:
		switch news, again := a.rekeys.change(from, key, time.Now()); {
		case news:
			go a.followRekey(from, key)
		case again:
			a.wakeUp()
		}
	default:
		a.rekeying.came(from, s.GetPhase(), key)
	}
}

// followRekey leads a peer's addresses to its next key once there is a session with that, or after rekeyAwait.
// WireGuard tells nobody of a handshake, so it is asked.
func (a *Agent) followRekey(id identity.ID, key identity.WireGuardKey) {
	ctx, cancel := context.WithTimeout(context.Background(), rekeyAwait)
	defer cancel()
	for {
		began := time.Now()
		read, err := a.plane.Peers(ctx)
		p, _ := (*tunnelStats)(&read).of(dataplane.Key(key))
		if err != nil { // its time is over, or the agent ends
			a.log.Warn("a peer has changed its WireGuard key and begun no session: this host begins one",
				"peer", a.roster.Name(id), "error", err)
			break
		}
		if !p.LastHandshake.IsZero() {
			break
		}
		time.Sleep(max(rekeyRead, time.Since(began)))
	}
	a.rekeys.follow(id, key)
	a.wakeUp()
}

// nextKeyPurpose is that of the pair's key by which a member proves that it has the next key that it names. Else it
// could name one that another member is about to change to, of which all peers hear.
func nextKeyPurpose(of identity.ID) string { return "next key of " + of.String() }

// checkNextKey verifies that a peer has the next key that it names.
func (a *Agent) checkNextKey(id identity.ID, key identity.WireGuardKey, proof []byte) error {
	want, err := identity.PairKey(a.wg.Load().agreed, key, a.cluster, nextKeyPurpose(id))
	if err != nil {
		return err
	}
	if !hmac.Equal(want[:], proof) {
		return errors.New("it does not prove that it has the private key, or goes by a former key of this host's")
	}
	return nil
}

// keyFree refuses a key that somebody else has.
func (a *Agent) keyFree(id identity.ID, key identity.WireGuardKey) error {
	own := a.wg.Load()
	if key == own.agreedPublic || key == own.devicePublic {
		return errors.New("it is this host's own")
	}
	if owner := a.replica.State().KeyOwner(key[:]); owner != "" && owner != id.String() {
		return fmt.Errorf("%s has it", owner)
	}
	return nil
}

// answerRekeys tells peers what WireGuard does with their next key here.
func (a *Agent) answerRekeys() {
	peer := func(k dataplane.Key) (led, has bool) {
		p, has := a.spec.WireGuard.Peers[k]
		return len(p.AllowedIPs) > 0, has
	}
	for id, say := range a.rekeys.answers(peer) {
		a.signalRekey(a.sendSignal, id, say.phase, say.key)
		if say.phase == skeinv1.Signal_Rekey_FOLLOWED {
			a.signalRekey(a.sendSignalRelayed, id, say.phase, say.key) // the new session has carried nothing yet
		}
	}
}

func (a *Agent) signalRekey(send func(identity.ID, *skeinv1.Signal) error, id identity.ID,
	phase skeinv1.Signal_Rekey_Phase, key identity.WireGuardKey) {
	a.signalOfRekey(send, id, &skeinv1.Signal_Rekey{Phase: phase, Key: key[:]})
}

func (a *Agent) signalOfRekey(send func(identity.ID, *skeinv1.Signal) error, id identity.ID, r *skeinv1.Signal_Rekey) {
	if err := send(id, &skeinv1.Signal{Body: &skeinv1.Signal_Rekey_{Rekey: r}}); err != nil {
		a.log.Debug("signal about a key", "peer", a.roster.Name(id), "phase", r.GetPhase(), "error", err)
	}
}

// agreedKey is a member's WireGuard key by the log.
func (a *Agent) agreedKey(id identity.ID) (identity.WireGuardKey, bool) {
	m, ok := a.roster.get(id)
	return m.wg, ok
}

// deviceKey is the key of a member's device: the log's, unless the member has just changed it.
func (a *Agent) deviceKey(id identity.ID, agreed identity.WireGuardKey) dataplane.Key {
	return dataplane.Key(a.rekeys.device(id, agreed))
}
