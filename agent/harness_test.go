package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/rekey"
	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testenv"
	"github.com/skeinmesh/skein/relay/client"
)

// host is what a member has on its disk.
type host struct {
	name string
	key  *identity.Key
	wg   identity.WireGuardKey
}

func newHost(t testing.TB, name string) host {
	t.Helper()
	key, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	wg, err := identity.NewWireGuardKey()
	if err != nil {
		t.Fatal(err)
	}
	return host{name, key, wg}
}

func (h host) node(t testing.TB) *skeinv1.NewNode {
	t.Helper()
	pub, err := h.wg.Public()
	if err != nil {
		t.Fatal(err)
	}
	return &skeinv1.NewNode{Name: h.name, IdentityKey: h.key.Public(), WireguardKey: pub[:], MinSchema: events.SchemaMin,
		MaxSchema: events.SchemaMax}
}

// world is a cluster whose log is decided by hand, at times of the test's choosing.
type world struct {
	t     testing.TB
	now   time.Time // the leader's clock
	state *events.State
	log   []*skeinv1.Event
}

const testCluster = "000102030405060708090a0b0c0d0e0f"

func testToken() *skeinv1.JoinToken {
	return &skeinv1.JoinToken{
		ClusterId: testCluster, TokenId: "0f1e2d3c4b5a6978", Secret: bytes.Repeat([]byte{7}, 32),
		Seeds: []*skeinv1.JoinToken_Seed{{Address: "203.0.113.7:7443", IdentityKey: bytes.Repeat([]byte{9}, 32)}},
	}
}

var (
	testSecret  = bytes.Repeat([]byte{7}, 32)
	testTokenID = "0f1e2d3c4b5a6978"
)

// newWorld is a cluster with these members and a token for an hour.
func newWorld(t testing.TB, members ...host) *world {
	t.Helper()
	w := &world{t: t, now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), state: events.NewState()}
	first := members[0].node(t)
	first.Server = true
	w.must(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: testCluster, OverlayIpv4: "10.4.0.0/16", FirstNode: first}}})
	hash := sha256.Sum256(testSecret)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: testTokenID,
		SecretHash: hash[:], LifetimeNanos: int64(time.Hour), Uses: 100}}})
	for _, h := range members[1:] {
		w.must(w.admission(h))
	}
	return w
}

func (w *world) admission(h host) *skeinv1.Command {
	hash := sha256.Sum256(testSecret)
	return &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{Node: h.node(w.t),
		TokenId: testTokenID, TokenSecretHash: hash[:], ClusterId: testCluster}}}
}

func (w *world) decide(c *skeinv1.Command) error {
	c.Time, c.Entropy = w.now.UnixNano(), bytes.Repeat([]byte{byte(w.state.Index() + 1)}, 64)
	evs, _, err := events.Decide(w.state, c)
	if err != nil {
		return err
	}
	next := w.state.Clone()
	for _, e := range evs {
		if err := next.Fold(e); err != nil {
			return err
		}
	}
	w.state, w.log = next, append(w.log, evs...)
	return nil
}

func (w *world) must(c *skeinv1.Command) {
	w.t.Helper()
	if err := w.decide(c); err != nil {
		w.t.Fatal(err)
	}
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// withGossip gives a test agent its place in a mesh of which it is the only host: gossip, and a pool of relays.
// Everything ends with the function that is returned.
func (a *Agent) withGossip(t *testing.T, key *identity.Key, state *events.State) (end func()) {
	t.Helper()
	a.loop.state = state
	a.pool = client.NewPool(client.PoolConfig{Self: a.id, Key: key, Log: quiet()})
	none := nowhere{make(chan struct{})}
	var err error
	a.gossip, err = gossip.Start(gossip.Config{
		Self: a.id, Key: key, Roster: a.roster, Transport: none, Streams: none, Packets: make(chan gossip.Packet),
		Keys: state.GossipKeys(), Log: quiet(), Epoch: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		a.gossip.Close()
		a.pool.Close()
	}
}

// newTestAgent is an agent that nothing has been started of.
func newTestAgent(h host, st *events.State) *Agent {
	a := &Agent{
		log: quiet(), started: time.Now(), wake: make(chan struct{}, 1),
		settingUp:  settingUp{cfg: config.Default()},
		identities: identities{key: h.key, id: h.key.ID()},
		mesh:       mesh{roster: roster.New(st)},
		telling:    telling{problems: newProblems()},
	}
	a.cfg.Name = h.name
	own, err := rekey.NewKeys(h.wg, h.wg)
	if err != nil {
		panic(err)
	}
	a.keys.Set(own)
	return a
}

// needMark asks for what dialing a seed needs: marked sockets.
func needMark(t testing.TB) {
	t.Helper()
	testenv.NeedRoot(t)
}

// newReplica holds a world's state, on disk.
func newReplica(t testing.TB, w *world) *consensus.Replica {
	t.Helper()
	r, err := consensus.OpenReplica(t.TempDir(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	if err := r.Reset(w.state.Proto()); err != nil {
		t.Fatal(err)
	}
	return r
}

// serveAdmission opens the port for relay sessions and joins until the test ends, and returns where.
func serveAdmission(t *testing.T, key *identity.Key, r *roster.Roster, handlers admission.Handlers) string {
	t.Helper()
	l, err := admission.Listen(admission.Config{Key: key, Member: r.Key, Address: "127.0.0.1:0", Handlers: handlers,
		Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go l.Serve(ctx)
	t.Cleanup(func() { cancel(); <-l.Done() })
	return l.Addr().String()
}
