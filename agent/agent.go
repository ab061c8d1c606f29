package agent

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/carrier"
	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/egress/node"
	"github.com/skeinmesh/skein/agent/hops"
	"github.com/skeinmesh/skein/agent/hostlinks"
	"github.com/skeinmesh/skein/agent/joining"
	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/agent/pods"
	"github.com/skeinmesh/skein/agent/prediction"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/reflection"
	"github.com/skeinmesh/skein/agent/rekey"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/forced"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/portmap"
	"github.com/skeinmesh/skein/gossip/candidate/reflexive"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/instant"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/procs"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
)

// Phases of the agent, as status and readiness tell them.
const (
	PhaseStarting = "starting"
	PhaseJoining  = "joining"
	PhaseRunning  = "running"
)

// Options is what `skein up` was told.
type Options struct {
	Config config.Config
	// Load reads the configuration anew, with what comes before the file put over it; nil: it stays as it is.
	Load func() (config.Config, error)
	// File is what Load reads, and is watched. Reread asks for Load, too, as a signal does; it may be nil.
	File   string
	Reread <-chan os.Signal
	// OnConfig is told of each configuration that the agent goes over to. It must not block; it may be nil.
	OnConfig func(config.Config)
	Init     bool
	Token    string // join token
	// Enter is asked how this host becomes a member when it is none, and again after each refusal; nil: by Init and Token.
	Enter func(ctx context.Context, refused error) (Entry, error)
	// JoinPatience bounds the attempts to join; 0 means the default.
	JoinPatience time.Duration
	Role         string // "agent" or "relay"
	Version      string
	Log          *slog.Logger
	// Procs is told by the loop to look how busy this process is; nil: the runtime keeps its processors.
	Procs *procs.Tuner
	// Lag is told how late this process wakes; nil: the agent keeps that to itself.
	Lag *lag.Meter
	// OnReady is called once this agent is up: its data plane is as it should be, or does not come up. It may be nil.
	OnReady func()
	// Parts run beside the agent's own, while it is a running member.
	Parts []part.Part
}

// Entry is how a host becomes a member: it joins by a token, or makes a cluster.
type Entry struct {
	Token  string
	Create identity.ClusterID // the cluster to make; zero: join
}

// Agent is one running daemon. Its fields stand in groups by what they are for.
type Agent struct {
	opts    Options
	log     *slog.Logger
	started time.Time
	epoch   uint64
	phase   atomic.Value // string
	ended   bool         // somebody asked for the end, or the cluster did by revoking this node

	settingUp
	identities
	mesh
	relaying
	traversal
	siting
	kernelSide
	workloads
	telling

	wake     chan struct{}
	decided  chan struct{} // the log has something new
	gossipIn chan gossip.Packet
	down     chan downOrder
	loop     loopState // the loop's alone
}

// settingUp is the configuration, and what it holds on this host.
type settingUp struct {
	cfg     config.Config // as it was at the start; conf has what may have changed since
	live    liveConfig
	wishes  atomic.Pointer[part.Wishes] // of the parts, for this host
	numbers dataplane.Numbers           // of cfg
	claims  *claims.Claims              // nil: this node only relays
	// formerNumbers have left something in the kernel that is to be removed once the data plane stands.
	formerNumbers []dataplane.Numbers
}

// identities are who this node is, and keys that follow from its own and others'.
type identities struct {
	key        *identity.Key
	keys       rekey.Changer // WireGuard keys, this host's and those that peers change to
	id         identity.ID
	cluster    identity.ClusterID
	making     identity.ClusterID // of the cluster that this node makes
	packetKeys sync.Map           // WireGuard key of a member -> key of control packets with it
	pairKeys   projection.Keys
}

// mesh is the log, gossip, and how this node speaks with the other members.
type mesh struct {
	replica        *consensus.Replica
	client         *consensus.Client
	server         atomic.Pointer[consensus.Server]
	rpc            atomic.Pointer[consensus.Service] // what this node answers to others; nil: not served yet
	conns          *consensus.Conns
	leaseConns     *consensus.Conns // to the servers, for leases alone
	roster         *roster.Roster
	gossip         *gossip.Gossip
	control        *control.Net
	controlLimiter admission.Limiter                    // of the control net's port on overlay addresses
	before         []identity.ID                        // members known from the disk at the start, sorted
	heard          instant.Instant                      // when the log was last heard of
	clock          atomic.Int64                         // this host's clock minus the leader's, ns
	clockSeen      atomic.Bool                          // clock is known
	asking         atomic.Bool                          // the servers, at the port for joiners
	revokedBy      atomic.Pointer[joining.RevokedError] // a server said that this node was revoked
}

// relaying is what this node has of relays, and does as one.
type relaying struct {
	pool        *client.Pool
	proxies     *client.Proxies
	relayIDs    atomic.Pointer[map[identity.ID]bool] // the members that relay
	relay       *server.Server
	udp         atomic.Pointer[udp.Relay] // of relay; nil: it forwards no UDP
	relayTable  *relaynft.Table
	relayWhy    error // why the kernel forwards none
	relayUnlock func()
	listener    atomic.Pointer[admission.Listener]
}

// traversal is how this node finds its way through NATs, and the paths that it has found.
type traversal struct {
	stun       atomic.Pointer[stunserver.Server]
	discoverer *candidate.Discoverer
	// discovering is closed when the discoverer has ended.
	discovering chan struct{}
	netcheck    atomic.Pointer[candidate.Result] // the discoverer's
	reflexive   *reflexive.Step
	forced      *forced.Step      // nil: this node only relays, or has not opened discovery yet
	portmap     *portmap.Step     // nil when forced is
	imds        *candidate.Switch // nil when forced is
	// ownAddresses is nil when forced is.
	ownAddresses *hostaddr.Step
	reserved     *net.UDPConn // WireGuard's port until the data plane's first change; nil: it is the device's
	socket       *probe.Socket
	prober       *probe.Prober
	paths        *path.Manager
	settings     atomic.Pointer[path.Settings] // that paths follow
	predictor    *prediction.Predictor         // nil: this node only relays
	reflection   reflection.Reflection
	asked        askedPeers
	handshakes   tunnels.Handshakes
	lazy         atomic.Bool // a large mesh: pairs without traffic are idle
}

// siting is this node's part in its site, and how it reaches others by it.
type siting struct {
	sitePlan      atomic.Pointer[sites.Plan] // nil: not made yet
	reach         atomic.Pointer[sitemesh.Reach]
	placed        atomic.Pointer[placed]            // nil: it gossips with everybody, as all do
	siteEvents    atomic.Pointer[siteEvents]        // by that plan; nil: not made yet
	sites         atomic.Pointer[map[string]string] // of nodes, by ID, as their records say
	witnesses     *siteWitnesses                    // nil: this node only relays
	leaderChanges sites.LeaderChanges
	hops          hops.Watch
}

// kernelSide is what the kernel has, and shall have.
type kernelSide struct {
	plane       *plane.Plane
	links       hostlinks.Links
	stats       atomic.Pointer[tunnels.Stats] // as the device has it
	stale       atomic.Bool                   // the newest Spec is to be applied, also if it is the same again
	applied     atomic.Bool                   // a Spec has been applied without error
	planeStands chan struct{}                 // closed by planeUp once it has
	planeUp     sync.Once
	writes      atomic.Uint64 // to the kernel

	mu        sync.Mutex // guards what the loop leaves for the API to read
	spec      dataplane.Spec
	published *skeinv1.Record
}

// workloads are what this node does for pods, egresses and plain peers.
type workloads struct {
	pods           *pods.Pods                            // nil: this node only relays
	podsDone       chan struct{}                         // closed when nothing is given to pods any more
	egresses       *node.Node                            // nil: this node only relays
	egressDone     chan struct{}                         // closed when no lease is renewed any more
	slotController atomic.Pointer[egress.SlotController] // of egress slots; nil: this server does not lead
	plain          *carrier.Peers                        // nil: this node only relays
	plainDone      chan struct{}                         // closed when no plain peer is answered any more
	podReady       *podready.Readiness
}

// telling is what this node tells its users: problems, metrics, what it has decided, and its API.
type telling struct {
	problems    *problems
	metrics     *metrics.Metrics
	metricsPort net.Listener // nil: none
	journal     *journal.Journal
	plans       plans
	lag         *lag.Meter // how late this process wakes
	socketOpen  bool       // the API's socket is this agent's
	profiling   sync.Mutex // held while a profile is taken
}

// Run starts the agent and returns when it was told to stop, or could not start, or cannot go on. An error that is
// ErrFinal says that it is not to be started again unless somebody asks for it.
func Run(ctx context.Context, opts Options) error {
	a := &Agent{
		opts: opts, log: opts.Log, started: time.Now(),
		wake: make(chan struct{}, 1), decided: make(chan struct{}, 1),
		gossipIn: make(chan gossip.Packet, 1024), down: make(chan downOrder),
		settingUp:  settingUp{cfg: opts.Config, numbers: opts.Config.Dataplane.Numbers()},
		kernelSide: kernelSide{planeStands: make(chan struct{})},
		telling:    telling{problems: newProblems(), lag: cmp.Or(opts.Lag, new(lag.Meter))},
	}
	a.heard.Set(a.started)
	a.live.open(a.cfg)
	a.phase.Store(PhaseStarting)
	if err := claims.CheckHost(); err != nil {
		return err
	}
	defer a.removeSocket()
	held, unlock, err := claims.LockHost(a.cfg, !a.relayOnly())
	if err != nil {
		return err
	}
	defer unlock()
	a.claims, a.links.OfAgents = held, held.OfAgents
	if a.metricsPort, err = metrics.Listen(a.conf().Ports.Metrics); err != nil {
		return err
	}
	if a.metricsPort != nil {
		defer a.metricsPort.Close()
	}
	key, keys, err := rekey.Load(a.cfg.StateDir)
	if err != nil {
		return err
	}
	a.key, a.id = key, key.ID()
	a.keys.Set(keys)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := a.open(ctx); err != nil {
		return errors.Join(err, a.close())
	}
	err = errors.Join(a.run(ctx), a.close())
	if a.ended {
		return final(err)
	}
	return err
}

// wakeUp makes the loop run once more. It never blocks.
func (a *Agent) wakeUp() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// tunnel tells the control net what is known of the tunnel to a node. Over a relay the relay's own
// session is the shorter way.
func (a *Agent) tunnel(id identity.ID) control.Tunnel {
	if a.paths == nil {
		return control.Down
	}
	if via, ok := a.reach.Load().Via(id); ok {
		if a.alive(via) {
			return control.Likely // nothing tells how the rest of the way is
		}
		return control.Down
	}
	return tunnelOver(a.paths.Paths()[id], a.lazy.Load(), func() bool { return len(a.pool.Links()) > 0 }, func() bool {
		m, known := a.roster.Get(id)
		p, _ := a.stats.Load().Of(a.keys.DeviceKey(id, m.WireGuard))
		return known && !p.LastHandshake.IsZero()
	})
}

// passedBy is the peer of the tunnel by which packets of a node go and come: itself, or a leader.
func (a *Agent) passedBy(id identity.ID) identity.ID {
	if via, ok := a.reach.Load().Via(id); ok {
		return via
	}
	return id
}

// tunnelOver is what a path says of the tunnel, in a large mesh or not, with relays to ask and a session of WireGuard's
// or without.
func tunnelOver(p path.Path, lazy bool, relays, session func() bool) control.Tunnel {
	switch {
	case lazy && p.Kind != path.Direct:
		return control.Idle // a stream's first packets in the tunnel would be traffic, and have a path looked for
	case p.Kind == path.None && relays():
		return control.Away
	case p.Kind != path.Direct || !p.Alive || p.Silent:
		return control.Down // of a silent peer only the kernel would answer
	case session():
		return control.Up
	}
	return control.Likely
}

// leader is the node that leads the cluster, as far as this one knows.
func (a *Agent) leader() (identity.ID, bool) {
	if s := a.server.Load(); s != nil {
		return s.Leader()
	}
	return a.client.Leader()
}

func (a *Agent) isServer() bool {
	return a.replica.State().Server(a.id) != nil
}

// self is this node's entry in the agreed state, nil before it has one.
func (a *Agent) self() *skeinv1.Node { return a.replica.State().Node(a.id) }

func (a *Agent) overlayAddrs() []netip.Addr {
	v4, v6, _ := a.roster.Overlay(a.id)
	return []netip.Addr{v4, v6}
}

// newNode is how this host presents itself for admission.
func (a *Agent) newNode() (*skeinv1.NewNode, error) {
	wg := a.keys.Keys().DevicePublic
	site, said := a.saysSite()
	return &skeinv1.NewNode{
		Name: a.cfg.Name, IdentityKey: a.key.Public(), WireguardKey: wg[:], Labels: a.conf().Labels,
		Server: a.cfg.Server != nil && *a.cfg.Server, MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax,
		Site: site, SiteSaid: said,
	}, nil
}

// enter makes sure that this node is a member: by what its disk says, or by --init or --join.
func (a *Agent) enter(ctx context.Context) (*skeinv1.JoinResponse, bool, error) {
	s := a.replica.State()
	if c := s.Cluster(); c != nil && c.GetId() != "" {
		return nil, false, final(a.resume(s))
	}
	switch {
	case a.opts.Enter != nil:
		return a.enterAsTold(ctx)
	case a.opts.Init:
		rand.Read(a.making[:])
		return nil, true, nil
	case a.opts.Token != "":
		r, err := a.joinBy(ctx, a.opts.Token)
		return r, false, err
	}
	return nil, false, final(fmt.Errorf("this host belongs to no cluster yet (state directory %s is empty): create one "+
		"with `skein up --init`, or join one with `skein up --join TOKEN`", a.cfg.StateDir))
}

// enterAsTold becomes a member as Options.Enter says. What refuses this node, or does not answer, may be another
// token's in a moment.
func (a *Agent) enterAsTold(ctx context.Context) (*skeinv1.JoinResponse, bool, error) {
	a.phase.Store(PhaseJoining)
	var refused error
	for {
		entry, err := a.opts.Enter(ctx, refused)
		if err != nil {
			return nil, false, err
		}
		if entry.Create != (identity.ClusterID{}) {
			a.making = entry.Create
			return nil, true, nil
		}
		r, err := a.joinBy(ctx, entry.Token)
		var revoked *joining.RevokedError
		switch {
		case err == nil:
			return r, false, nil
		case ctx.Err() != nil || errors.As(err, &revoked):
			return nil, false, err
		}
		a.log.Warn("this host has not joined; it tries again", "error", err)
		refused = err
	}
}

// joinBy has a token's cluster admit this node.
func (a *Agent) joinBy(ctx context.Context, text string) (*skeinv1.JoinResponse, error) {
	a.phase.Store(PhaseJoining)
	token, err := admission.DecodeToken(text)
	if err != nil {
		return nil, err
	}
	node, err := a.newNode()
	if err != nil {
		return nil, err
	}
	if a.cfg.Server == nil {
		node.Server = token.GetRole() == string(events.RoleServer)
	}
	record, err := a.firstRecord()
	if err != nil {
		return nil, err
	}
	r, err := joining.Join(ctx, a.key, token, node, record, cmp.Or(a.opts.JoinPatience, joining.Patience),
		a.numbers.MarkWG, a.log)
	if err != nil {
		return nil, err
	}
	if r.GetState().GetCluster().GetId() != token.GetClusterId() {
		return nil, fmt.Errorf("the seed answered for cluster %s, the token is of cluster %s: get a new token",
			r.GetState().GetCluster().GetId(), token.GetClusterId())
	}
	return r, a.replica.Reset(r.GetState())
}

func (a *Agent) resume(s *events.State) error {
	have := s.Cluster().GetId()
	if a.opts.Init {
		a.log.Info("the cluster exists already; resuming", "cluster", have)
	}
	if a.opts.Token != "" {
		token, err := admission.DecodeToken(a.opts.Token)
		if err != nil {
			return err
		}
		if token.GetClusterId() != have {
			return fmt.Errorf("state directory %s belongs to cluster %s, the token is of cluster %s: use another --state-dir, "+
				"or leave the old cluster first (skein down --purge, then move the directory away)", a.cfg.StateDir, have,
				token.GetClusterId())
		}
	}
	if r := s.Revoked(a.id); r != nil {
		return fmt.Errorf("this node was revoked (%s): move %s away to get a new identity, and join with a new token",
			api.ReasonText(r.GetReason()), a.cfg.StateDir)
	}
	if s.Node(a.id) == nil {
		return fmt.Errorf("state directory %s is of cluster %s, but its identity key %s is no member's: identity.pem or "+
			"replica.db was replaced; restore the one that belongs to the other, or move the directory away and join with a "+
			"new token", a.cfg.StateDir, have, a.id)
	}
	return nil
}
