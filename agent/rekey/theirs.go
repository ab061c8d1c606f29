package rekey

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
	"github.com/skeinmesh/skein/internal/pause"
)

const (
	waitReady    = 3 * time.Second // for peers to be ready
	proposeAgain = 2 * time.Second // until the event is asked for again
	// handshakeWait is how long a peer that hears of a change waits, at most, for the handshake that the host begins.
	// Were both to begin one, each would answer the other and drop what it is answered, and WireGuard tries again only
	// after five seconds. So the peer begins one only where the host's was lost.
	handshakeWait = time.Second
	readEvery     = 10 * time.Millisecond // between two looks at WireGuard meanwhile, and as long as a look takes
	turnWait      = 10 * time.Second      // for the device to take its key
	// keptBack is how long what the host sends meanwhile is kept back at most; 1.6 s of 10,000 packets a second fit.
	keptBack = 2 * time.Second
	queue    = 5117 // NFQUEUE
)

// Take hears from a peer about its next key, or about this host's. A node without tunnels has nothing to lead.
func (c *Changer) Take(from identity.ID, s *skeinv1.Signal_Rekey) {
	if len(s.GetKey()) != len(identity.WireGuardKey{}) || !c.host.Tunnels() {
		return
	}
	key := identity.WireGuardKey(s.GetKey())
	switch s.GetPhase() {
	case skeinv1.Signal_Rekey_PREPARE:
		m, known := c.host.Roster.Get(from)
		if !known {
			return
		}
		err := c.keyFree(from, key)
		if err == nil {
			err = c.checkNextKey(from, key, s.GetProof())
		}
		if err == nil {
			err = c.peers.prepare(from, m.WireGuard, key, time.Now())
		}
		if err != nil {
			c.host.Log.Warn("a peer's next WireGuard key is refused", "peer", c.host.Roster.Name(from), "error", err)
			return
		}
		c.host.Wake()
	case skeinv1.Signal_Rekey_SWITCHED:
		switch news, again := c.peers.change(from, key, time.Now()); {
		case news:
			go c.follow(from, key)
		case again:
			c.host.Wake()
		}
	default:
		c.own.came(from, s.GetPhase(), key)
	}
}

// follow leads a peer's addresses to its next key once there is a session with that, or after handshakeWait.
// WireGuard tells nobody of a handshake, so it is asked.
func (c *Changer) follow(id identity.ID, key identity.WireGuardKey) {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeWait)
	defer cancel()
	for {
		began := time.Now()
		read, err := c.host.Peers(ctx)
		p, _ := (*tunnels.Stats)(&read).Of(dataplane.Key(key))
		if err != nil { // its time is over, or the agent ends
			c.host.Log.Warn("a peer has changed its WireGuard key and begun no session: this host begins one",
				"peer", c.host.Roster.Name(id), "error", err)
			break
		}
		if !p.LastHandshake.IsZero() {
			break
		}
		pause.For(ctx, max(readEvery, time.Since(began)))
	}
	c.peers.follow(id, key)
	c.host.Wake()
}

// nextKeyPurpose is that of the pair's key by which a member proves that it has the next key that it names. Else it
// could name one that another member is about to change to, of which all peers hear.
func nextKeyPurpose(of identity.ID) string { return "next key of " + of.String() }

// checkNextKey verifies that a peer has the next key that it names.
func (c *Changer) checkNextKey(id identity.ID, key identity.WireGuardKey, proof []byte) error {
	want, err := identity.PairKey(c.keys.Load().Agreed, key, c.host.Cluster(), nextKeyPurpose(id))
	if err != nil {
		return err
	}
	if !hmac.Equal(want[:], proof) {
		return errors.New("it does not prove that it has the private key, or goes by a former key of this host's")
	}
	return nil
}

// keyFree refuses a key that somebody else has.
func (c *Changer) keyFree(id identity.ID, key identity.WireGuardKey) error {
	own := c.keys.Load()
	if key == own.AgreedPublic || key == own.DevicePublic {
		return errors.New("it is this host's own")
	}
	if owner := c.host.State().KeyOwner(key[:]); owner != "" && owner != id.String() {
		return fmt.Errorf("%s has it", owner)
	}
	return nil
}

// Answer tells peers what WireGuard does with their next key here, by what it has.
func (c *Changer) Answer(have map[dataplane.Key]dataplane.Peer) {
	peer := func(k dataplane.Key) (led, has bool) {
		p, has := have[k]
		return len(p.AllowedIPs) > 0, has
	}
	for id, say := range c.peers.answers(peer) {
		c.signal(c.host.Send, id, say.Phase, say.Key)
		if say.Phase == skeinv1.Signal_Rekey_FOLLOWED {
			c.signal(c.host.SendRelayed, id, say.Phase, say.Key) // the new session has carried nothing yet
		}
	}
}

func (c *Changer) signal(send func(identity.ID, *skeinv1.Signal) error, id identity.ID,
	phase skeinv1.Signal_Rekey_Phase, key identity.WireGuardKey) {
	c.send(send, id, &skeinv1.Signal_Rekey{Phase: phase, Key: key[:]})
}

func (c *Changer) send(send func(identity.ID, *skeinv1.Signal) error, id identity.ID, r *skeinv1.Signal_Rekey) {
	if err := send(id, &skeinv1.Signal{Body: &skeinv1.Signal_Rekey_{Rekey: r}}); err != nil {
		c.host.Log.Debug("signal about a key", "peer", c.host.Roster.Name(id), "phase", r.GetPhase(), "error", err)
	}
}
