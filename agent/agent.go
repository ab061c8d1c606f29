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
	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/hostlinks"
	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/rekey"
	"github.com/skeinmesh/skein/agent/sites"
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

// Agent is one running daemon.
type Agent struct {
	opts    Options
	cfg     config.Config // as it was at the start; conf has what may have changed since
	live    liveConfig
	numbers dataplane.Numbers // of cfg
	claims  *claims.Claims    // nil: this node only relays
	// formerNumbers have left something in the kernel that is to be removed once the data plane stands.
	formerNumbers []dataplane.Numbers
	log           *slog.Logger
	key           *identity.Key
	wg            atomic.Pointer[rekey.Keys]
	id            identity.ID
	cluster       identity.ClusterID
	making        identity.ClusterID // of the cluster that this node makes
	epoch         uint64
	started       time.Time

	replica     *consensus.Replica
	client      *consensus.Client
	server      atomic.Pointer[consensus.Server]
	roster      *roster
	gossip      *gossip.Gossip
	control     *control.Net
	pool        *client.Pool
	proxies     *client.Proxies
	relay       *server.Server
	relayIDs    atomic.Pointer[map[identity.ID]bool] // the members that relay
	udp         atomic.Pointer[udp.Relay]            // of relay; nil: it forwards no UDP
	relayTable  *relaynft.Table
	relayWhy    error // why the kernel forwards none
	relayUnlock func()
	stun        atomic.Pointer[stunserver.Server]
	listener    atomic.Pointer[admission.Listener]
	prober      *probe.Prober
	discoverer  *candidate.Discoverer
	reflexive   *reflexive.Step
	// discovering is closed when the discoverer has ended.
	discovering chan struct{}
	socket      *probe.Socket
	conns       *consensus.Conns
	leaseConns  *consensus.Conns // to the servers, for leases alone
	paths       *path.Manager
	guess       *birthday.Engine
	reflection  reflection
	asked       askedPeers
	rewrites    rewrites
	settings    atomic.Pointer[path.Settings] // that paths follow
	journal     *journal.Journal
	plans       plans
	plane       *plane.Plane
	reserved    *net.UDPConn // WireGuard's port until the data plane's first change; nil: it is the device's
	links       hostlinks.Links
	lag         *lag.Meter                        // how late this process wakes
	pods        *pods                             // nil: this node only relays
	podsDone    chan struct{}                     // closed when nothing is given to pods any more
	egresses    *ownEgresses                      // nil: this node only relays
	egressDone  chan struct{}                     // closed when no lease is renewed any more
	plain       *plainPeers                       // nil: this node only relays
	witnesses   *siteWitnesses                    // nil: this node only relays
	plainDone   chan struct{}                     // closed when no plain peer is answered any more
	keeper      atomic.Pointer[egress.Keeper]     // of egress slots; nil: this server does not lead
	sites       atomic.Pointer[map[string]string] // of nodes, by ID, as their records say

	problems    *problems
	metrics     *metrics
	metricsPort net.Listener // nil: none
	wake        chan struct{}
	decided     chan struct{} // the log has something new
	gossipIn    chan gossip.Packet
	down        chan downOrder

	knocks     knocks
	before     []identity.ID // members known from the disk at the start, sorted
	socketOpen bool          // the API's socket is this agent's
	ended      bool          // somebody asked for the end, or the cluster did by revoking this node

	phase          atomic.Value // string
	clock          atomic.Int64 // this host's clock minus the leader's, ns
	clockSeen      atomic.Bool
	heard          instant.Instant              // when the log was last heard of
	asking         atomic.Bool                  // the servers, at the port for joiners
	revokedBy      atomic.Pointer[revokedError] // a server said that this node was revoked
	writes         atomic.Uint64
	netcheck       atomic.Pointer[candidate.Result]
	controlLimiter admission.Limiter                 // of the control net's port on overlay addresses
	packetKeys     sync.Map                          // WireGuard key of a member -> key of control packets with it
	stats          atomic.Pointer[tunnelStats]       // as the device has it
	wishes         atomic.Pointer[part.Wishes]       // of the parts, for this host
	sitePlan       atomic.Pointer[sites.Plan]        // nil: not made yet
	placed         atomic.Pointer[placed]            // nil: it gossips with everybody, as all do
	siteEvents     atomic.Pointer[siteEvents]        // by that plan; nil: not made yet
	rpc            atomic.Pointer[consensus.Service] // what this node answers to others; nil: not served yet
	forced         *forced.Step                      // nil: this node only relays, or has not opened discovery yet
	// ownAddresses is nil when forced is.
	ownAddresses *hostaddr.Step
	portmap      *portmap.Step     // nil when forced is
	imds         *candidate.Switch // nil when forced is
	pairKeys     projection.Keys
	rekeys       rekey.Peers   // of peers
	rekeying     rekey.Own     // this host's own
	lazy         atomic.Bool   // a large mesh: pairs without traffic are idle
	stale        atomic.Bool   // the newest Spec is to be applied, also if it is the same again
	applied      atomic.Bool   // a Spec has been applied without error
	planeStands  chan struct{} // closed by planeUp once it has
	planeUp      sync.Once
	serves       chan struct{} // closed by servesOnce once pods can start
	servesOnce   sync.Once
	bootID       string // of the kernel
	freshBoot    bool   // pods have not been able to start in it yet

	profiling sync.Mutex // held while a profile is taken

	mu        sync.Mutex // guards what the loop leaves for the API to read
	spec      dataplane.Spec
	published *skeinv1.Record

	loop  loopState // the loop's alone
	reach atomic.Pointer[reach]

	leaderChanges leaderChanges
	hops          hopWatch
}

// Run starts the agent and returns when it was told to stop, or could not start, or cannot go on. An error that is
// ErrFinal says that it is not to be started again unless somebody asks for it.
func Run(ctx context.Context, opts Options) error {
	a := &Agent{
		opts: opts, cfg: opts.Config, log: opts.Log, started: time.Now(), lag: cmp.Or(opts.Lag, new(lag.Meter)),
		wake: make(chan struct{}, 1), decided: make(chan struct{}, 1),
		gossipIn: make(chan gossip.Packet, 1024), down: make(chan downOrder),
		planeStands: make(chan struct{}),
		serves:      make(chan struct{}),
		problems:    newProblems(),
		numbers:     opts.Config.Dataplane.Numbers(),
	}
	a.heard.Set(a.started)
	a.live.open(a.cfg)
	a.phase.Store(PhaseStarting)
	if err := checkHost(); err != nil {
		return err
	}
	defer a.removeSocket()
	held, unlock, err := lockHost(a.cfg, !a.relayOnly())
	if err != nil {
		return err
	}
	defer unlock()
	a.claims, a.links.OfAgents = held, held.OfAgents
	if a.metricsPort, err = listenMetrics(a.conf().Ports.Metrics); err != nil {
		return err
	}
	if a.metricsPort != nil {
		defer a.metricsPort.Close()
	}
	if err := a.loadKeys(); err != nil {
		return err
	}
	a.id = a.key.ID()
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
	if via, ok := a.reach.Load().via(id); ok {
		if a.alive(via) {
			return control.Likely // nothing tells how the rest of the way is
		}
		return control.Down
	}
	return tunnelOver(a.paths.Paths()[id], a.lazy.Load(), func() bool { return len(a.pool.Links()) > 0 }, func() bool {
		m, known := a.roster.get(id)
		p, _ := a.stats.Load().of(a.deviceKey(id, m.wg))
		return known && !p.LastHandshake.IsZero()
	})
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
	wg := a.wg.Load().DevicePublic
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
		var revoked *revokedError
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
	token, err := DecodeToken(text)
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
	r, err := join(ctx, a.key, token, node, record, cmp.Or(a.opts.JoinPatience, JoinPatience), a.numbers.MarkWG, a.log)
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
		token, err := DecodeToken(a.opts.Token)
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
