package agent

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/identity"
)

// A peer's next key is there beside the present one until the log has it, and gets the packets a moment after the peer
// has said that it changes.
func TestRekeys(t *testing.T) {
	const ready, followed = skeinv1.Signal_Rekey_READY, skeinv1.Signal_Rekey_FOLLOWED
	now := time.Unix(1000, 0)
	a, b := identity.ID{1}, identity.ID{2}
	k1, k2, k3 := identity.WireGuardKey{1}, identity.WireGuardKey{2}, identity.WireGuardKey{3}
	agreed := map[identity.ID]identity.WireGuardKey{a: k1, b: {9}}
	by := func(id identity.ID) (identity.WireGuardKey, bool) { k, ok := agreed[id]; return k, ok }
	var r rekeys
	taken := identity.WireGuardKey{}
	free := func(_ identity.ID, k identity.WireGuardKey) error {
		if k == taken {
			return errors.New("taken")
		}
		return nil
	}
	answered := func(led, has bool) skeinv1.Signal_Rekey_Phase {
		return r.answers(func(k dataplane.Key) (bool, bool) { return led, has && k == dataplane.Key(k2) })[a].phase
	}
	changes := func(k identity.WireGuardKey, at time.Time) bool {
		news, _ := r.change(a, k, at)
		return news
	}
	if changes(k2, now) {
		t.Error("a key that was not announced is followed")
	}
	if err := r.prepare(a, k1, k2, now); err != nil {
		t.Fatal(err)
	}
	if err := r.prepare(b, agreed[b], k2, now); err == nil {
		t.Error("two nodes have one next key")
	}
	if v := r.view(by, free, now); v[a].To != dataplane.Key(k2) || v[a].Switched || r.device(a, k1) != k1 {
		t.Errorf("prepared: %v, the device's is %v", v, r.device(a, k1))
	}
	if p := answered(false, false); p != 0 {
		t.Errorf("%s before WireGuard has the key", p)
	}
	if p, q := answered(false, true), answered(false, true); p != ready || q != 0 {
		t.Errorf("it says %s and %s, want ready once", p, q)
	}
	if err := r.prepare(a, k1, k2, now); err != nil { // the answer was lost
		t.Fatal(err)
	}
	if p := answered(false, true); p != ready {
		t.Errorf("asked again it says %s", p)
	}
	if changes(k3, now) || !changes(k2, now) || changes(k2, now) {
		t.Error("a key is news once, when it is the announced one")
	}
	if v := r.view(by, free, now); v[a].Switched || r.device(a, k1) != k1 {
		t.Errorf("before there is a session with the other device's key: %v", v)
	}
	if err := r.prepare(a, k1, k3, now.Add(time.Minute)); err == nil {
		t.Error("a peer prepares a third key before the log has the second")
	}
	if r.follow(a, k3); r.device(a, k1) != k1 {
		t.Error("a key that was not announced is followed")
	}
	r.follow(a, k2)
	if p := answered(false, true); p != 0 {
		t.Errorf("nothing is led to the key yet, and it says %s", p)
	}
	if p, q := answered(true, true), answered(true, true); p != followed || q != 0 {
		t.Errorf("it says %s and %s, want followed once", p, q)
	}
	if _, again := r.change(a, k2, now.Add(rekeyTell/4)); again || answered(true, true) != 0 {
		t.Error("told twice at once it answers twice")
	}
	if _, again := r.change(a, k2, now.Add(rekeyTell)); !again || answered(true, true) != followed { // the answer was lost
		t.Error("told again it does not answer again")
	}
	now = now.Add(2 * rekeyHold)
	if v := r.view(by, free, now); !v[a].Switched || r.device(a, k1) != k2 {
		t.Errorf("switched: %v, the device's is %v", v, r.device(a, k1))
	}
	agreed[a] = k2
	if v := r.view(by, free, now); len(v) > 0 || r.device(a, k2) != k2 {
		t.Errorf("the log has the key, and still %v", v)
	}
	if err := r.prepare(a, k2, k3, now); err != nil {
		t.Fatal(err)
	}
	if err := r.prepare(a, k2, identity.WireGuardKey{4}, now.Add(rekeyAgain/2)); err == nil {
		t.Error("a peer changes its mind as often as it likes")
	}
	if v := r.view(by, free, now.Add(rekeyHold)); len(v) > 0 {
		t.Errorf("a next key that nobody changes to stays: %v", v)
	}
	now = now.Add(rekeyHold)
	if err := r.prepare(a, k2, k3, now); err != nil || !changes(k3, now) {
		t.Fatal(err)
	}
	r.follow(a, k3)
	if taken = k3; len(r.view(by, free, now)) > 0 || r.device(a, k2) != k2 {
		t.Error("a key that the log has given to somebody else is followed")
	}
}

// The host's own change waits for the peers that are to be ready, and for the device.
func TestRekeying(t *testing.T) {
	old, err1 := identity.NewWireGuardKey()
	next, err2 := identity.NewWireGuardKey()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	keys, err := newOwnKeys(old, next)
	if err != nil || keys.settled() {
		t.Fatal(keys, err)
	}
	a, b := identity.ID{1}, identity.ID{2}
	var r rekeying
	r.came(a, skeinv1.Signal_Rekey_READY, keys.devicePublic) // nobody asked
	turned, agreed := r.begin(keys, []identity.ID{a, b})
	r.came(a, skeinv1.Signal_Rekey_READY, keys.agreedPublic)
	r.came(b, skeinv1.Signal_Rekey_FOLLOWED, keys.devicePublic)
	if left, _ := r.left(); len(left) != 2 {
		t.Errorf("ready for another key, and followed: %v are left", left)
	}
	_, changed := r.left()
	r.came(a, skeinv1.Signal_Rekey_READY, keys.devicePublic)
	select {
	case <-changed:
	default:
		t.Error("nobody hears that one is ready")
	}
	if left, _ := r.left(); !slices.Equal(left, []identity.ID{b}) {
		t.Errorf("%v are left, want b", left)
	}
	if k, _, _ := r.turning(dataplane.Key(old)); k != nil {
		t.Error("a device with the former key turns")
	}
	k, peers, has := r.turning(dataplane.Key(next))
	if k != keys || len(peers) != 2 {
		t.Fatalf("%v, %v", k, peers)
	}
	has()
	has()
	select {
	case <-turned:
	default:
		t.Error("nobody hears that the device has the key")
	}
	if k, _, _ := r.turning(dataplane.Key(next)); k != nil {
		t.Error("it turns twice")
	}
	r.expect([]identity.ID{b})
	r.came(b, skeinv1.Signal_Rekey_READY, keys.devicePublic)
	if left, _ := r.left(); len(left) != 1 {
		t.Error("a late answer is taken for that of the next step")
	}
	r.settled()
	r.settled()
	select {
	case <-agreed:
	default:
		t.Error("nobody hears that the log has the key")
	}
	r.end()
	if left, _ := r.left(); len(left) > 0 {
		t.Errorf("%v are left of a change that has ended", left)
	}
}

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
	unsettled, err := newOwnKeys(h.wg, other.wg)
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
	own, theirs := a.wg.Load().devicePublic, identity.WireGuardKey{}
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
	own, id, stranger := a.wg.Load().agreedPublic, other.key.ID(), identity.ID{7}
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
	keys, err2 := newOwnKeys(agreed, next)
	if err := errors.Join(err1, err2, identity.ReplaceWireGuard(a.cfg.StateDir, next)); err != nil {
		t.Fatal(err)
	}
	a.wg.Store(keys)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{RotateNodeKey: &skeinv1.RotateNodeKey{
		NodeId: other.key.ID().String(), WireguardKey: keys.devicePublic[:]}}})
	a.loop.state = w.state
	a.followKey(t.Context())
	now := a.wg.Load()
	if now.device == next || now.agreed != agreed || a.keyTaken(now.devicePublic) {
		t.Errorf("the device has key %s, which is taken", now.devicePublic)
	}
	again := newTestAgent(h, w.state)
	again.cfg.StateDir = a.cfg.StateDir
	if err := again.loadKeys(); err != nil {
		t.Fatal(err)
	}
	if k := again.wg.Load(); k.device != now.device || k.agreed != agreed {
		t.Error("a restart brings other keys")
	}
}
