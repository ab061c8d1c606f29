package rekey

import (
	"errors"
	"slices"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
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
	var r peers
	taken := identity.WireGuardKey{}
	free := func(_ identity.ID, k identity.WireGuardKey) error {
		if k == taken {
			return errors.New("taken")
		}
		return nil
	}
	answered := func(led, has bool) skeinv1.Signal_Rekey_Phase {
		return r.answers(func(k dataplane.Key) (bool, bool) { return led, has && k == dataplane.Key(k2) })[a].Phase
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
	if v := r.view(by, free, now); v[a].To != dataplane.Key(k2) || v[a].Switched || r.deviceKey(a, k1) != k1 {
		t.Errorf("prepared: %v, the device's is %v", v, r.deviceKey(a, k1))
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
	if v := r.view(by, free, now); v[a].Switched || r.deviceKey(a, k1) != k1 {
		t.Errorf("before there is a session with the other device's key: %v", v)
	}
	if err := r.prepare(a, k1, k3, now.Add(time.Minute)); err == nil {
		t.Error("a peer prepares a third key before the log has the second")
	}
	if r.follow(a, k3); r.deviceKey(a, k1) != k1 {
		t.Error("a key that was not announced is followed")
	}
	r.follow(a, k2)
	if p := answered(false, true); p != 0 {
		t.Errorf("nothing is led to the key yet, and it says %s", p)
	}
	if p, q := answered(true, true), answered(true, true); p != followed || q != 0 {
		t.Errorf("it says %s and %s, want followed once", p, q)
	}
	if _, again := r.change(a, k2, now.Add(tellAgain/4)); again || answered(true, true) != 0 {
		t.Error("told twice at once it answers twice")
	}
	if _, again := r.change(a, k2, now.Add(tellAgain)); !again || answered(true, true) != followed { // the answer was lost
		t.Error("told again it does not answer again")
	}
	now = now.Add(2 * hold)
	if v := r.view(by, free, now); !v[a].Switched || r.deviceKey(a, k1) != k2 {
		t.Errorf("switched: %v, the device's is %v", v, r.deviceKey(a, k1))
	}
	agreed[a] = k2
	if v := r.view(by, free, now); len(v) > 0 || r.deviceKey(a, k2) != k2 {
		t.Errorf("the log has the key, and still %v", v)
	}
	if err := r.prepare(a, k2, k3, now); err != nil {
		t.Fatal(err)
	}
	if err := r.prepare(a, k2, identity.WireGuardKey{4}, now.Add(askAgain/2)); err == nil {
		t.Error("a peer changes its mind as often as it likes")
	}
	if v := r.view(by, free, now.Add(hold)); len(v) > 0 {
		t.Errorf("a next key that nobody changes to stays: %v", v)
	}
	now = now.Add(hold)
	if err := r.prepare(a, k2, k3, now); err != nil || !changes(k3, now) {
		t.Fatal(err)
	}
	r.follow(a, k3)
	if taken = k3; len(r.view(by, free, now)) > 0 || r.deviceKey(a, k2) != k2 {
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
	keys, err := NewKeys(old, next)
	if err != nil || keys.Settled() {
		t.Fatal(keys, err)
	}
	a, b := identity.ID{1}, identity.ID{2}
	var r own
	r.came(a, skeinv1.Signal_Rekey_READY, keys.DevicePublic) // nobody asked
	turned, agreed := r.begin(keys, []identity.ID{a, b})
	r.came(a, skeinv1.Signal_Rekey_READY, keys.AgreedPublic)
	r.came(b, skeinv1.Signal_Rekey_FOLLOWED, keys.DevicePublic)
	if left, _ := r.left(); len(left) != 2 {
		t.Errorf("ready for another key, and followed: %v are left", left)
	}
	_, changed := r.left()
	r.came(a, skeinv1.Signal_Rekey_READY, keys.DevicePublic)
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
	r.came(b, skeinv1.Signal_Rekey_READY, keys.DevicePublic)
	if left, _ := r.left(); len(left) != 1 {
		t.Error("a late answer is taken for that of the next step")
	}
	r.agree()
	r.agree()
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
