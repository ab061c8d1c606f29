package cniserver

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testns"
)

// agreement decides and folds like a leader, for one node.
type agreement struct {
	t  testing.TB
	mu sync.Mutex
	n  int

	state *events.State
	away  bool // nobody decides
	m     *ipam.Manager
}

func secret(purpose string) []byte {
	h := sha256.Sum256([]byte(purpose))
	return h[:]
}

func newAgreement(t testing.TB, pools ...*skeinv1.Pool) *agreement {
	g := &agreement{t: t, state: events.NewState()}
	node := &skeinv1.NewNode{Name: "a", IdentityKey: secret("identity"), WireguardKey: secret("wireguard"),
		MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
	g.must(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "00112233445566778899aabbccddeeff", OverlayIpv4: "10.4.0.0/16", FirstNode: node}}})
	for _, p := range pools {
		g.must(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: p}}})
	}
	return g
}

func (g *agreement) must(c *skeinv1.Command) {
	g.t.Helper()
	if _, err := g.propose(g.t.Context(), c); err != nil {
		g.t.Fatalf("%v: %v", c, err)
	}
}

func (g *agreement) propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.away {
		return nil, errors.New("no server decided in time")
	}
	g.n++
	h := sha256.Sum256(fmt.Append(nil, g.n))
	c.Time, c.Entropy = time.Now().UnixNano(), append(h[:], h[:]...)
	if c.RequestId == "" {
		c.RequestId = fmt.Sprint(g.n)
	}
	evs, a, err := events.Decide(g.state, c)
	if err != nil {
		return nil, err
	}
	next := g.state.Clone()
	for _, e := range evs {
		if err := next.Fold(e); err != nil {
			return nil, err
		}
	}
	g.state = next
	if g.m != nil {
		g.m.Follow(next)
	}
	return a, nil
}

func (g *agreement) quorum(there bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.away = !there
}

// inside is the real Network in a test's namespace, with hooks for trouble.
type inside struct {
	ns       *testns.NS
	afterAdd func(podnet.Attachment) // while the request still runs
	failDel  atomic.Bool
}

func (n *inside) do(f func() error) (err error) {
	n.ns.Do(func() { err = f() })
	return err
}

func (n *inside) Add(a podnet.Attachment) (l podnet.Link, err error) {
	err = n.do(func() (err error) { l, err = Kernel{}.Add(a); return err })
	if err == nil && n.afterAdd != nil {
		n.afterAdd(a)
	}
	return l, err
}

func (n *inside) Del(netns string, k podnet.Key) error {
	if n.failDel.Load() {
		return errors.New("the kernel says no")
	}
	return n.do(func() error { return Kernel{}.Del(netns, k) })
}

func (n *inside) Check(a podnet.Attachment) error {
	return n.do(func() error { return Kernel{}.Check(a) })
}

func (n *inside) CheckNetNS(path string) error {
	return n.do(func() error { return Kernel{}.CheckNetNS(path) })
}

func (n *inside) Has(k podnet.Key) (has bool, err error) {
	err = n.do(func() (err error) { has, err = Kernel{}.Has(k); return err })
	return has, err
}

// rig is a server on a socket, with real addresses and a real kernel.
type rig struct {
	skeinv1connect.CNIServiceClient
	t      testing.TB
	g      *agreement
	m      *ipam.Manager
	net    *inside
	srv    *Server
	dir    string
	mu     sync.Mutex
	done   []string
	limits Condition
	ready  chan struct{} // of the agent that serve starts; nil: it is

	egresses Egresses
}

func newRig(t testing.TB, pools ...*skeinv1.Pool) *rig {
	r := &rig{t: t, g: newAgreement(t, pools...), net: &inside{ns: testns.New(t, "cn")}, dir: t.TempDir()}
	m, _, err := ipam.Open(ipam.Config{Self: identity.IDOf(secret("identity")), File: filepath.Join(r.dir, "ipam.db"),
		Propose: r.g.propose, BootID: "b"})
	if err != nil {
		t.Fatal(err)
	}
	r.g.m, r.m = m, m
	m.Follow(r.g.state)
	m.Adopt(nil)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { m.Run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait(); m.Close() })
	r.serve()
	return r
}

// serve starts a server, as an agent does that starts.
func (r *rig) serve() (stop func()) {
	r.t.Helper()
	r.srv = New(Config{
		Allocator: r.m, Network: r.net, Egresses: r.egresses, MTU: func() uint32 { return 1420 },
		NoteDir:   filepath.Join(r.dir, "cni-deleted"),
		Condition: func(context.Context) Condition { return r.limits }, Ready: r.ready,
		Done: func(verb string, code uint32, _ time.Duration) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.done = append(r.done, fmt.Sprint(verb, " ", code))
		},
	})
	socket := filepath.Join(r.dir, SocketName)
	l, err := Listen(socket)
	if err != nil {
		r.t.Fatal(err)
	}
	stop = r.srv.Serve(r.t.Context(), l)
	r.t.Cleanup(stop)
	r.CNIServiceClient =
		skeinv1connect.NewCNIServiceClient(&http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _,
			_ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		}}}, "http://skein")
	return stop
}

func at(container string) *skeinv1.CNIAttachment {
	return &skeinv1.CNIAttachment{ContainerId: container, Interface: "eth0"}
}

func path(ns *testns.NS) string { return "/run/netns/" + ns.Name }

// request asks for a pod's addresses.
func request(container string, ns *testns.NS) *skeinv1.CNIAddRequest {
	return &skeinv1.CNIAddRequest{Attachment: at(container), Netns: path(ns), Namespace: "shop", Pod: "web-" + container,
		Network: "skein"}
}

func (r *rig) add(container string, ns *testns.NS) *skeinv1.CNIAddResponse {
	r.t.Helper()
	a, err := r.Add(r.t.Context(), request(container, ns))
	if err != nil {
		r.t.Fatalf("ADD of %s: %v", container, err)
	}
	return a
}

func (r *rig) del(container string) {
	r.t.Helper()
	if _, err := r.Del(r.t.Context(), &skeinv1.CNIDelRequest{Attachment: at(container)}); err != nil {
		r.t.Fatalf("DEL of %s: %v", container, err)
	}
}

// code is what the plugin would read of an error.
func code(err error) *skeinv1.CNIError {
	var e *connect.Error
	if errors.As(err, &e) {
		for _, d := range e.Details() {
			if v, err := d.Value(); err == nil {
				return v.(*skeinv1.CNIError)
			}
		}
	}
	return nil
}

// want fails unless an error has this code, a cause and a next step.
func want(t testing.TB, err error, n uint32) {
	t.Helper()
	if c := code(err); c.GetCode() != n || c.GetMessage() == "" || c.GetDetails() == "" {
		t.Errorf("error %v (%v); code %d was expected", err, c, n)
	}
}

// traces are what pods have in kernel and file: a failed ADD must leave as many as were there.
func (r *rig) traces() string {
	r.t.Helper()
	var found []podnet.Found
	var links []net.Interface
	err := r.net.do(func() (err error) {
		if found, err = podnet.Scan(dataplane.DefaultNumbers().Link, 0); err == nil {
			links, err = net.Interfaces()
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return fmt.Sprintf("%d leases, %d addresses in the kernel, %d links", len(r.m.Leases()), len(found), len(links)-1)
}

// small is a pool of IPv4 addresses.
func small(name, subnet string, bits uint32) *skeinv1.Pool {
	return &skeinv1.Pool{Name: name, BlockSizeBits: bits, Subnets: []*skeinv1.PoolSubnet{{Ipv4: subnet}}}
}

func dual() *skeinv1.Pool {
	return &skeinv1.Pool{Name: "default", BlockSizeBits: 5,
		Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16", Ipv6: "fd64::/112"}}}
}

func mustAddr(t testing.TB, s string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}
