package egress

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/announce"
	"github.com/skeinmesh/skein/dataplane/egressns"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testenv"
)

// gate is a gateway's host, with an egress whose one slot is the gateway's, and a leader that grants everything.
// Agents run there one after the other.
type gate struct {
	t         *testing.T
	dir       string
	ref       Ref
	state     *events.State
	gw, other identity.ID
	n         byte
	clocks    Clocks
}

// witness is another machine's clock.
type witness struct {
	id    identity.ID
	began time.Time
	read  chan struct{}
}

func (w *witness) Read(context.Context) Readings {
	select {
	case w.read <- struct{}{}:
	default:
	}
	return Readings{w.id: {"boot", time.Since(w.began)}}
}

// alone repeats a test in a process with its own network and mount namespaces, and reports whether this is that
// process: gateways write rules and links in the present namespace, from many threads.
func alone(t *testing.T) bool {
	t.Helper()
	const inside = "SKEIN_TEST_ALONE"
	if os.Getenv(inside) == t.Name() {
		return true
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=140s")
	c.Env = append(os.Environ(), inside+"="+t.Name())
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS}
	out, err := c.CombinedOutput()
	t.Logf("in namespaces of its own:\n%s", out)
	switch {
	case errors.Is(err, os.ErrPermission):
		testenv.Missing(t, "making namespaces: "+err.Error())
	case err != nil:
		t.Error(err)
	case !strings.Contains(string(out), "--- PASS: "+t.Name()):
		t.Error("it did not run")
	}
	return false
}

func newGate(t *testing.T, lease uint32) *gate {
	g := &gate{t: t, dir: t.TempDir(), ref: Ref{"out", "x"}, state: events.NewState()}
	one, two := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{3}, 32)
	g.gw, g.other = identity.IDOf(one), identity.IDOf(two)
	g.clocks = &witness{id: g.other, began: time.Now(), read: make(chan struct{}, 1)}
	labels := map[string]string{"egress": "yes"}
	const cluster, token = "00112233445566778899aabbccddeeff", "0011223344556677"
	secret := bytes.Repeat([]byte{9}, 32)
	node := func(name string, key []byte, wireguard byte) *skeinv1.NewNode {
		return &skeinv1.NewNode{Name: name, Labels: labels, IdentityKey: key,
			WireguardKey: bytes.Repeat([]byte{wireguard}, 32), Server: wireguard == 2,
			MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
	}
	for _, c := range []*skeinv1.Command{
		{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{ClusterId: cluster,
			OverlayIpv4: "10.4.0.0/16", FirstNode: node("a", one, 2)}}},
		{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{Id: token, SecretHash: secret,
			LifetimeNanos: int64(time.Hour), Uses: 1}}},
		{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{TokenId: token, TokenSecretHash: secret,
			ClusterId: cluster, Node: node("b", two, 4)}}},
		{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: &skeinv1.Pool{Name: "default",
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.100.0.0/24"}}, BlockSizeBits: 3}}}},
		{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{
			Egress: &skeinv1.Egress{Namespace: g.ref.Namespace, Name: g.ref.Name,
				Destinations: []string{"192.0.2.0/24"}, Gateways: labels, Replicas: 1, LeaseMillis: lease}}}},
	} {
		g.do(c)
	}
	g.assign(g.gw)
	t.Cleanup(func() {
		files, _ := egressns.Files(g.netns())
		for _, f := range files {
			if err := egressns.Remove(f); err != nil {
				t.Error(err)
			}
		}
	})
	return g
}

func (g *gate) do(c *skeinv1.Command) {
	g.t.Helper()
	g.n++
	c.Time, c.Entropy = int64(time.Hour)*24*365*56+int64(g.n), bytes.Repeat([]byte{g.n}, 64)
	evs, _, err := events.Decide(g.state, c)
	if err != nil {
		g.t.Fatal(err)
	}
	g.state = g.state.Clone()
	for _, e := range evs {
		if err := g.state.Fold(e); err != nil {
			g.t.Fatal(err)
		}
	}
}

func (g *gate) assign(to identity.ID) {
	g.t.Helper()
	g.do(&skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: g.ref.Namespace,
		Name: g.ref.Name, NodeId: to.String(),
		Epoch: g.state.Slot(g.ref.Namespace, g.ref.Name, 0).GetEpoch()}}})
}

func (g *gate) netns() string { return filepath.Join(g.dir, "netns") }

// live runs an agent's gateways while f runs.
func (g *gate) live(f func(*Gateways, *generous)) {
	g.t.Helper()
	l := &generous{t: g.t, said: make(chan struct{}, 1), gave: make(chan struct{}, 1)}
	ctx, stop := context.WithCancel(g.t.Context())
	done := make(chan struct{})
	gs := NewGateways(GatewaysConfig{Self: g.gw, Dir: g.netns(), Known: filepath.Join(g.dir, "known"),
		Driver: "userspace", Tunnel: "skein0", Leader: l, Clocks: g.clocks,
		TakeOver: func(context.Context, identity.ID, *skeinv1.TakeOverRequest) (*skeinv1.TakeOverResponse, error) {
			return &skeinv1.TakeOverResponse{}, nil
		},
		Links: func() []announce.Link { return nil }, Journal: func(*skeinv1.SlotHeld) {}, Changed: func() {},
		Log: slog.New(slog.DiscardHandler)})
	go func() { defer close(done); gs.Run(ctx) }()
	defer func() { stop(); <-done }() // also when f fails the test
	f(gs, l)
}

// generous grants every request, unless it is mute, and checks the kernel when a gateway reports that it has stopped.
type generous struct {
	t          *testing.T
	said, gave chan struct{}

	mu       sync.Mutex
	mute     bool
	released []*skeinv1.SlotRef
	heard    func(*skeinv1.RenewLeasesRequest)
}

func (l *generous) RenewLeases(_ context.Context, r *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.heard != nil {
		l.heard(r)
	}
	a := &skeinv1.RenewLeasesResponse{Released: r.GetReleased()}
	note := func(c chan struct{}) {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	if len(r.GetReleased()) > 0 {
		l.released = append(l.released, r.GetReleased()...)
		note(l.said)
	}
	if l.mute {
		return a, nil
	}
	for _, w := range r.GetWishes() {
		a.Granted = append(a.Granted, w.GetSlot())
		note(l.gave)
	}
	return a, nil
}

func within(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(time.Minute):
		t.Fatalf("not within a minute: %s", what)
	}
}

// lives is how long the kernel will continue to forward for the slot; 0: not at all.
func (g *gate) lives() time.Duration {
	g.t.Helper()
	left, err := g.expires()
	if err != nil {
		g.t.Error(err)
	}
	return left
}

func (g *gate) expires() (time.Duration, error) {
	files, err := egressns.Files(g.netns())
	if err != nil || len(files) != 1 {
		return 0, fmt.Errorf("namespaces %v, %w", files, err)
	}
	f, err := os.Open(files[0])
	if err != nil {
		return 0, err
	}
	defer f.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(f.Fd())))
	if err != nil {
		return 0, err
	}
	table := &nftables.Table{Name: "skein", Family: nftables.TableFamilyINet}
	granted, err := c.GetSetElements(&nftables.Set{Table: table, Name: egressns.MapGranted})
	if err != nil {
		return 0, err
	}
	tickets, err := c.GetSetElements(&nftables.Set{Table: table, Name: egressns.SetTickets})
	if err != nil {
		return 0, err
	}
	for _, g := range granted {
		for _, t := range tickets {
			if bytes.Equal(g.Val, t.Key) {
				return t.Expires, nil
			}
		}
	}
	return 0, nil
}

// forward waits until an agent has a ticket and the kernel forwards.
func (g *gate) forward() {
	g.t.Helper()
	g.live(func(gs *Gateways, l *generous) {
		gs.Follow(g.state, 1420, dataplane.FoUPorts{})
		within(g.t, "a lease is granted", l.gave)
		for end := time.Now().Add(time.Minute); g.lives() == 0; {
			if time.Now().After(end) {
				g.t.Fatalf("the kernel does not forward: %v", gs.Problems())
			}
			within(g.t, "a lease is granted again", l.gave)
		}
		within(g.t, "another machine's clock is read", g.clocks.(*witness).read)
		for range 4 { // one that was asked for after that
			within(g.t, "a lease is granted once more", l.gave)
		}
	})
	if left := g.lives(); left < 30*time.Second {
		g.t.Fatalf("without its agent the kernel forwards for %s: no test", left)
	}
}

// A starting agent learns that its slot has moved before it has adopted its namespace: it does not report that it has
// stopped while a ticket of an earlier run is valid.
func TestReleasedIsSaidWhenTheKernelHasStopped(t *testing.T) {
	if !alone(t) {
		return
	}
	g := newGate(t, 60_000)
	g.forward()
	before := g.state
	g.assign(g.other)
	g.live(func(gs *Gateways, l *generous) {
		l.heard = func(r *skeinv1.RenewLeasesRequest) {
			if left := g.lives(); len(r.GetReleased()) > 0 && left > 0 {
				t.Errorf("the leader is told that epoch %d has stopped, and the kernel forwards for another %s",
					r.GetReleased()[0].GetEpoch(), left)
			}
		}
		gs.Follow(before, 1420, dataplane.FoUPorts{})  // the replica on its disk
		gs.Follow(g.state, 1420, dataplane.FoUPorts{}) // what the servers say then
		within(t, "the release is said", l.said)
	})
	if left := g.lives(); left > 0 {
		t.Errorf("the kernel forwards for another %s", left)
	}
}

// A namespace made by an earlier version's agent is found by its former name, and continues to forward under the
// present one, with its clients.
func TestANamespaceOfAnEarlierVersionGoesOn(t *testing.T) {
	if !alone(t) {
		return
	}
	g := newGate(t, 60_000)
	g.forward()
	file, former := filepath.Join(g.netns(), fileName(1, g.ref)), filepath.Join(g.netns(), formerName(1, g.ref))
	if err := egressns.Rename(file, former); err != nil {
		t.Fatal(err)
	}
	registry, err := NewRegistry().Encode()
	if err != nil {
		t.Fatal(err)
	}
	known := filepath.Join(g.dir, "known")
	if err := os.MkdirAll(known, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(known, formerName(1, g.ref)), registry, 0o600); err != nil {
		t.Fatal(err)
	}
	before := g.lives()
	g.live(func(gs *Gateways, l *generous) {
		l.mute = true
		gs.Follow(g.state, 1420, dataplane.FoUPorts{})
		if left := g.lives(); left == 0 || left > before {
			t.Errorf("the ticket of before lives for %s, it was %s", left, before)
		}
		if strays := gs.Strays(); len(strays) > 0 {
			t.Errorf("strays: %v", strays)
		}
		a := gs.SyncClients(t.Context(), g.gw, &skeinv1.SyncEgressClientsRequest{Namespace: g.ref.Namespace,
			Name: g.ref.Name, Epoch: 1, Generation: 1,
			Clients: []*skeinv1.EgressClient{{Key: "web/x", Ipv4: g.state.Node(g.gw).GetIpv4()}}})
		if !a.GetInstalled() {
			t.Fatalf("the namespace is not taken over: %v, %v", a, gs.Problems())
		}
		if left := g.lives(); left == 0 {
			t.Error("nothing is forwarded when the namespace was taken over")
		}
		if r := gs.Report(func(Ref) bool { return true }); len(r) != 1 || r[0].GetNetns() != file {
			t.Errorf("the report has %v, want the namespace at %s", r, file)
		}
	})
	files, err := os.ReadDir(known)
	if err != nil || len(files) != 1 || files[0].Name() != fileName(1, g.ref) {
		t.Errorf("files with clients: %v, %v", files, err)
	}
}
