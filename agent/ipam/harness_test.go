package ipam

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

const clusterID = "00112233445566778899aabbccddeeff"

// agreement is a log without a network: it decides, folds, and passes the state to the nodes.
type agreement struct {
	t   testing.TB
	now func() time.Time

	mu      sync.Mutex
	n       int
	state   *events.State
	down    chan struct{} // not nil: no server decides until it is closed
	late    bool          // commits, and says that it does not know
	asked   []*skeinv1.Command
	refuse  func(*skeinv1.Command) error
	follows map[string]*Manager // by node
}

func newAgreement(t testing.TB, now func() time.Time) *agreement {
	g := &agreement{t: t, now: now, state: events.NewState(), follows: map[string]*Manager{}}
	g.must(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: clusterID, OverlayIpv4: "10.4.0.0/16", FirstNode: newNode("a"),
	}}})
	return g
}

func secret(purpose, name string) []byte {
	h := sha256.Sum256([]byte(purpose + " " + name))
	return h[:]
}

func nodeID(name string) identity.ID { return identity.IDOf(secret("identity", name)) }

func newNode(name string) *skeinv1.NewNode {
	return &skeinv1.NewNode{
		Name: name, IdentityKey: secret("identity", name), WireguardKey: secret("wireguard", name),
		MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax,
	}
}

// admit lets nodes in.
func (g *agreement) admit(names ...string) {
	g.t.Helper()
	for i, name := range names {
		token := hex.EncodeToString(secret("token", fmt.Sprint(name, i))[:8])
		g.must(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
			Id: token, SecretHash: secret("secret", name), LifetimeNanos: int64(time.Hour), Uses: 1,
		}}})
		g.must(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
			Node: newNode(name), TokenId: token, TokenSecretHash: secret("secret", name), ClusterId: clusterID,
		}}})
	}
}

func (g *agreement) pool(p *skeinv1.Pool) {
	g.t.Helper()
	g.must(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: p}}})
}

func (g *agreement) drain(pool string) {
	g.t.Helper()
	g.must(&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{
		Name: pool, Set: &skeinv1.Pool{Draining: true}, Fields: []string{"draining"},
	}}})
}

// poolOf is a pool of subnets like 10.64.0.0/16 or 10.64.0.0/16,fd02::/112.
func poolOf(name string, bits uint32, v4, v6 string) *skeinv1.Pool {
	return &skeinv1.Pool{Name: name, BlockSizeBits: bits, Subnets: []*skeinv1.PoolSubnet{{Ipv4: v4, Ipv6: v6}}}
}

// must decides a command despite simulated failures, and passes the state to all nodes.
func (g *agreement) must(c *skeinv1.Command) *skeinv1.Answer {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	a, err := g.decide(c)
	if err != nil {
		g.t.Fatalf("%v: %v", c, err)
	}
	for _, m := range g.follows {
		m.Follow(g.state)
	}
	return a
}

func (g *agreement) decide(c *skeinv1.Command) (*skeinv1.Answer, error) {
	g.n++
	c.Time = g.now().UnixNano()
	h := sha256.Sum256(fmt.Append(nil, "entropy ", g.n))
	c.Entropy = append(h[:], h[:]...)
	if c.RequestId == "" {
		c.RequestId = fmt.Sprint("request ", g.n)
	}
	list, a, err := events.Decide(g.state, c)
	if err != nil {
		return nil, err
	}
	next := g.state.Clone()
	for _, e := range list {
		if err := next.Fold(e); err != nil {
			return nil, err
		}
	}
	g.state = next
	return a, nil
}

var errNoQuorum = errors.New("no server decided in time")

// propose is the Propose of a node.
func (g *agreement) propose(node string) func(context.Context, *skeinv1.Command) (*skeinv1.Answer, error) {
	return func(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
		g.mu.Lock()
		g.asked = append(g.asked, c)
		for g.down != nil {
			down := g.down
			g.mu.Unlock()
			select {
			case <-down:
			case <-ctx.Done():
				return nil, fmt.Errorf("%w: %w", errNoQuorum, ctx.Err())
			}
			g.mu.Lock()
		}
		defer g.mu.Unlock()
		if g.refuse != nil {
			if err := g.refuse(c); err != nil {
				return nil, err
			}
		}
		a, err := g.decide(c)
		if err != nil {
			return nil, err
		}
		if g.late {
			return nil, errNoQuorum
		}
		if m := g.follows[node]; m != nil {
			m.Follow(g.state)
		}
		return a, nil
	}
}

// outage begins or ends a period in which no server decides.
func (g *agreement) outage(on bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if on && g.down == nil {
		g.down = make(chan struct{})
	} else if !on && g.down != nil {
		close(g.down)
		g.down = nil
	}
}

// show lets a node follow the newest state.
func (g *agreement) show(r *rig) {
	g.mu.Lock()
	defer g.mu.Unlock()
	r.Follow(g.state)
}

// blocks are how many blocks a node has.
func (g *agreement) blocks(node string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.state.BlocksOf(nodeID(node).String()))
}

// proposals counts what nodes asked for, by the name of the command.
func (g *agreement) proposals() map[string]int {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := map[string]int{}
	for _, c := range g.asked {
		out[fmt.Sprintf("%T", c.GetBody())[len("*skeinv1.Command_"):]]++
	}
	return out
}

// rig is a node with its Manager.
type rig struct {
	*Manager
	t    testing.TB
	g    *agreement
	node string
	cfg  Config
	n    int

	mu     sync.Mutex
	events []string
}

// start opens a node's Manager on its file, and passes it state and kernel.
func (g *agreement) start(node string, change ...func(*Config)) *rig {
	g.t.Helper()
	r := &rig{t: g.t, g: g, node: node}
	r.cfg = Config{
		Self: nodeID(node), File: filepath.Join(g.t.TempDir(), "ipam.db"), Propose: g.propose(node), Now: g.now,
		BootID: "boot 1",
		OnEvent: func(e *skeinv1.PodAddress) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, e.GetWhat()+" "+e.GetIpv4()+e.GetIpv6())
		},
	}
	for _, f := range change {
		f(&r.cfg)
	}
	r.open()
	return r
}

func (r *rig) open(found ...podnet.Found) []string {
	r.t.Helper()
	m, notes, err := Open(r.cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.Manager = m
	r.g.mu.Lock()
	r.g.follows[r.node] = m
	m.Follow(r.g.state)
	r.g.mu.Unlock()
	m.Adopt(found)
	r.t.Cleanup(func() { m.Close() })
	return notes
}

// restart reopens the file as after kill -9, without closing anything.
func (r *rig) restart(found ...podnet.Found) []string {
	r.t.Helper()
	old := r.Manager
	old.cancel()
	old.wg.Wait()
	return r.open(found...)
}

// request is one for a new container.
func (r *rig) request(pod string) Request {
	r.n++
	req := requestOf(fmt.Sprintf("%s-%d", r.node, r.n), pod)
	req.NetNS, req.Network = "/run/netns/x", "skein"
	return req
}

func requestOf(container, pod string) Request {
	return Request{Attachment: podnet.Attachment{Key: podnet.Key{ContainerID: container, Interface: "eth0"},
		Namespace: "ns", Pod: pod}}
}

func (r *rig) assign(pod string) Lease {
	r.t.Helper()
	l, err := r.try(pod)
	if err != nil {
		r.t.Fatalf("assign to %s: %v", pod, err)
	}
	return l
}

func (r *rig) try(pod string) (Lease, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return r.Assign(ctx, r.request(pod))
}

// found is what the kernel has of a lease.
func found(leases ...Lease) (out []podnet.Found) {
	for _, l := range leases {
		for _, a := range []netip.Addr{l.IPv4, l.IPv6} {
			if a.IsValid() {
				out = append(out, podnet.Found{Addr: a, Link: "sk-" + l.Key.ContainerID, Key: l.Key, Namespace: l.Namespace,
					Pod: l.Pod})
			}
		}
	}
	return out
}

func codeIs(err error, c Code) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == c
}

// hand is a clock that the test moves.
type hand struct {
	mu sync.Mutex
	at time.Time
}

func newHand() *hand { return &hand{at: start} }

func (h *hand) now() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.at
}

func (h *hand) add(d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at = h.at.Add(d)
}

// noDuplicates fails if two leases have one address.
func noDuplicates(t testing.TB, rigs ...*rig) int {
	t.Helper()
	who := map[netip.Addr]string{}
	n := 0
	for _, r := range rigs {
		for _, l := range r.Leases() {
			n++
			for _, a := range []netip.Addr{l.IPv4, l.IPv6} {
				if !a.IsValid() {
					continue
				}
				me := r.node + " " + l.Key.ContainerID
				if other, ok := who[a]; ok {
					t.Fatalf("%s belongs to %s and to %s", a, other, me)
				}
				who[a] = me
			}
		}
	}
	return n
}

func offsets(leases []Lease) (out []string) {
	for _, l := range leases {
		out = append(out, l.IPv4.String())
	}
	slices.Sort(out)
	return out
}
