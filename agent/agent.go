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
	"github.com/skeinmesh/skein/agent/discovery"
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
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/instant"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/procs"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/udp"
)

// Phases of the agent, for status and readiness.
const (
	PhaseStarting = "starting"
	PhaseJoining  = "joining"
	PhaseRunning  = "running"
)

// Options are the options of `skein up`.
type Options struct {
	Config config.Config
	// Load reads the configuration again, including the overrides of the file; nil: it never changes.
	Load func() (config.Config, error)
	// File is the file that Load reads; it is watched. A signal on Reread causes a Load, too; Reread may be nil.
	File   string
	Reread <-chan os.Signal
	// OnConfig is called with each new configuration that takes effect. It must not block; it may be nil.
	OnConfig func(config.Config)
	Init     bool
	Token    string // join token
	// Enter returns how a host that is not a member becomes one; called again after each refusal. nil: by Init and Token.
	Enter func(ctx context.Context, refused error) (Entry, error)
	// JoinPatience limits the time for joining; 0: the default.
	JoinPatience time.Duration
	Role         string // "agent" or "relay"
	Version      string
	Log          *slog.Logger
	// Procs adapts the number of processors to the load when the loop calls it; nil: the runtime's default stays.
	Procs *procs.Tuner
	// Lag measures how late this process wakes; nil: the agent uses a meter of its own.
	Lag *lag.Meter
	// OnReady is called once the data plane works or has failed. It may be nil.
	OnReady func()
	// Parts run in addition to the agent's own, while the node is a member and running.
	Parts []part.Part
}

// Entry says how a host becomes a member: it joins by a token, or creates a cluster.
type Entry struct {
	Token  string
	Create identity.ClusterID // the cluster to create; zero: join
}

// Agent is one running daemon. Its fields are grouped by purpose.
type Agent struct {
	opts    Options
	log     *slog.Logger
	started time.Time
	epoch   uint64
	phase   atomic.Value // string
	ended   bool         // the end was requested, or this node was revoked

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
	decided  chan struct{} // signals news from the log
	gossipIn chan gossip.Packet
	down     chan downOrder
	loop     loopState // only for the loop
}

// settingUp is the configuration, and resources that it claims on this host.
type settingUp struct {
	cfg     config.Config // configuration at the start; conf has the present one
	live    liveConfig
	wishes  atomic.Pointer[part.Wishes] // requested by the parts for this host
	numbers dataplane.Numbers           // from cfg
	claims  *claims.Claims              // nil: this node only relays
	// formerNumbers are earlier numbers whose kernel state must be removed once the data plane works.
	formerNumbers []dataplane.Numbers
}

// identities are this node's identity, and the keys derived from its own and others' keys.
type identities struct {
	key        *identity.Key
	keys       rekey.Changer // WireGuard keys, this host's and those that peers change to
	id         identity.ID
	cluster    identity.ClusterID
	making     identity.ClusterID // of the cluster that this node creates
	packetKeys sync.Map           // WireGuard key of a member -> key of control packets with it
	pairKeys   projection.Keys
}

// mesh is the log, gossip, and the communication with other members.
type mesh struct {
	replica        *consensus.Replica
	client         *consensus.Client
	server         atomic.Pointer[consensus.Server]
	rpc            atomic.Pointer[consensus.Service] // answers other nodes; nil: not served yet
	conns          *consensus.Conns
	leaseConns     *consensus.Conns // to the servers, only for leases
	roster         *roster.Roster
	gossip         *gossip.Gossip
	control        *control.Net
	controlLimiter admission.Limiter                    // for the control net's port on overlay addresses
	before         []identity.ID                        // members in the stored state at the start, sorted
	heard          instant.Instant                      // last sign of life from the log
	clock          atomic.Int64                         // this host's clock minus the leader's, ns
	clockSeen      atomic.Bool                          // clock has been measured
	asking         atomic.Bool                          // the servers are being asked at the port for joiners
	revokedBy      atomic.Pointer[joining.RevokedError] // a server has answered that this node was revoked
}

// relaying is this node's use of relays, and its own service as one.
type relaying struct {
	pool        *client.Pool
	proxies     *client.Proxies
	relayIDs    atomic.Pointer[map[identity.ID]bool] // the members that relay
	relay       *server.Server
	udp         atomic.Pointer[udp.Relay] // of relay; nil: it relays no UDP
	relayTable  *relaynft.Table
	relayWhy    error // why the kernel relays no UDP
	relayUnlock func()
	listener    atomic.Pointer[admission.Listener]
}

// traversal is NAT traversal, and the paths found by it.
type traversal struct {
	discovery  *discovery.Discovery             // nil: this node only relays, or has not opened it yet
	netcheck   atomic.Pointer[candidate.Result] // discovery's last result that differed from the one before
	reserved   *net.UDPConn                     // WireGuard's port until the device takes it; nil: the device has it
	socket     *probe.Socket
	prober     *probe.Prober
	paths      *path.Manager
	settings   atomic.Pointer[path.Settings] // that the paths were given
	predictor  *prediction.Predictor         // nil: this node only relays
	reflection reflection.Reflection
	handshakes tunnels.Handshakes
	lazy       atomic.Bool // large mesh: pairs without traffic are idle
}

// siting is this node's role in its site, and how it reaches other sites.
type siting struct {
	sitePlan      atomic.Pointer[sites.Plan] // nil: not made yet
	reach         atomic.Pointer[sitemesh.Reach]
	placed        atomic.Pointer[placed]            // nil: it gossips with all members
	siteEvents    atomic.Pointer[siteEvents]        // derived from sitePlan; nil: not yet
	sites         atomic.Pointer[map[string]string] // site of each node by ID, from the records
	witnesses     *siteWitnesses                    // nil: this node only relays
	leaderChanges sites.LeaderChanges
	hops          hops.Watch
}

// kernelSide is the kernel's present and wanted state.
type kernelSide struct {
	plane       *plane.Plane
	links       hostlinks.Links
	stats       atomic.Pointer[tunnels.Stats] // as read from the device
	stale       atomic.Bool                   // the newest Spec must be applied even if it is unchanged
	applied     atomic.Bool                   // a Spec has been applied without error
	planeStands chan struct{}                 // closed by planeUp then
	planeUp     sync.Once
	writes      atomic.Uint64 // number of writes to the kernel

	mu        sync.Mutex // guards the fields that the loop writes for the API
	spec      dataplane.Spec
	published *skeinv1.Record
}

// workloads are what this node does for pods, egresses and plain peers.
type workloads struct {
	pods           *pods.Pods                            // nil: this node only relays
	podsDone       chan struct{}                         // closed when pods get nothing any more
	egresses       *node.Node                            // nil: this node only relays
	egressDone     chan struct{}                         // closed when no lease is renewed any more
	slotController atomic.Pointer[egress.SlotController] // of egress slots; nil: this server does not lead
	plain          *carrier.Peers                        // nil: this node only relays
	plainDone      chan struct{}                         // closed when plain peers get no answer any more
	podReady       *podready.Readiness
}

// telling is the output for users: problems, metrics, journal, plans and API.
type telling struct {
	problems    *problems
	metrics     *metrics.Metrics
	metricsPort net.Listener // nil: none
	journal     *journal.Journal
	plans       plans
	lag         *lag.Meter // how late this process wakes
	socketOpen  bool       // this agent made the API's socket
	profiling   sync.Mutex // held while a profile is taken
}

// Run starts the agent. It returns when asked to stop, when it cannot start, or when it cannot continue. An error
// that is ErrFinal means: do not restart it automatically.
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

// wakeUp requests another round of the loop. It never blocks.
func (a *Agent) wakeUp() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// tunnel returns the state of the tunnel to a node for the control net. Where the tunnel would use a relay, the
// relay's own session is shorter.
func (a *Agent) tunnel(id identity.ID) control.Tunnel {
	if a.paths == nil {
		return control.Down
	}
	if via, ok := a.reach.Load().Via(id); ok {
		if a.alive(via) {
			return control.Likely // the state of the path beyond via is unknown
		}
		return control.Down
	}
	return tunnelOver(a.paths.Paths()[id], a.lazy.Load(), func() bool { return len(a.pool.Links()) > 0 }, func() bool {
		m, known := a.roster.Get(id)
		p, _ := a.stats.Load().Of(a.keys.DeviceKey(id, m.WireGuard))
		return known && !p.LastHandshake.IsZero()
	})
}

// passedBy is the peer whose tunnel carries a node's packets: the node itself, or a leader.
func (a *Agent) passedBy(id identity.ID) identity.ID {
	if via, ok := a.reach.Load().Via(id); ok {
		return via
	}
	return id
}

// tunnelOver derives the tunnel's state from a path. Argument lazy: large mesh; relays: whether relay sessions exist;
// session: whether WireGuard has had a handshake.
func tunnelOver(p path.Path, lazy bool, relays, session func() bool) control.Tunnel {
	switch {
	case lazy && p.Kind != path.Direct:
		return control.Idle // a stream in the tunnel would count as traffic and start the search for a path
	case p.Kind == path.None && relays():
		return control.Away
	case p.Kind != path.Direct || !p.Alive || p.Silent:
		return control.Down // a silent peer's kernel would answer, but not its agent
	case session():
		return control.Up
	}
	return control.Likely
}

// leader is the node that leads the cluster to this node's knowledge.
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

// newNode describes this host for its admission.
func (a *Agent) newNode() (*skeinv1.NewNode, error) {
	wg := a.keys.Keys().DevicePublic
	site, said := a.saysSite()
	return &skeinv1.NewNode{
		Name: a.cfg.Name, IdentityKey: a.key.Public(), WireguardKey: wg[:], Labels: a.conf().Labels,
		Server: a.cfg.Server != nil && *a.cfg.Server, MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax,
		Site: site, SiteSaid: said,
	}, nil
}

// enter makes this node a member: from its stored state, or by --init or --join.
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

// enterAsTold becomes a member through Options.Enter. It continues after refusals and time-outs, since the next token
// may work.
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

// joinBy joins the cluster of a token.
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
		return fmt.Errorf("state directory %s is of cluster %s, but its identity key %s is not a member's: identity.pem or "+
			"replica.db was replaced; restore the one that belongs to the other, or move the directory away and join with a "+
			"new token", a.cfg.StateDir, have, a.id)
	}
	return nil
}
