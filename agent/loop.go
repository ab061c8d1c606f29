package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/ownrecord"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/rpclimit"
	"github.com/skeinmesh/skein/agent/sitemesh"
	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
)

const (
	trafficEvery = 250 * time.Millisecond // between two readings of the counters while somebody talks
	trafficRest  = time.Second            // and while nobody does: how soon a peer that begins to talk gets heartbeats
	trafficFor   = 5 * time.Second        // how long it counts that somebody has talked
	manyPeers    = 1000                   // a reading costs in proportion to its peers: for each so many once more
	// so many members, this one included, have too many pairs to keep a path for each
	lazyFrom    = 24
	syncSpacing = 5 * time.Millisecond // gathers wake-ups that come together
	// relays that come and go in a crowd are looked at together: each look asks for every peer
	relaysSpacing = 50 * time.Millisecond
	tickEvery     = time.Second      // between two rounds that nobody asked for
	tickRest      = 5 * time.Second  // and when nothing has happened for a while
	tickBusy      = 10 * time.Second // how long it counts that something has happened
	reopenEvery   = 5 * time.Second  // until a port that is taken is tried again
	farewell      = 500 * time.Millisecond
)

// errRevoked ends an agent whose node was thrown out.
var errRevoked = errors.New("this node was revoked")

// downOrder is a request to stop.
type downOrder struct {
	purge bool
	done  chan error // told how the purge went; room for one
}

// loopState is what the loop remembers between two rounds. No other goroutine touches it.
type loopState struct {
	state       *events.State
	conf        *config.Config                        // that the parts have
	settled     *events.State                         // that the paths have the settings of
	members     map[identity.ID]identity.WireGuardKey // WireGuard's peers
	unprobed    map[identity.ID]roster.Member         // members that the prober does not know yet
	records     map[identity.ID]*skeinv1.Record
	relays      []client.Relay
	misfits     map[string]bool           // links of another CNI that status tells of
	reached     map[identity.ID]time.Time // relays with a direct path, and since when
	stun        []string
	stunOff     bool
	retry       time.Time // when a failed Apply is tried again
	reopen      time.Time // when a public host that could not open its ports tries again
	asked       time.Time // when the servers were last asked whether this node is still a member
	own         ownrecord.Clock
	ownTurn     *time.Timer // has the record looked at again
	sites       siteState
	place       placeState
	roamed      tunnels.Roaming
	unanswered  tunnels.Unanswered
	mesh        sitemesh.Mesh
	replaceable map[identity.ID]bool // leaders in whose place others can carry, as the paths know it
	replaceIn   *sites.Plan          // by which they do
	projected   projection.Last
	happened    time.Time // when more than where WireGuard sends changed last
	counted     bool      // traffic has been read once
	reading     reading
}

// run serves and reconciles until ctx ends, or the agent is told to stop, or cannot go on.
func (a *Agent) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := a.control.Bind(a.overlayAddrs()...); err != nil {
		return err
	}
	a.metrics.Serve(ctx, a.conf().Ports.Metrics, a.metricsPort)
	a.serve(ctx)
	stopAPI, err := a.serveAPI(ctx)
	if err != nil {
		return err
	}
	defer stopAPI()
	go a.watchConfig(ctx)
	a.tellReady(ctx)
	partsEnded := a.runParts(ctx)
	a.phase.Store(PhaseRunning)
	a.log.Info("agent is up", "node", a.id.String(), "name", a.name(), "cluster", a.cluster.String(), "epoch", a.epoch,
		"index", a.replica.State().Index())
	order, err := a.loopUntil(ctx)
	a.ended = err == nil || errors.Is(err, errRevoked)
	cancel()
	partsEnded()
	if a.discoverer != nil {
		<-a.discovering // it gives back what routers granted
	}
	if a.pods != nil {
		<-a.podsDone
	}
	if a.egresses != nil {
		<-a.egressDone
	}
	if a.plainDone != nil {
		<-a.plainDone
	}
	if a.relay != nil {
		err = errors.Join(err, a.relay.Close())
	}
	if l := a.listener.Load(); l != nil {
		<-l.Done()
	}
	var purged error
	if errors.Is(err, errRevoked) || order.purge {
		purged = a.purge()
	}
	if order.done != nil {
		order.done <- purged
	}
	return errors.Join(err, purged)
}

func (a *Agent) loopUntil(ctx context.Context) (downOrder, error) {
	a.loop.members, a.loop.records = map[identity.ID]identity.WireGuardKey{}, map[identity.ID]*skeinv1.Record{}
	a.loop.unprobed = map[identity.ID]roster.Member{}
	tick := time.NewTimer(tickEvery)
	defer tick.Stop()
	resting := false
	a.loop.happened = time.Now()
	traffic, trafficAt := time.NewTimer(trafficEvery), time.Now().Add(trafficEvery)
	defer traffic.Stop()
	read := func(now time.Time) { // plans the next reading of the counters
		wait := a.nextReading(now)
		traffic.Reset(wait)
		trafficAt = now.Add(wait)
	}
	planTick := func(now time.Time, ticked bool) { // a resting agent that has something to do ticks sooner
		if wait := a.nextTick(now); ticked || resting && wait == tickEvery {
			resting = wait > tickEvery
			tick.Reset(wait)
		}
	}
	var pathChanged, count <-chan struct{}
	if a.paths != nil {
		pathChanged, count = a.paths.Changed(), a.paths.Count()
	}
	a.wakeUp()
	var pace syncPace
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	relays, relaysAt := time.NewTimer(time.Hour), time.Time{} // when the paths ask for their relays again, and last did
	defer relays.Stop()
	for {
		urgent, ticked := false, false
		select {
		case <-ctx.Done():
			return downOrder{}, nil
		case order := <-a.down:
			return order, nil
		case <-due.C:
			began := time.Now()
			if err := a.sync(ctx); err != nil {
				return downOrder{}, err
			}
			now := time.Now()
			pace.ran(began, now)
			planTick(now, false)
			continue
		case <-traffic.C:
			a.opts.Procs.Look(a.lag.Late(time.Now()))
			a.readTraffic(ctx)
			read(time.Now())
			continue
		case <-count:
			a.readTraffic(ctx)
			continue
		case <-a.loop.reading.due():
			a.takeReading()
			continue
		case <-a.gossip.Changed():
		case <-pathChanged:
			urgent = true
			a.retryRelays()
			if now := time.Now(); now.Add(a.nextReading(now)).Before(trafficAt) {
				read(now)
			}
		case <-a.pool.Changed():
			now := time.Now()
			relays.Reset(max(relaysSpacing+a.lag.Late(now)-now.Sub(relaysAt), 0))
			continue
		case relaysAt = <-relays.C:
			if a.paths != nil {
				a.paths.RelaysChanged()
			}
		case <-tick.C:
			ticked = true
			a.stale.Store(true) // whatever was missed, such as a peer that roamed again
			a.checkUDPRelay()
			a.inquire(ctx)
		case <-a.decided: // a slot that moves goes on at its former owner for a moment only
			urgent = true
		case <-a.wake:
		}
		now := time.Now()
		planTick(now, ticked)
		due.Reset(pace.next(now, urgent))
	}
}

// nextReading is how long after a reading of the counters the next one is due.
func (a *Agent) nextReading(now time.Time) time.Duration {
	every := trafficRest
	if a.paths != nil && now.Sub(a.paths.TrafficAt()) < trafficFor {
		every = trafficEvery
	}
	if len(a.gone(now)) > 0 {
		every = tunnels.GoneEvery + a.lag.Late(now)
	}
	return every * time.Duration(1+min(len(a.loop.members)/manyPeers, 3))
}

// gone are the peers whose direct path was given up so lately that they may not have noticed yet.
func (a *Agent) gone(now time.Time) map[dataplane.Key]bool {
	var keys map[dataplane.Key]bool
	for id, p := range a.currentPaths() {
		wg, ok := a.loop.members[id]
		if !ok || p.Kind != path.Relay || p.Rule != path.RuleDirectDead || now.Sub(p.Since) >= tunnels.GoneFor {
			continue
		}
		if keys == nil {
			keys = make(map[dataplane.Key]bool)
		}
		keys[dataplane.Key(wg)] = true
	}
	return keys
}

// nextTick is how long to wait for the next round that nobody asks for: a second while something happens, fails, or the
// log is silent, longer on an agent at rest.
func (a *Agent) nextTick(now time.Time) time.Duration {
	for _, at := range []time.Time{a.loop.happened, a.loop.retry, a.loop.reopen} {
		if now.Sub(at) < tickBusy {
			return tickEvery
		}
	}
	if a.loop.roamed.Lately(now) {
		return tickEvery
	}
	ask := a.heard.Load().Add(silence) // when inquire has something to do
	return min(max(ask.Sub(now), tickEvery), tickRest)
}

// syncPace spaces the rounds of the loop by what they take: all of them together get a tenth of the time at most, and
// those that a changed path or the log asks for a third. A host that has too much to do takes longer for each round,
// and so does fewer.
type syncPace struct {
	ended time.Time
	took  time.Duration
	due   time.Time // the round that is planned; zero: none
}

const (
	syncShare       = 9 // a round is followed by so many times its time without one
	syncUrgentShare = 2
	syncLatest      = time.Second // and by no more than this
	syncUrgentBy    = 150 * time.Millisecond
)

// next is how long to wait for the round that is asked for now.
func (p *syncPace) next(now time.Time, urgent bool) time.Duration {
	rest := min(syncShare*p.took, syncLatest)
	if urgent {
		rest = min(syncUrgentShare*p.took, syncUrgentBy)
	}
	at := p.ended.Add(rest)
	if soonest := now.Add(syncSpacing); at.Before(soonest) {
		at = soonest
	}
	if p.due.IsZero() || at.Before(p.due) {
		p.due = at
	}
	return max(p.due.Sub(now), 0)
}

// ran takes a round that was done.
func (p *syncPace) ran(began, ended time.Time) { *p = syncPace{ended: ended, took: ended.Sub(began)} }

// retryRelays dials the relays anew that have just been reached directly: they are back.
func (a *Agent) retryRelays() {
	paths := a.currentPaths()
	now := map[identity.ID]time.Time{}
	for _, r := range a.loop.relays {
		p := paths[r.ID]
		if p.Kind != path.Direct || !p.Alive {
			continue
		}
		now[r.ID] = p.Since
		if !a.loop.reached[r.ID].Equal(p.Since) {
			a.pool.Retry(r.ID)
		}
	}
	a.loop.reached = now
}

// sync brings every part up to the newest state, records and paths, and the kernel with them.
func (a *Agent) sync(ctx context.Context) error {
	if err := a.syncState(); err != nil {
		return err
	}
	followed := a.followConfig()
	a.planSites(time.Now())
	a.followPlan(time.Now())
	a.watchLeaders()
	a.followLeaders(time.Now())
	a.followKey(ctx)
	a.syncPeers()
	a.followMTU()
	a.noteOtherCNI()
	a.syncRecords()
	a.noteSites()
	a.pods.Follow(a.loop.state)
	a.egresses.Follow(a.loop.state)
	a.plain.Follow(a.loop.state)
	a.followAddresses(ctx)
	a.publish()
	a.observe()
	applied := a.plane == nil
	if a.plane != nil && !time.Now().Before(a.loop.retry) {
		if !a.loop.counted && a.loop.state.Index() > 0 {
			a.readTraffic(ctx) // what WireGuard did before this agent, as long as it shows
			a.paths.Settle(ctx)
			a.loop.counted = true
		}
		applied = a.apply(ctx)
	}
	if applied {
		followed()
	}
	a.tellTerm(applied)
	a.notePlane()
	a.followParts()
	return nil
}

// syncState follows what the log has decided since the last round.
func (a *Agent) syncState() error {
	if r := a.revokedBy.Load(); r != nil {
		return a.revoked(r.reason)
	}
	st := a.replica.State()
	if st == a.loop.state {
		return nil
	}
	old := a.loop.state
	a.loop.state = st
	if r := st.Revoked(a.id); r != nil {
		return a.revoked(r.GetReason())
	}
	before := a.roster.Members()
	others := a.roster.Update(st)
	if others {
		for _, id := range before {
			if _, ok := a.roster.Get(id); !ok {
				a.dropMember(id)
			}
		}
	}
	if old == nil || !proto.Equal(old.GossipKeys(), st.GossipKeys()) {
		if err := a.gossip.SetKeys(st.GossipKeys()); err != nil {
			a.report("gossip keys", failure, err.Error(), "")
		}
	}
	if others {
		a.gossip.RosterChanged()
	}
	a.followServerRole()
	a.followSettings()
	a.noteLabels(st.Node(a.id))
	a.noteState(st)
	return nil
}

// syncPeers has a path and a probe key for each of WireGuard's peers, and for nobody else.
func (a *Agent) syncPeers() {
	reach, now := a.reach.Load(), map[identity.ID]identity.WireGuardKey{}
	peers := slices.Values(a.roster.Members()) // this node included
	if !reach.Full() {
		peers = func(yield func(identity.ID) bool) {
			if yield(a.id) {
				reach.Peers()(yield)
			}
		}
	}
	for id := range peers {
		m, ok := a.roster.Get(id)
		if !ok {
			continue
		}
		now[id] = m.WireGuard
		if known, ok := a.loop.members[id]; id != a.id && (!ok || known != m.WireGuard) {
			a.loop.unprobed[id] = m
			if a.paths != nil && !ok {
				delete(a.loop.records, id) // the paths are to hear of it
				a.paths.Expect(id)
			}
		}
	}
	for id := range a.loop.members {
		if _, ok := now[id]; !ok {
			a.handshakes.Leave(id, time.Now())
			a.dropPath(id)
		}
	}
	lazy := a.conf().LazyPaths != "off" && len(now) >= lazyFrom
	a.loop.members = now
	if a.paths != nil && (a.loop.settled != a.loop.state || a.lazy.Swap(lazy) != lazy) {
		a.loop.settled = a.loop.state
		a.lazy.Store(lazy)
		a.pathSettings(lazy)
	}
}

// pathSettings tells the paths how the mesh and this host want them.
func (a *Agent) pathSettings(lazy bool) {
	st := a.loop.state
	set := st.Settings()
	s := path.Settings{
		DirectRetry: seconds(set.GetDirectRetryIntervalSeconds()), Keepalive: seconds(set.GetPersistentKeepaliveSeconds()),
		Exclude: projection.Overlays(st.Cluster()), MTU: a.linkMTU(), Lazy: lazy,
	}
	if own := a.conf().DirectRetryIntervalSeconds; own > 0 {
		s.DirectRetry = seconds(own)
	}
	s.HandshakeTimeout = seconds(cmp.Or(a.conf().HandshakeTimeoutSeconds, set.GetHandshakeTimeoutSeconds()))
	a.predictionSettings(set, &s)
	a.settings.Store(&s)
	a.paths.SetSettings(s)
}

func (a *Agent) revoked(reason string) error {
	return fmt.Errorf("%w (%s): its links are removed; move %s away to get a new identity, and join with a new token",
		errRevoked, api.ReasonText(reason), a.cfg.StateDir)
}

func seconds(n uint32) time.Duration { return time.Duration(n) * time.Second }

// answerProbes lets the prober answer the peers that WireGuard now has, and not before: a pong says that
// a handshake would be answered too, and one that is not is tried again only after five seconds.
func (a *Agent) answerProbes() {
	for id, m := range a.loop.unprobed {
		delete(a.loop.unprobed, id)
		key, err := identity.PairKey(a.wg.Load().Agreed, m.WireGuard, a.cluster, "probe")
		if err != nil {
			a.report("peer "+m.Name, warning, err.Error(),
				"its WireGuard key is unusable; revoke the node and let it join again")
			continue
		}
		a.prober.SetPeer(id, key)
		a.paths.Ready(id)
	}
}

// dropPath forgets the way to a node that is no peer any more.
func (a *Agent) dropPath(id identity.ID) {
	delete(a.loop.records, id)
	delete(a.loop.unprobed, id)
	if a.prober != nil {
		a.prober.RemovePeer(id)
		a.paths.RemovePeer(id)
	}
	a.proxies.Remove(id)
}

// dropMember forgets a node that has left the mesh.
func (a *Agent) dropMember(id identity.ID) {
	a.dropPath(id)
	a.pool.Forget(id)
	if a.relay != nil {
		a.relay.Kick(id)
	}
	// New streams are refused from now on. Those that are open live a moment longer: by one of them the
	// node itself may hear that it was revoked, and end.
	time.AfterFunc(farewell, func() { a.control.Kick(id) })
}

// syncRecords follows what the members say of themselves.
func (a *Agent) syncRecords() {
	var relays []client.Relay
	var stun []string
	spare := map[netip.AddrPort]identity.ID{}
	records := a.gossip.Records()
	for id := range a.loop.records {
		if _, here := records[id]; !here { // it is for the node's own site alone now
			delete(a.loop.records, id)
			a.pool.SetPeerLinks(id, nil)
		}
	}
	for id, e := range records {
		r := e.Record
		key, ok := a.roster.Key(id)
		if !ok {
			continue
		}
		if r.GetRelay() != nil {
			relays = append(relays, client.Relay{ID: id, Addresses: r.GetRelay().GetAddresses(), Key: key,
				Order: a.loop.state.Node(id).GetAdmittedAt()})
		}
		if id == a.id {
			continue
		}
		stun = append(stun, r.GetStunAddresses()...)
		if len(r.GetStunAddresses()) > 0 {
			for _, at := range publicPorts(r) {
				spare[at] = id
			}
		}
		if a.loop.records[id] == r {
			continue
		}
		a.loop.records[id] = r
		links := make([]client.Link, 0, len(r.GetRelayLinks()))
		for _, l := range r.GetRelayLinks() {
			if rid, err := identity.ParseID(l.GetNodeId()); err == nil {
				links = append(links, client.Link{Relay: rid, RTT: time.Duration(l.GetRttMicros()) * time.Microsecond})
			}
		}
		a.pool.SetPeerLinks(id, links)
		a.checkHash(id, r)
		if a.paths != nil && r.GetRole() != gossip.RoleRelay && a.reach.Load().Peer(id) {
			a.paths.SetPeer(id, r)
		}
	}
	slices.SortFunc(relays, func(x, y client.Relay) int { return x.ID.Compare(y.ID) })
	same := func(x, y client.Relay) bool {
		return x.ID == y.ID && slices.Equal(x.Addresses, y.Addresses) && x.Key.Equal(y.Key)
	}
	if !slices.EqualFunc(relays, a.loop.relays, same) {
		a.loop.relays = relays
		known := make(map[identity.ID]bool, len(relays))
		for _, r := range relays {
			known[r.ID] = true
		}
		a.relayIDs.Store(&known)
		a.pool.SetRelays(relays)
		if a.paths != nil {
			a.paths.RelaysChanged()
		}
	}
	stun = stunServers(*a.conf(), a.loop.state.Settings(), stun)
	slices.Sort(stun)
	stun = slices.Compact(stun)
	off := !stunOn(*a.conf(), a.loop.state.Settings())
	if a.discoverer != nil && (!slices.Equal(stun, a.loop.stun) || off != a.loop.stunOff) {
		a.loop.stun, a.loop.stunOff = stun, off
		a.reflexive.SetServers(stun, off)
	}
	if a.reflexive != nil {
		a.asked.peersAt(spare)
		a.reflexive.SetSpare(slices.SortedFunc(maps.Keys(spare), netip.AddrPort.Compare))
	}
}

// serve starts what runs beside the loop.
func (a *Agent) serve(ctx context.Context) {
	go a.watchState(ctx)
	go a.followLinks(ctx)
	go a.follow(ctx)
	go a.serveRPC(ctx)
	go a.announceSchema(ctx)
	var able func(context.Context) error
	if a.pods != nil {
		able = a.pods.Able
		a.podsDone = make(chan struct{})
		l := a.pods.Listen()
		go func() {
			defer close(a.podsDone)
			a.pods.Run(ctx, l)
		}()
	}
	go a.podReady.Run(ctx, able, podready.LookEvery)
	if a.egresses != nil {
		a.egressDone = make(chan struct{})
		go func() {
			defer close(a.egressDone)
			a.egresses.Run(ctx)
		}()
	}
	if a.plain != nil {
		a.plainDone = make(chan struct{})
		go func() {
			defer close(a.plainDone)
			a.plain.Run(ctx)
		}()
	}
	if l := a.listener.Load(); l != nil {
		go l.Serve(ctx)
	}
	if a.socket != nil {
		go a.socket.Serve(a.prober.Handle)
	}
	if a.discoverer != nil {
		a.discovering = make(chan struct{})
		go func() {
			defer close(a.discovering)
			a.discoverer.Run(ctx)
		}()
	}
}

// watchState wakes the loop for every change of the agreed state.
func (a *Agent) watchState(ctx context.Context) {
	for index := a.replica.State().Index(); ; index = a.replica.State().Index() {
		if a.replica.Wait(ctx, index) != nil {
			return
		}
		select {
		case a.decided <- struct{}{}:
		default:
		}
	}
}

// followLinks wakes the loop for every change of this host's links.
func (a *Agent) followLinks(ctx context.Context) {
	if err := a.links.Follow(ctx, a.wakeUp); err != nil {
		a.log.Warn("links are read twice a second instead", "error", err)
	}
}

// rpcMux is all that other nodes may ask. The local API is not among it.
func (a *Agent) rpcMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle(a.rpcService().Handler())
	mux.Handle(a.egressService().Handler())
	return mux
}

// serveRPC answers the other nodes.
func (a *Agent) serveRPC(ctx context.Context) {
	srv := consensus.NewHTTPServer(rpclimit.New(a.rpcMux(), a.votes, a.metrics.RPCRefused), a.log)
	context.AfterFunc(ctx, func() { srv.Close() })
	if err := srv.Serve(consensus.PlainListener(a.control.Listen(identity.ALPNRPC))); err != nil &&
		!errors.Is(err, http.ErrServerClosed) && ctx.Err() == nil {
		a.report("rpc", failure, err.Error(), "restart the agent")
	}
}

// onPacket takes a packet of the control net.
func (a *Agent) onPacket(from identity.ID, channel byte, b []byte) {
	switch channel {
	case control.ChannelGossip:
		select {
		case a.gossipIn <- gossip.Packet{From: from, Data: b, At: time.Now()}:
		default: // memberlist is far behind: a lost packet, as UDP has them
		}
	case control.ChannelSignal:
		a.takeSignal(from, b)
	}
}

func (a *Agent) sendSignal(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendPacket, peer, s)
}

// sendSignalRelayed sends a signal beside the tunnel.
func (a *Agent) sendSignalRelayed(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendRelayed, peer, s)
}

// sendSignalTunnelled sends a signal by the tunnel alone.
func (a *Agent) sendSignalTunnelled(peer identity.ID, s *skeinv1.Signal) error {
	return a.signalBy(a.control.SendTunnelled, peer, s)
}

func (a *Agent) signalBy(send func(identity.ID, byte, []byte) error, peer identity.ID, s *skeinv1.Signal) error {
	s.From = a.id.String()
	b, err := proto.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode a signal: %w", err)
	}
	return send(peer, control.ChannelSignal, b)
}

func (a *Agent) takeSignal(from identity.ID, b []byte) {
	s, err := decodeSignal(from, b)
	if err != nil {
		a.log.Debug("signal refused", "from", from.String(), "error", err)
		return
	}
	if b := s.GetBirthday(); b != nil {
		a.predictor.TakeSignal(from, b)
	}
	if s.GetKnock() != nil && a.handshakes.Wish(from, time.Now()) {
		a.wakeUp()
	}
	if r := s.GetRekey(); r != nil {
		a.takeRekey(from, r)
	}
	if p := s.GetPunch(); p != nil && a.paths != nil {
		a.paths.Punch(from, p)
	}
}

// onForeign notes that somebody else changed what is ours, and that it was repaired.
func (a *Agent) onForeign(subsystem string) {
	a.metrics.Repaired.WithLabelValues(subsystem).Inc()
	a.journal.Append(&skeinv1.JournalEntry{Time: time.Now().UnixNano(),
		Body: &skeinv1.JournalEntry_Reconciled{Reconciled: &skeinv1.Reconciled{Subsystem: subsystem, Foreign: true,
			Cause: "changed by somebody else, and repaired"}}})
}

// report sets or clears a problem and logs it once.
func (a *Agent) report(subject, severity, message, advice string) {
	if !a.problems.set(subject, severity, message, advice) {
		return
	}
	if message == "" {
		a.log.Info("problem is gone", "subject", subject)
		return
	}
	a.log.Warn("problem", "subject", subject, "severity", severity, "message", message)
}

// purge removes everything that is ours from the kernel.
func (a *Agent) purge() error {
	relayed := errors.Join(a.closeRelayTable(true), a.egresses.Purge(), podready.Purge(*a.conf()))
	if a.plane == nil {
		return relayed
	}
	if err := a.plane.Close(); err != nil {
		return errors.Join(relayed, err)
	}
	a.plane = nil
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(relayed,
		plane.Purge(ctx, plane.Options{Numbers: a.numbers, Driver: a.cfg.Dataplane.WireGuard, Log: a.log}))
}

// wait pauses for d or until ctx ends, and tells whether to go on.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
