package agent

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/journal"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/roster"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane/linkhold"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/sock"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
)

const (
	journalEntries = 50_000
	createTimeout  = 30 * time.Second
)

// open makes this node a member and starts every part. After an error, too, close ends what it has started.
func (a *Agent) open(ctx context.Context) error {
	var err error
	if a.replica, err = consensus.OpenReplica(a.cfg.StateDir, a.log); err != nil {
		return err
	}
	if !a.relayOnly() {
		if err := a.claimNumbers(a.replica.State().Index() > 0); err != nil {
			return err
		}
		a.leaveNumbers(ctx)
		if !a.keys.Keys().Settled() { // the earlier run ended during a key change, perhaps while packets were held
			if err := linkhold.Remove(a.numbers.RekeyNftTable); err != nil {
				return err
			}
		}
	}
	joined, create, err := a.enter(ctx)
	if err != nil {
		return err
	}
	if a.epoch, err = gossip.NextEpoch(a.cfg.StateDir); err != nil {
		return err
	}
	if joined == nil && !create {
		a.before = a.membersBefore()
	}
	a.roster = roster.New(a.replica.State())
	a.attachKeys()
	a.metrics = newMetrics(a)
	a.podReady, err = podready.Open(podready.Config{RunDir: a.cfg.RunDir, Conf: a.confChanged, Stands: a.planeStands,
		Report: partHost{a}.Report, Log: a.log})
	if err != nil {
		return err
	}
	if err := a.openParts(); err != nil {
		return err
	}
	a.openRelayClient()
	if a.control, err = control.New(controlConfig(a)); err != nil {
		return err
	}
	a.conns, a.leaseConns = consensus.NewConns(a.control), consensus.NewHurriedConns(a.control)
	a.client = consensus.NewClient(consensus.ClientConfig{
		Self: a.id, Replica: a.replica, Dialer: a.control, Conns: a.conns, Local: a.server.Load, Log: a.log,
		OnHeartbeat: a.onHeartbeat, OnDiverged: a.onDiverged,
		Leaders: a.eventLeaders, Passes: a.passesEvents,
	})
	if create {
		if err := a.create(ctx); err != nil {
			return err
		}
	}
	if a.cluster, err = identity.ParseClusterID(a.replica.State().Cluster().GetId()); err != nil {
		return fmt.Errorf("agreed state: %w", err)
	}
	a.roster.Update(a.replica.State())
	if err := a.openRelayServer(); err != nil {
		return err
	}
	if err := a.openGossip(joined); err != nil {
		return err
	}
	if joined != nil {
		a.noteClock(joined.GetTime())
	}
	if !a.relayOnly() {
		if err := a.openPaths(ctx); err != nil {
			return err
		}
	}
	a.followServerRole()
	return nil
}

func (a *Agent) relayOnly() bool { return a.opts.Role == "relay" }

// create creates the cluster, with this node as its first server.
func (a *Agent) create(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	if err := a.startServer(true); err != nil {
		return err
	}
	id := a.making
	node, err := a.newNode()
	if err != nil {
		return err
	}
	node.Server = true
	_, err = a.client.Propose(ctx, &skeinv1.Command{RequestId: consensus.NewRequestID(),
		Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
			ClusterId: id.String(), OverlayIpv4: a.cfg.Overlay.IPv4, FirstNode: node, Settings: &skeinv1.Settings{
				HandshakeTimeoutSeconds:    a.conf().HandshakeTimeoutSeconds,
				DirectRetryIntervalSeconds: a.conf().DirectRetryIntervalSeconds,
				BirthdayAttack:             a.cfg.NatTraversal.BirthdayAttack,
				RouteNodeAddresses:         a.conf().RouteNodeAddresses != nil && *a.conf().RouteNodeAddresses,
			},
		}}})
	if err != nil {
		return fmt.Errorf("create the cluster: %w", err)
	}
	if err := a.replica.Wait(ctx, 0); err != nil {
		return fmt.Errorf("create the cluster: %w", err)
	}
	a.log.Info("cluster created", "cluster", id.String(), "node", a.id.String())
	return nil
}

func (a *Agent) startServer(bootstrap bool) error {
	s, err := consensus.StartServer(consensus.ServerConfig{
		Dir: a.cfg.StateDir, ID: a.id, Dialer: a.control, Listener: a.control.Listen(identity.ALPNRaft),
		Replica: a.replica, Log: a.log, Bootstrap: bootstrap, Conns: a.conns, OnLead: a.lead, Lag: a.lag,
	})
	if err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	a.server.Store(s)
	return nil
}

// followServerRole starts or ends this node's part in Raft according to the agreed state.
func (a *Agent) followServerRole() {
	running := a.server.Load()
	switch {
	case running == nil && a.isServer():
		if err := a.startServer(false); err != nil {
			a.report("server", failure, err.Error(), "this node takes no part in decisions until it is repaired; see "+
				"docs/recovery.md")
			return
		}
		a.report("server", "", "", "")
	case running != nil && !a.isServer():
		a.server.Store(nil)
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := running.Shutdown(ctx); err != nil {
			a.log.Warn("stopping the server failed", "error", err)
		}
	}
}

// controlConfig connects the control net with the rest of the agent.
func controlConfig(a *Agent) control.Config {
	return control.Config{
		Key: a.key, Roster: a.roster, Relay: a.pool, Port: a.cfg.Ports.Control, Link: a.cfg.Dataplane.Link,
		Tunnel: a.tunnel, Via: a.passedBy, PacketKey: a.packetKey, OnPacket: a.onPacket, OnEcho: a.onEcho,
		Log: a.log.With("component", "control"), Lag: a.lag,
		Coded: func(id identity.ID) bool { return a.roster.Coded(a.id, id) },
		Enter: func(from netip.Addr) (func(), error) {
			return a.controlLimiter.EnterAs(time.Now(), netip.PrefixFrom(from, from.BitLen()))
		},
	}
}

// packetKey is the key of control packets between this node and a member. It is derived from their WireGuard keys, so
// key rotation changes it.
func (a *Agent) packetKey(id identity.ID) ([32]byte, bool) {
	m, ok := a.roster.Get(id)
	if !ok {
		return [32]byte{}, false
	}
	if k, ok := a.packetKeys.Load(m.WireGuard); ok {
		return k.([32]byte), true
	}
	cluster, err := identity.ParseClusterID(a.replica.State().Cluster().GetId())
	if err != nil {
		return [32]byte{}, false
	}
	k, err := identity.PairKey(a.keys.Keys().Agreed, m.WireGuard, cluster, "control packet")
	if err != nil {
		return [32]byte{}, false
	}
	a.packetKeys.Store(m.WireGuard, k)
	return k, true
}

func (a *Agent) openRelayClient() {
	a.pool = client.NewPool(client.PoolConfig{
		Self: a.id, Key: a.key, Control: sock.Mark(a.numbers.MarkWG), Log: a.log,
		// The pool reads the next frames into the same buffer; gossip takes its packets later.
		OnPacket:   func(from identity.ID, channel byte, b []byte) { a.control.TakePacket(from, channel, b) },
		OnStream:   func(c net.Conn, from identity.ID) { a.control.TakeStream(c, from) },
		OnReserved: a.onReserved,
		Lag:        a.lag,
		Witness:    a.votes,
		OnNoWay: func(far, origin, node identity.ID) {
			if a.listener.Load() != nil {
				a.relay.NoWay(far, origin, node)
			}
		},
		Known: func(id identity.ID) bool { _, ok := a.roster.Key(id); return ok && a.paths != nil },
	})
	wg := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.cfg.Ports.WireGuard)
	a.proxies = client.NewProxies(a.pool, func() netip.AddrPort { return wg }, client.ProxyOptions{
		Known: func(id identity.ID) bool { _, ok := a.roster.Key(id); return ok && !a.relayOnly() },
		OnNew: func(identity.ID, netip.AddrPort) { a.wakeUp() },
		Avoid: []uint16{a.cfg.Ports.WireGuard, a.cfg.Ports.Control, a.cfg.Ports.Stun},
		Log:   a.log,
	})
}

// opensPort reports whether this node's port for relay sessions and joins may be open: not if relaying is off and
// nothing else needs the port.
func (a *Agent) opensPort() bool {
	return a.conf().Relay != config.Off || a.isServer() || a.relayOnly()
}

// relayLimits converts the configured limits to the relay's units.
func relayLimits(l config.RelayLimits) server.Limits {
	return server.Limits{
		MaxSessions: int(l.Sessions), MaxStreamsPerClient: int(l.ClientStreams), MaxMemory: int(l.MemoryMiB) << 20,
		ClientBytes: int(l.ClientMbit) * 1e6 / 8, ClientPackets: int(l.ClientPackets),
	}
}

// openRelayServer opens the port for relay sessions and joins, on servers and on nodes that relay.
func (a *Agent) openRelayServer() error {
	if !a.opensPort() || a.conf().Relay == config.Auto && !a.isServer() && !a.relayOnly() && !a.hasPublicAddress() {
		return nil
	}
	l, err := admission.Listen(admission.Config{
		Key: a.key, Member: a.roster.Key, Address: ":" + strconv.Itoa(int(a.cfg.Ports.Relay)), Log: a.log,
		Handlers: admission.Handlers{
			identity.ALPNRelay:  func(_ context.Context, c *tls.Conn, peer identity.ID) { a.relay.HandleSession(c, peer) },
			identity.ALPNSplice: func(_ context.Context, c *tls.Conn, peer identity.ID) { a.relay.HandleSplice(c, peer) },
			identity.ALPNJoin:   a.serveJoin,
		}})
	if err != nil {
		return err
	}
	udp, err := a.openUDPRelay()
	if err != nil {
		l.Close()
		return err
	}
	a.relay = server.New(server.Config{
		Self: a.id, Log: a.log, UDP: udp, Member: func(id identity.ID) bool { _, ok := a.roster.Key(id); return ok },
		Relay:   a.isRelay,
		Forward: a.pool.Forward,
		Limits:  relayLimits(a.conf().RelayLimits),
	})
	if udp != nil {
		a.udp.Store(udp)
	}
	a.listener.Store(l)
	return nil
}

func (a *Agent) openGossip(joined *skeinv1.JoinResponse) error {
	var err error
	place := a.firstPlace()
	a.gossip, err = gossip.Start(gossip.Config{
		Self: a.id, Place: place, Key: a.key, Roster: a.roster, Transport: gossipTransport{a.control},
		Streams: a.control.Listen(identity.ALPNGossip),
		Packets: a.gossipIn, Keys: a.replica.State().GossipKeys(), Dir: a.cfg.StateDir, Log: a.log,
		Epoch: a.epoch, Lag: a.lag,
		Lossy: func(id identity.ID) bool { return a.tunnel(id) == control.Up },
	})
	if err != nil {
		return err
	}
	a.resumePlace(place, time.Now())
	if joined != nil {
		_, errs := a.gossip.Merge(joined.GetRecords())
		for _, err := range errs {
			a.log.Warn("a record that came with the admission is refused", "error", err)
		}
	}
	return nil
}

// gossipTransport adapts the control net for gossip.
type gossipTransport struct{ *control.Net }

func (t gossipTransport) SendPacket(id identity.ID, b []byte) error {
	return t.Net.SendPacket(id, control.ChannelGossip, b)
}

// openPaths opens the parts that find and carry paths: journal, WireGuard, probe socket, discovery.
func (a *Agent) openPaths(ctx context.Context) error {
	var err error
	if a.journal, err = journal.Open(filepath.Join(a.cfg.StateDir, "journal.db"), journalEntries); err != nil {
		a.report("journal", warning, err.Error(), "the journal of this run is kept in memory only")
		a.journal = journal.Memory(journalEntries)
	}
	a.plans.open(a)
	a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
		Body: &skeinv1.JournalEntry_AgentStarted{AgentStarted: &skeinv1.AgentStarted{
			Version: a.opts.Version, Epoch: a.epoch, Index: a.replica.State().Index(),
		}}})
	if a.reserved, err = reservePort(a.cfg.Ports.WireGuard, a.cfg.Dataplane.Link); err != nil {
		return err
	}
	a.plane, err = plane.Open(ctx, plane.Options{
		Numbers: a.numbers, Driver: a.cfg.Dataplane.WireGuard, Log: a.log, OnDrift: a.onDrift, OnBroken: a.onBroken,
	})
	if err != nil {
		return err
	}
	socket, err := probe.Open(probe.Config{Port: int(a.cfg.Ports.WireGuard), Mark: a.numbers.MarkWG, Log: a.log})
	if err != nil {
		return err
	}
	a.socket = socket
	a.prober = probe.NewProber(probe.ProberConfig{
		Self: a.id, Epoch: a.epoch, Socket: socket, Log: a.log,
		OnPing: a.onPing, OnPong: a.onPong, OnSTUN: a.onStun, OnRelay: a.onRelay,
	})
	a.openPrediction(ctx)
	a.paths = path.NewManager(path.Config{
		Self: a.id, Prober: pinger{a}, Signal: a.sendSignal, Relays: a.pool, Journal: a.journal, Log: a.log,
		Ports: a.pool, OnLost: func(identity.ID) { a.revalidateNAT() },
		Predict: a.predictor.Wish, Lag: a.lag,
	})
	if err := a.openDiscovery(); err != nil {
		return err
	}
	if err := a.openEgresses(); err != nil {
		return err
	}
	a.plain = a.newPlainPeers()
	a.openWitnesses()
	return a.openPods()
}

// reservePort holds WireGuard's port until the device takes it, since the kernel may assign it to a socket opened
// earlier by this agent. If another program has the port, the error says so at the start. If this agent's link of an
// earlier run has it, nothing is reserved, and the link is adopted.
func reservePort(port uint16, link string) (*net.UDPConn, error) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{Port: int(port)})
	if err == nil {
		return c, nil
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		if _, e := net.InterfaceByName(link); e == nil {
			return nil, nil
		}
		return nil, fmt.Errorf("UDP port %d is taken by another program: stop it, or set ports.wireguard in the "+
			"configuration", port)
	}
	return nil, fmt.Errorf("UDP port %d: %w", port, err)
}

// releasePort frees WireGuard's port for the device.
func (a *Agent) releasePort() {
	if a.reserved != nil {
		_ = a.reserved.Close() // it has sent nothing, and nothing useful has arrived
		a.reserved = nil
	}
}

// close ends every part in the opposite order. Kernel state that works without the agent stays.
func (a *Agent) close() error {
	var errs []error
	a.predictor.Close()
	if a.egresses != nil {
		a.egresses.Clients().Close()
	}
	a.witnesses.close()
	if a.paths != nil {
		a.paths.Close()
	}
	if s := a.server.Load(); s != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		errs = append(errs, s.Shutdown(ctx))
		cancel()
	}
	if a.gossip != nil {
		a.gossip.Close()
	}
	if a.conns != nil {
		a.conns.Close()
		a.leaseConns.Close()
	}
	if a.control != nil {
		a.control.Close()
	}
	if a.proxies != nil {
		errs = append(errs, a.proxies.Close())
	}
	if a.pool != nil {
		a.pool.Close()
	}
	a.releasePort()
	if a.socket != nil {
		errs = append(errs, a.socket.Close())
	}
	errs = append(errs, a.closeRelayTable(false))
	if a.plane != nil {
		errs = append(errs, a.plane.Close())
	}
	if a.pods != nil {
		errs = append(errs, a.pods.IPAM().Close())
	}
	if a.journal != nil {
		errs = append(errs, a.journal.Close(), a.plans.close())
	}
	if a.replica != nil {
		errs = append(errs, a.replica.Close())
	}
	return errors.Join(errs...)
}
