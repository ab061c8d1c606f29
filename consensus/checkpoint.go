package consensus

import (
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// checkpointContext begins the signed text, so that no other signature of an identity key is valid for a checkpoint.
const checkpointContext = "skein checkpoint v1"

// checkpointText is the text that a server signs. The length of each field of variable length precedes it.
func checkpointText(cluster string, c *skeinv1.Checkpoint) []byte {
	var b []byte
	for _, field := range []string{checkpointContext, cluster, c.GetServer(), string(c.GetHash()), c.GetLeader()} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(field)))
		b = append(b, field...)
	}
	b = binary.BigEndian.AppendUint64(b, c.GetIndex())
	return binary.BigEndian.AppendUint64(b, uint64(c.GetTime()))
}

// signCheckpoint makes and signs a server's checkpoint of a state.
func signCheckpoint(key *identity.Key, state *events.State, leader string, now time.Time) *skeinv1.Checkpoint {
	hash := state.Hash()
	c := &skeinv1.Checkpoint{Server: key.ID().String(), Index: state.Index(), Hash: hash[:],
		Time: now.UnixNano(), Leader: leader}
	c.Signature = key.Sign(checkpointText(state.Cluster().GetId(), c))
	return c
}

// errUnsigned means that no server in this node's state has signed a checkpoint. The signer may be a server that was
// added since.
var errUnsigned = errors.New("no server that this node knows has signed the checkpoint")

// verifyCheckpoint returns the server of a state that has signed a checkpoint.
func verifyCheckpoint(state *events.State, c *skeinv1.Checkpoint) (signer identity.ID, err error) {
	signer, err = identity.ParseID(c.GetServer())
	if err != nil || signer.String() != c.GetServer() || state.Server(signer) == nil {
		return signer, fmt.Errorf("%w: it names %q", errUnsigned, c.GetServer())
	}
	key := state.Node(signer).GetIdentityKey()
	if len(c.GetHash()) != 32 || len(key) != ed25519.PublicKeySize ||
		!ed25519.Verify(key, checkpointText(state.Cluster().GetId(), c), c.GetSignature()) {
		return signer, fmt.Errorf("%w: the signature of server %s is wrong", errUnsigned, signer)
	}
	return signer, nil
}

// signer makes a server's checkpoints. All subscribers get the same one.
type signer struct {
	mu   sync.Mutex
	last *skeinv1.Checkpoint
	at   time.Time
}

// resignAfter is how old a checkpoint of the same state may be before another one is signed: less than the time between
// two heartbeats, which all subscribers get at the same moment.
const resignAfter = heartbeatEvery / 2

func (s *signer) sign(key *identity.Key, state *events.State, leader string, now time.Time) *skeinv1.Checkpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == nil || s.last.GetIndex() != state.Index() || s.last.GetLeader() != leader ||
		now.Sub(s.at) >= resignAfter {
		s.last, s.at = signCheckpoint(key, state, leader, now), now
	}
	return s.last
}
