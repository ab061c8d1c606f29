package agent

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/discovery"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/relay/client"
)

// retryRelays redials relays that have just got a direct path, since they are online again.
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

// sync updates every part, and then the kernel, to the newest state, records and paths.
func (a *Agent) sync(ctx context.Context) error {
	if err := a.syncState(); err != nil {
		return err
	}
	followed := a.followConfig()
	a.planSites(time.Now())
	a.followPlan(time.Now())
	a.watchLeaders()
	a.followLeaders(time.Now())
	a.keys.Follow(ctx, a.loop.state)
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
			a.readTraffic(ctx) // traffic from before this agent's start, as far as the counters show it
			a.paths.Settle(ctx)
			a.loop.counted = true
		}
		applied = a.apply(ctx)
	}
	if applied {
		followed()
	}
	a.announceTerm(applied)
	a.notePlane()
	a.followParts()
	return nil
}

// syncState applies what the log has decided since the last round.
func (a *Agent) syncState() error {
	if r := a.revokedBy.Load(); r != nil {
		return a.revoked(r.Reason)
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

// syncPeers gives each of WireGuard's peers, and no other node, a path and a probe key.
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
				delete(a.loop.records, id) // so that the paths get its record again
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

// pathSettings passes the settings of the mesh and of this host to the paths.
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

// answerProbes gives the prober the keys of peers that WireGuard now has. Not earlier: a pong shows that a handshake
// would be answered, too, and WireGuard repeats an unanswered one only after five seconds.
func (a *Agent) answerProbes() {
	for id, m := range a.loop.unprobed {
		delete(a.loop.unprobed, id)
		key, err := identity.PairKey(a.keys.Keys().Agreed, m.WireGuard, a.cluster, "probe")
		if err != nil {
			a.report("peer "+m.Name, warning, err.Error(),
				"its WireGuard key is unusable; revoke the node and let it join again")
			continue
		}
		a.prober.SetPeer(id, key)
		a.paths.Ready(id)
	}
}

// dropPath drops the path to a node that is no longer a peer.
func (a *Agent) dropPath(id identity.ID) {
	delete(a.loop.records, id)
	delete(a.loop.unprobed, id)
	if a.prober != nil {
		a.prober.RemovePeer(id)
		a.paths.RemovePeer(id)
	}
	a.proxies.Remove(id)
}

// dropMember drops everything about a node that has left the mesh.
func (a *Agent) dropMember(id identity.ID) {
	a.dropPath(id)
	a.pool.Forget(id)
	if a.relay != nil {
		a.relay.Kick(id)
	}
	// New streams are refused from now on. Open ones are kept for a moment: one of them may tell the node that it was
	// revoked.
	time.AfterFunc(farewell, func() { a.control.Kick(id) })
}

// syncRecords applies the members' newest records.
func (a *Agent) syncRecords() {
	var relays []client.Relay
	var stun []string
	spare := map[netip.AddrPort]identity.ID{}
	records := a.gossip.Records()
	for id := range a.loop.records {
		if _, here := records[id]; !here { // the record now reaches only the node's own site
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
			for _, at := range discovery.PublicPorts(r) {
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
	stun = discovery.StunServers(*a.conf(), a.loop.state.Settings(), stun)
	slices.Sort(stun)
	stun = slices.Compact(stun)
	off := !discovery.StunOn(*a.conf(), a.loop.state.Settings())
	if a.discovery != nil && (!slices.Equal(stun, a.loop.stun) || off != a.loop.stunOff) {
		a.loop.stun, a.loop.stunOff = stun, off
		a.discovery.STUN.SetServers(stun, off)
	}
	if a.discovery != nil {
		a.discovery.SetPeers(spare)
	}
}

// isRelay tells whether a member relays, as its record says.
func (a *Agent) isRelay(id identity.ID) bool {
	known := a.relayIDs.Load()
	return known != nil && (*known)[id]
}
