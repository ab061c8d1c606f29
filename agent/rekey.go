package agent

import (
	"context"
	"crypto/hmac"
	"errors"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

const (
	rekeyWait  = 3 * time.Second // for peers to be ready
	rekeyRetry = 2 * time.Second // until the event is asked for again
	// rekeyAwait is how long a peer that hears of a change waits, at most, for the handshake that the host begins. Were
	// both to begin one, each would answer the other and drop what it is answered, and WireGuard tries again only after
	// five seconds. So the peer begins one only where the host's was lost.
	rekeyAwait = time.Second
	rekeyRead  = 10 * time.Millisecond // between two looks at WireGuard meanwhile, and as long as a look takes
	rekeyTurn  = 10 * time.Second      // for the device to take its key
	rekeyHeld  = 2 * time.Second       // at most, for what the host sends meanwhile; 1.6 s of 10,000 packets a second fit
	rekeyQueue = 5117                  // NFQUEUE
)

// takeRekey hears from a peer about its next key, or about this host's. A node without tunnels has nothing to lead.
func (a *Agent) takeRekey(from identity.ID, s *skeinv1.Signal_Rekey) {
	if len(s.GetKey()) != len(identity.WireGuardKey{}) || a.plane == nil {
		return
	}
	key := identity.WireGuardKey(s.GetKey())
	switch s.GetPhase() {
	case skeinv1.Signal_Rekey_PREPARE:
		m, known := a.roster.Get(from)
		if !known {
			return
		}
		err := a.keyFree(from, key)
		if err == nil {
			err = a.checkNextKey(from, key, s.GetProof())
		}
		if err == nil {
			err = a.rekeys.Prepare(from, m.WireGuard, key, time.Now())
		}
		if err != nil {
			a.log.Warn("a peer's next WireGuard key is refused", "peer", a.roster.Name(from), "error", err)
			return
		}
		a.wakeUp()
	case skeinv1.Signal_Rekey_SWITCHED:
		switch news, again := a.rekeys.Change(from, key, time.Now()); {
		case news:
			go a.followRekey(from, key)
		case again:
			a.wakeUp()
		}
	default:
		a.rekeying.Came(from, s.GetPhase(), key)
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
		p, _ := (*tunnels.Stats)(&read).Of(dataplane.Key(key))
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
	a.rekeys.Follow(id, key)
	a.wakeUp()
}

// nextKeyPurpose is that of the pair's key by which a member proves that it has the next key that it names. Else it
// could name one that another member is about to change to, of which all peers hear.
func nextKeyPurpose(of identity.ID) string { return "next key of " + of.String() }

// checkNextKey verifies that a peer has the next key that it names.
func (a *Agent) checkNextKey(id identity.ID, key identity.WireGuardKey, proof []byte) error {
	want, err := identity.PairKey(a.wg.Load().Agreed, key, a.cluster, nextKeyPurpose(id))
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
	if key == own.AgreedPublic || key == own.DevicePublic {
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
	for id, say := range a.rekeys.Answers(peer) {
		a.signalRekey(a.sendSignal, id, say.Phase, say.Key)
		if say.Phase == skeinv1.Signal_Rekey_FOLLOWED {
			a.signalRekey(a.sendSignalRelayed, id, say.Phase, say.Key) // the new session has carried nothing yet
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
	m, ok := a.roster.Get(id)
	return m.WireGuard, ok
}

// deviceKey is the key of a member's device: the log's, unless the member has just changed it.
func (a *Agent) deviceKey(id identity.ID, agreed identity.WireGuardKey) dataplane.Key {
	return dataplane.Key(a.rekeys.DeviceKey(id, agreed))
}
