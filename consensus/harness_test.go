package consensus

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

const testCluster = "000102030405060708090a0b0c0d0e0f"

// node is one member with everything of this package running, as an agent runs it.
type node struct {
	c        *cluster
	name     string
	key      *identity.Key
	wg       identity.WireGuardKey
	id       identity.ID
	dir      string
	server   bool
	diverged func(error)
	beat     func(identity.ID, *skeinv1.SubscribeResponse_Heartbeat)
	site     *site // nil: it is in none that speaks through leaders

	replica *Replica
	raft    *Server
	conns   *Conns
	service *Service
	client  *Client
	live    atomic.Pointer[Client] // client while the node runs
	http    *http.Server
	rpc     net.Listener
	stop    context.CancelFunc
	ended   chan error // of Follow
}

// cluster is some nodes on one network.
type cluster struct {
	t     testing.TB
	net   *network
	log   *slog.Logger
	nodes []*node
	tune  func(*ServerConfig)
	tag   string
}

// simulate runs a test on virtual time: everything is as in production, timings too, but a wait costs nothing.
func simulate(t *testing.T, f func(t *testing.T, c *cluster)) {
	t.Helper()
	simtime.Test(t, func(t *testing.T) { f(t, newCluster(t)) })
}

func newCluster(t testing.TB) *cluster {
	c := &cluster{t: t, net: newNetwork(), log: slog.New(slog.DiscardHandler)}
	if os.Getenv("SKEIN_TEST_LOG") != "" {
		c.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	t.Cleanup(func() {
		for _, n := range c.nodes {
			n.close()
		}
		close(c.net.closed)
		time.Sleep(c.net.slowest) // virtual: a stream ends for its reader when what is on its way has arrived
	})
	return c
}

// add makes a member that is not running yet.
func (c *cluster) add(name string, server bool) *node {
	n := c.diskless(name)
	n.dir, n.server = c.t.TempDir(), server
	c.nodes = append(c.nodes, n)
	return n
}

// diskless makes a member that never runs as a whole.
func (c *cluster) diskless(name string) *node {
	seed := sha256.Sum256([]byte(c.tag + name))
	n := &node{c: c, name: name, key: identity.KeyFromSeed(seed[:])}
	n.wg = identity.WireGuardKey(sha256.Sum256([]byte("wg" + c.tag + name)))
	n.id = n.key.ID()
	return n
}

func (n *node) newNode() *skeinv1.NewNode {
	public, err := n.wg.Public()
	if err != nil {
		n.c.t.Fatal(err)
	}
	return &skeinv1.NewNode{Name: n.name, IdentityKey: n.key.Public(), WireguardKey: public[:], Server: n.server,
		MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax}
}

// start runs the node from its directory.
func (n *node) start(bootstrap bool) {
	n.c.t.Helper()
	if err := n.tryStart(bootstrap); err != nil {
		n.c.t.Fatalf("start %s: %v", n.name, err)
	}
}

func (n *node) tryStart(bootstrap bool) (err error) {
	log := n.c.log.With("node", n.name)
	if n.replica, err = OpenReplica(n.dir, log); err != nil {
		return err
	}
	d := dialer{n.c.net, n.id}
	n.conns = NewConns(d)
	if n.server {
		cfg := ServerConfig{Dir: n.dir, ID: n.id, Dialer: d, Listener: n.c.net.listen(n.id, identity.ALPNRaft),
			Replica: n.replica, Log: log,
			Bootstrap: bootstrap, Conns: n.conns}
		if n.c.tune != nil {
			n.c.tune(&cfg)
		}
		if n.raft, err = StartServer(cfg); err != nil {
			n.replica.Close()
			return err
		}
	}
	server := n.raft
	local := func() *Server { return server }
	mux := http.NewServeMux()
	n.service = NewService(ServiceConfig{Self: n.id, Replica: n.replica, Server: local, Conns: n.conns,
		Log: log, Key: n.key,
		Pass: n.site.pass(n), Proof: func() (*skeinv1.Checkpoint, <-chan struct{}) { return n.client.Proof() }})
	mux.Handle(n.service.Handler())
	n.client = NewClient(ClientConfig{Self: n.id, Replica: n.replica, Conns: n.conns, Local: local, Log: log,
		OnDiverged: n.diverged, OnHeartbeat: n.beat,
		Leaders: n.site.order(n), Passes: n.site.leads(n)})
	n.http, n.rpc = NewHTTPServer(mux, log), n.c.net.listen(n.id, identity.ALPNRPC)
	go n.http.Serve(PlainListener(n.rpc))
	n.live.Store(n.client)
	ctx, cancel := context.WithCancel(context.Background())
	n.stop, n.ended = cancel, make(chan error, 1)
	go func(client *Client, ended chan error) { ended <- client.Follow(ctx) }(n.client, n.ended)
	return nil
}

// current is the client to use now, from any goroutine; nil while the node is down.
func (n *node) current() *Client { return n.live.Load() }

func (n *node) running() bool { return n.stop != nil }

// close stops the node in order.
func (n *node) close() {
	if !n.running() {
		return
	}
	n.halt()
	if n.raft != nil {
		if err := n.raft.Shutdown(context.Background()); err != nil {
			n.c.t.Errorf("shut down %s: %v", n.name, err)
		}
		n.raft = nil
	}
	if err := n.replica.Close(); err != nil {
		n.c.t.Errorf("close the replica of %s: %v", n.name, err)
	}
}

// kill ends a replica as a killed process does: what is unwritten stays so.
func kill(r *Replica) {
	r.disk.Lock()
	defer r.disk.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tail.Lock()
	r.tail.closed = true
	close(r.tail.changed)
	r.tail.Unlock()
	r.store.db.Close()
}

// crash ends the node as a killed process ends: nothing is handed over and nothing more is written.
func (n *node) crash() {
	n.live.Store(nil)
	kill(n.replica)
	var others []identity.ID
	for _, o := range n.c.nodes {
		if o != n {
			others = append(others, o.id)
		}
	}
	n.c.net.cut([]identity.ID{n.id}, others)
	n.c.net.drop(n.id)
	n.halt()
	if n.raft != nil {
		n.raft.shutdown()
		n.raft.raft.Shutdown().Error()
		close(n.raft.stopped)
		n.raft.running.Wait()
		n.raft.transport.Close()
		n.raft.files.close()
		n.raft = nil
	}
	n.c.net.drop(n.id)
	n.c.net.uncut(n.id)
}

func (n *node) halt() {
	n.live.Store(nil)
	n.stop()
	<-n.ended
	n.stop = nil
	n.http.Close()
	n.rpc.Close()
	n.conns.Close()
}

// drop closes all streams of a node, as its kernel does when the process is gone.
func (n *network) drop(id identity.ID) {
	n.mu.Lock()
	var gone []*wire
	for w := range n.conns {
		if w.self == id || w.peer == id {
			gone = append(gone, w)
		}
	}
	n.mu.Unlock()
	for _, w := range gone {
		w.Close()
	}
}

func (n *network) uncut(id identity.ID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for k := range n.cuts {
		if k.from == id || k.to == id {
			delete(n.cuts, k)
		}
	}
}

// form starts a cluster of voters s1, s2, …
func (c *cluster) form(voters int) {
	c.t.Helper()
	first := c.add("s1", true)
	first.start(true)
	c.create(first)
	for i := 1; i < voters; i++ {
		c.join(c.add(fmt.Sprintf("s%d", i+1), true))
	}
	c.eventually("all servers vote", func() error {
		for _, n := range c.nodes {
			if s := n.replica.State().Server(n.id); n.server && (s == nil || !s.Voter || n.raft.voters() != voters) {
				return fmt.Errorf("%s does not", n.name)
			}
		}
		return nil
	})
}

func (c *cluster) create(first *node) {
	c.t.Helper()
	c.propose(first,
		&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{ClusterId: testCluster,
			FirstNode: first.newNode()}}})
}

// join admits a node by a token, gives it the state as skein-join does, and starts it.
func (c *cluster) join(n *node) {
	c.t.Helper()
	seed := c.nodes[0]
	for _, o := range c.nodes {
		if o.running() && o != n {
			seed = o
			break
		}
	}
	secret := sha256.Sum256([]byte(n.name))
	token := hex.EncodeToString(secret[:8])
	allow := tokenCommand(token, secret[:])
	allow.GetCreateToken().Role = string(events.RoleAdmin) // the commands of tests come from any node
	if n.server {
		allow.GetCreateToken().Role = string(events.RoleServer)
	}
	c.propose(seed, allow)
	c.propose(seed, &skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
		Node: n.newNode(), TokenId: token, TokenSecretHash: secret[:], ClusterId: testCluster}}})
	c.eventually("the seed knows the new node", func() error {
		if seed.replica.State().Node(n.id) == nil {
			return errors.New("not yet")
		}
		return nil
	})
	n.startWith(seed.replica.State())
}

// startWith starts a node whose directory is empty with a state, as skein-join leaves it there.
func (n *node) startWith(state *events.State) {
	n.c.t.Helper()
	r, err := OpenReplica(n.dir, n.c.log)
	if err == nil {
		err = r.Reset(state.Proto())
	}
	if err == nil {
		err = r.Close()
	}
	if err != nil {
		n.c.t.Fatal(err)
	}
	n.start(false)
}

// decide hands a command of the node's own to its server.
func (n *node) decide(ctx context.Context, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	cmd.Issuer = n.id.String()
	return n.raft.Propose(ctx, cmd)
}

// proposeFor proposes a command of an issuer through this node: its own node, or a server that it asked, which hands
// the command on as its Service does. It tries until the context ends.
func (c *Client) proposeFor(ctx context.Context, issuer identity.ID, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	if c.cfg.Self == issuer {
		return c.Propose(ctx, cmd)
	}
	cmd = proto.CloneOf(cmd)
	cmd.Issuer = issuer.String()
	for {
		a, err := c.handOn(ctx, cmd)
		if err == nil || events.CodeOf(err) != "" {
			return a, err
		}
		if !pause.For(ctx, retryMin) {
			return nil, fmt.Errorf("%w: %w", ErrUncertain, err)
		}
	}
}

func (c *Client) handOn(ctx context.Context, cmd *skeinv1.Command) (*skeinv1.Answer, error) {
	a, err := c.local().Propose(ctx, cmd)
	var other *NotLeaderError
	if !errors.As(err, &other) || other.Leader.IsZero() {
		return a, err
	}
	r, err := c.cfg.Conns.Cluster(other.Leader).Propose(ctx, &skeinv1.ProposeRequest{Command: cmd, Forwarded: true})
	if err == nil && r.GetAnswer().GetErrorCode() != "" {
		return nil, &events.Error{Code: events.Code(r.GetAnswer().GetErrorCode()), Message: r.GetAnswer().GetErrorMessage()}
	}
	return r.GetAnswer(), err
}

func tokenCommand(id string, hash []byte) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: id, SecretHash: hash, LifetimeNanos: int64(time.Hour), Uses: 1}}}
}

// token is a command that can be told apart by its number.
func token(i int) *skeinv1.Command {
	hash := sha256.Sum256(fmt.Append(nil, i))
	return tokenCommand(tokenID(i), hash[:])
}

func revokeToken(i int) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RevokeToken{RevokeToken: &skeinv1.RevokeToken{TokenId: tokenID(i)}}}
}

func revokeNode(n *node) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RevokeNode{RevokeNode: &skeinv1.RevokeNode{
		NodeId: n.id.String(), Reason: "test"}}}
}

func tokenID(i int) string { return fmt.Sprintf("%016x", i) }

func (c *cluster) propose(n *node, cmd *skeinv1.Command) *skeinv1.Answer {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	a, err := n.client.Propose(ctx, cmd)
	if err != nil {
		c.t.Fatalf("propose on %s: %v", n.name, err)
	}
	return a
}

// eventually waits for a condition.
func (c *cluster) eventually(what string, f func() error) {
	c.t.Helper()
	eventually(c.t, what, f)
}

func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond) // between two looks at the condition
	}
}

// leader waits for one and returns it.
func (c *cluster) leader() (leader *node) {
	c.t.Helper()
	c.eventually("a server leads", func() error {
		for _, n := range c.nodes {
			if n.running() && n.raft != nil && n.raft.IsLeader() {
				leader = n
				return nil
			}
		}
		return errors.New("none does")
	})
	return leader
}

// agree waits until all running nodes have the same index and hash.
func (c *cluster) agree() {
	c.t.Helper()
	c.eventually("all running nodes agree", func() error {
		var first *node
		for _, n := range c.nodes {
			switch {
			case !n.running():
			case first == nil:
				first = n
			default:
				a, b := first.replica.State(), n.replica.State()
				if a.Index() != b.Index() {
					return fmt.Errorf("%s is at %d, %s at %d", first.name, a.Index(), n.name, b.Index())
				}
				if a.Hash() != b.Hash() {
					c.t.Fatalf("%s and %s differ at index %d:\n%v", first.name, n.name, a.Index(), events.Diff(a, b))
				}
			}
		}
		return nil
	})
}

func ids(nodes ...*node) (out []identity.ID) {
	for _, n := range nodes {
		out = append(out, n.id)
	}
	return out
}

func (c *cluster) others(n *node) (out []*node) {
	for _, o := range c.nodes {
		if o != n {
			out = append(out, o)
		}
	}
	return out
}
