package agent

import (
	"errors"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/rekey"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/identity"
)

// A host's key is changed where that breaks nothing that it could not know of.
func TestMayRekey(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h, other)
	r := newReplica(t, w)
	a := newTestAgent(h, w.state)
	a.replica = r
	if err := a.mayRekey(false); err == nil || !strings.Contains(err.Error(), "it has no tunnels") {
		t.Errorf("a node that only relays: %v", err)
	}
	a.plane = &plane.Plane{}
	if err := a.mayRekey(false); err != nil {
		t.Error(err)
	}
	unsettled, err := rekey.NewKeys(h.wg, other.wg)
	if err != nil {
		t.Fatal(err)
	}
	a.wg.Store(unsettled)
	if err := a.mayRekey(true); err == nil || !strings.Contains(err.Error(), "still to be told") {
		t.Errorf("in the middle of another change: %v", err)
	}
}

// Keys that somebody has are no next keys.
func TestKeysOfOthers(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h, other)
	a := newTestAgent(h, w.state)
	a.replica = newReplica(t, w)
	own, theirs := a.wg.Load().DevicePublic, identity.WireGuardKey{}
	copy(theirs[:], w.state.Node(other.key.ID()).GetWireguardKey())
	stranger := identity.ID{7}
	for _, c := range []struct {
		what string
		id   identity.ID
		key  identity.WireGuardKey
		free bool
	}{
		{"this host's", stranger, own, false},
		{"another member's", stranger, theirs, false},
		{"its own", other.key.ID(), theirs, true},
		{"nobody's", stranger, identity.WireGuardKey{1, 2, 3}, true},
	} {
		if err := a.keyFree(c.id, c.key); (err == nil) != c.free {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// Who names a next key has its private half: the key that another one is about to change to is of no use.
func TestNextKeysAreProven(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	a := newTestAgent(h, newWorld(t, h, other).state)
	next, err1 := identity.NewWireGuardKey()
	public, err2 := next.Public()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	proof := func(private identity.WireGuardKey, to identity.WireGuardKey, of identity.ID) []byte {
		k, err := identity.PairKey(private, to, a.cluster, nextKeyPurpose(of))
		if err != nil {
			t.Fatal(err)
		}
		return k[:]
	}
	own, id, stranger := a.wg.Load().AgreedPublic, other.key.ID(), identity.ID{7}
	for _, c := range []struct {
		what  string
		proof []byte
		ok    bool
	}{
		{"a proof", proof(next, own, id), true},
		{"none", nil, false},
		{"another one's proof", proof(next, own, stranger), false},
		{"a proof by another key", proof(other.wg, own, id), false},
		{"a proof for another host", proof(next, public, id), false},
	} {
		if err := a.checkNextKey(id, public, c.proof); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// A next key that somebody else was quicker to have in the log is replaced by one that nobody has heard of, and the key
// that the log has stays the agreed one, after a restart, too.
func TestATakenKeyIsReplaced(t *testing.T) {
	h, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, h, other)
	a := newTestAgent(h, w.state)
	a.cfg.StateDir = t.TempDir()
	_, agreed, err := identity.LoadOrCreate(a.cfg.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	next, err1 := identity.NewWireGuardKey()
	keys, err2 := rekey.NewKeys(agreed, next)
	if err := errors.Join(err1, err2, identity.ReplaceWireGuard(a.cfg.StateDir, next)); err != nil {
		t.Fatal(err)
	}
	a.wg.Store(keys)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{
		NodeId: other.key.ID().String(), WireguardKey: keys.DevicePublic[:]}}})
	a.loop.state = w.state
	a.followKey(t.Context())
	now := a.wg.Load()
	if now.Device == next || now.Agreed != agreed || a.keyTaken(now.DevicePublic) {
		t.Errorf("the device has key %s, which is taken", now.DevicePublic)
	}
	again := newTestAgent(h, w.state)
	again.cfg.StateDir = a.cfg.StateDir
	if err := again.loadKeys(); err != nil {
		t.Fatal(err)
	}
	if k := again.wg.Load(); k.Device != now.Device || k.Agreed != agreed {
		t.Error("a restart brings other keys")
	}
}
