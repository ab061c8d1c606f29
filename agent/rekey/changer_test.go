package rekey

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/api/apitest"
	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// host is node a of a cluster of two, with keys of its own, whose log other commands can change.
type host struct {
	*Changer
	t        testing.TB
	state    *events.State
	other    identity.ID
	tunnels  bool
	problems chan string
	proposed chan *skeinv1.Command
}

func newHost(t testing.TB) *host {
	t.Helper()
	st, ids := apitest.Members(t, "a", "b")
	id, err1 := identity.ParseID(ids[0])
	other, err2 := identity.ParseID(ids[1])
	dir := t.TempDir()
	_, keys, err3 := Load(dir)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	h := &host{Changer: &Changer{}, t: t, state: st, other: other, tunnels: true,
		proposed: make(chan *skeinv1.Command, 1), problems: make(chan string, 2)}
	h.Set(keys)
	h.rotate(id, keys.AgreedPublic)
	h.Attach(Host{
		ID: id, Cluster: func() identity.ClusterID { return identity.ClusterID{1} }, StateDir: dir,
		Log: slog.New(slog.DiscardHandler), Roster: roster.New(h.state),
		State: func() *events.State { return h.state }, Tunnels: func() bool { return h.tunnels },
		Peers: func(context.Context) ([]dataplane.PeerStatus, error) { return nil, nil },
		Propose: func(_ context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
			h.proposed <- c
			return nil, errors.New("no server answers")
		},
		Report: func(text, _ string) { h.problems <- text },
		Wake:   func() {}, Agreed: func() {},
	})
	return h
}

// rotate has the log take a member's key.
func (h *host) rotate(id identity.ID, key identity.WireGuardKey) {
	h.t.Helper()
	h.state = h.state.Clone()
	apitest.Decide(h.t, h.state, &skeinv1.Command{Body: &skeinv1.Command_RotateNodeKey{
		RotateNodeKey: &skeinv1.RotateNodeKey{NodeId: id.String(), WireguardKey: key[:]}}})
}

// newKey makes a key, and its public half.
func newKey(t testing.TB) (private, public identity.WireGuardKey) {
	t.Helper()
	private, err1 := identity.NewWireGuardKey()
	public, err2 := private.Public()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return private, public
}

// A host's key is changed where that breaks nothing that it could not know of.
func TestMayRotate(t *testing.T) {
	h := newHost(t)
	h.tunnels = false
	if err := h.mayRotate(false); err == nil || !strings.Contains(err.Error(), "it has no tunnels") {
		t.Errorf("a node that only relays: %v", err)
	}
	h.tunnels = true
	if err := h.mayRotate(false); err != nil {
		t.Error(err)
	}
	next, _ := newKey(t)
	unsettled, err := NewKeys(h.Keys().Agreed, next)
	if err != nil {
		t.Fatal(err)
	}
	h.Set(unsettled)
	if err := h.mayRotate(true); err == nil || !strings.Contains(err.Error(), "still to be told") {
		t.Errorf("in the middle of another change: %v", err)
	}
}

// Keys that somebody has are no next keys.
func TestKeysOfOthers(t *testing.T) {
	h := newHost(t)
	theirs, stranger := identity.WireGuardKey{}, identity.ID{7}
	copy(theirs[:], h.state.Node(h.other).GetWireguardKey())
	for _, c := range []struct {
		what string
		id   identity.ID
		key  identity.WireGuardKey
		free bool
	}{
		{"this host's", stranger, h.Keys().DevicePublic, false},
		{"another member's", stranger, theirs, false},
		{"its own", h.other, theirs, true},
		{"nobody's", stranger, identity.WireGuardKey{1, 2, 3}, true},
	} {
		if err := h.keyFree(c.id, c.key); (err == nil) != c.free {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// Who names a next key has its private half: the key that another one is about to change to is of no use.
func TestNextKeysAreProven(t *testing.T) {
	h := newHost(t)
	next, public := newKey(t)
	others, _ := newKey(t)
	proof := func(private, to identity.WireGuardKey, of identity.ID) []byte {
		k, err := identity.PairKey(private, to, h.host.Cluster(), nextKeyPurpose(of))
		if err != nil {
			t.Fatal(err)
		}
		return k[:]
	}
	own, id, stranger := h.Keys().AgreedPublic, h.other, identity.ID{7}
	for _, c := range []struct {
		what  string
		proof []byte
		ok    bool
	}{
		{"a proof", proof(next, own, id), true},
		{"none", nil, false},
		{"another one's proof", proof(next, own, stranger), false},
		{"a proof by another key", proof(others, own, id), false},
		{"a proof for another host", proof(next, public, id), false},
	} {
		if err := h.checkNextKey(id, public, c.proof); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// A next key that somebody else was quicker to have in the log is replaced by one that nobody has heard of, and the key
// that the log has stays the agreed one, after a restart, too.
func TestATakenKeyIsReplaced(t *testing.T) {
	h := newHost(t)
	agreed := h.Keys().Agreed
	next, public := newKey(t)
	keys, err := NewKeys(agreed, next)
	if err := errors.Join(err, identity.ReplaceWireGuard(h.host.StateDir, next)); err != nil {
		t.Fatal(err)
	}
	h.Set(keys)
	h.rotate(h.other, public)
	h.Follow(t.Context(), h.state)
	now := h.Keys()
	if now.Device == next || now.Agreed != agreed || h.takenBy(h.state, now.DevicePublic) != "" {
		t.Errorf("the device has key %s, which is taken", now.DevicePublic)
	}
	if _, again, err := Load(h.host.StateDir); err != nil || again.Device != now.Device || again.Agreed != agreed {
		t.Errorf("a restart brings other keys: %v", err)
	}
}

// A change whose event failed is told to the log again, and it ends when the log has the key.
func TestTheLogIsToldOfTheKey(t *testing.T) {
	h := newHost(t)
	next, public := newKey(t)
	keys, err := NewKeys(h.Keys().Agreed, next)
	if err != nil {
		t.Fatal(err)
	}
	h.Set(keys)
	h.Follow(t.Context(), h.state)
	c := <-h.proposed
	if r := c.GetRotateNodeKey(); r.GetNodeId() != h.host.ID.String() || string(r.GetWireguardKey()) != string(public[:]) {
		t.Fatalf("proposed is %v", c)
	}
	if text := <-h.problems; !strings.Contains(text, "no server answers") {
		t.Errorf("the problem is %q", text)
	}
	h.rotate(h.host.ID, public)
	h.Follow(t.Context(), h.state)
	if !h.Keys().Settled() || h.Keys().Agreed != next {
		t.Error("the agreed key is not the device's")
	}
	if text := <-h.problems; text != "" {
		t.Errorf("the problem stays: %q", text)
	}
}
