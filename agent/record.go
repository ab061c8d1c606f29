package agent

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

const (
	summaryEvery = 2 * time.Second // how often what others need not know at once may change the record
	quietForHash = 2 * time.Second // the index rests that long before its hash is published
	rttStep      = 5 * time.Millisecond
	// round-trip times that are news each second are those of a busy machine, and news is work for all
	rttEvery      = 10 * time.Second
	lateForLinks  = 100 * time.Millisecond // a process that wakes so late judges no relay
	linksStay     = 10 * time.Second       // how long the record of such a process lists a relay whose session was lost
	stateHashSize = 16
	knownHashes   = 256
)

// recordClock spaces the changes of this node's record.
type recordClock struct {
	summary time.Time // last change of the summary
	index   uint64    // newest index seen, and since when
	since   time.Time
	rtts    time.Time            // last change of a round-trip time
	lost    map[string]time.Time // listed relays without a session, by node ID, and since when
	turnAt  time.Time            // when changes so far have had their turns
	timer   *time.Timer          // looks again
	hashes  map[uint64][]byte    // of the indexes this node has published or compared, bounded
}

// ownRecord is what this node last published, never nil.
func (a *Agent) ownRecord() *skeinv1.Record {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.published == nil {
		return &skeinv1.Record{}
	}
	return a.published
}

// publish gossips this node's record if it changed: at once for what paths depend on, now and then
// for the rest.
func (a *Agent) publish() {
	now := time.Now()
	old := a.ownRecord()
	next := a.observed()
	a.followPlace(next, now)
	c := &a.loop.own
	audience := a.audience()
	crowd := unhurried(audience)
	late := a.lag.Late(now) > lateForLinks
	c.keepLinks(next, old, late, now)
	// A process that wakes late has measured itself.
	if steadyRTTs(next, old, late || !ownMoment(a.id, c.rtts, now, max(rttEvery, crowd))) {
		c.rtts = now
	}
	st := a.loop.state
	if st.Index() != c.index {
		c.index, c.since = st.Index(), now
	}
	urgent := !sameObserved(old, next)
	if urgent || ownMoment(a.id, c.summary, now, max(summaryEvery, crowd)) {
		summarise(next, a.currentPaths())
		if now.Sub(c.since) >= quietForHash {
			next.AppliedIndex, next.StateHash = st.Index(), a.hashAt(st)
		} else {
			next.AppliedIndex, next.StateHash = old.GetAppliedIndex(), old.GetStateHash()
		}
	} else {
		keepSummary(next, old)
	}
	next.Time = old.GetTime()
	if proto.Equal(old, next) {
		return
	}
	if wait := c.due(old, next, now, audience); wait > 0 {
		c.wake(wait, a.wakeUp)
		return
	}
	next.Time = now.UnixNano()
	c.summary = now
	if err := a.gossip.Publish(proto.CloneOf(next)); err != nil {
		a.report("record", failure, err.Error(), "others do not learn how to reach this node")
		return
	}
	a.report("record", "", "", "")
	a.mu.Lock()
	a.published = next
	a.mu.Unlock()
	if a.paths != nil {
		a.paths.SetSelf(next)
	}
}

// observed is the part of the record that others act on.
func (a *Agent) observed() *skeinv1.Record {
	r := a.claimed()
	if n := a.netcheck.Load(); n != nil {
		r.NatType, r.Candidates, r.Traits = n.NAT, n.Candidates, n.Traits()
	}
	r.Candidates = append(slices.Clip(r.Candidates), a.reflection.stable(r.Candidates,
		len(a.roster.Members()) == 2, time.Now())...)
	a.guessedRecord(r)
	offers, at := a.offers(), a.joinAddresses()
	if a.listener.Load() != nil && (a.conf().Relay != config.Off || a.relayOnly()) && len(offers) > 0 {
		r.Relay = &skeinv1.RelayOffer{Addresses: at, Udp: a.udpDriver()}
	}
	if r.Relay == nil && a.listener.Load() != nil && a.isServer() {
		r.JoinAddresses = at
	}
	if a.stun.Load() != nil && a.opensPort() {
		r.StunAddresses = withPort(slices.DeleteFunc(offers, func(h string) bool {
			ip, err := netip.ParseAddr(h)
			return err != nil || !addr.Public(ip)
		}), a.cfg.Ports.Stun)
	}
	for _, l := range a.pool.Links() {
		r.RelayLinks = append(r.RelayLinks, &skeinv1.RelayLink{NodeId: l.Relay.String(),
			RttMicros: uint32(l.RTT.Microseconds())})
	}
	slices.SortFunc(r.RelayLinks, func(x, y *skeinv1.RelayLink) int {
		return strings.Compare(x.GetNodeId(), y.GetNodeId())
	})
	if r.Leads = a.loop.sites.course.Told(); r.Leads > 0 {
		r.LeaderSlot = a.sitePlan.Load().Slot()
	}
	a.plain.Record(r)
	a.witnesses.record(r)
	return r
}

// claimed is the part that follows from the configuration alone.
func (a *Agent) claimed() *skeinv1.Record {
	own, c := a.host(), a.conf()
	r := &skeinv1.Record{
		WireguardKey: a.wg.Load().DevicePublic[:], Site: own.Site, LeaderWish: own.Leader, ForcedEndpoint: own.ForceEndpoint,
		PersistentKeepalive: own.PersistentKeepalive, Labels: c.Labels,
		Version: a.opts.Version, MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax,
	}
	r.BirthdayAttack, r.KubernetesNode = own.BirthdayAttack, own.KubernetesNode
	if own.InternalIP.IsValid() {
		r.InternalIp = own.InternalIP.String()
	}
	r.NodeAddresses = c.NodeAddresses
	if slices.Contains(c.Advertise, config.NodeAddresses) {
		addrs := hostaddr.Offered(a.links.Addresses(a.cfg.Dataplane.Link), own.InternalIP)
		r.NodeAddresses = withOwn(c.NodeAddresses, addrs)
	}
	if a.relayOnly() {
		r.Role = gossip.RoleRelay
	}
	return r
}

// withOwn adds a host's private addresses to the networks behind it, sorted, those that are not in one of them already.
func withOwn(networks []string, addrs []netip.Addr) []string {
	out := slices.Clone(networks)
	sorted := slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)
	for _, a := range slices.Compact(sorted) {
		p := netip.PrefixFrom(a, a.BitLen())
		if addr.Private(p) && !events.Covered(p.String(), networks) {
			out = append(out, p.String())
		}
	}
	return out
}

// firstRecord is what a joiner says of itself before any part of it runs: its links' addresses, and
// whether it will relay. It has an epoch of its own, so that the agent's real record comes after it.
func (a *Agent) firstRecord() (*skeinv1.SignedRecord, error) {
	epoch, err := gossip.NextEpoch(a.cfg.StateDir)
	if err != nil {
		return nil, err
	}
	r := a.claimed()
	r.NodeId, r.Epoch, r.Seq, r.Time = a.id.String(), epoch, 1, time.Now().UnixNano()
	addrs := hostaddr.Offered(a.links.Addresses(a.cfg.Dataplane.Link), a.host().InternalIP)
	if !a.relayOnly() {
		for _, ip := range addrs {
			r.Candidates = append(r.Candidates, &skeinv1.Candidate{
				Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: netip.AddrPortFrom(ip, a.cfg.Ports.WireGuard).String(),
				Priority: candidate.PriorityHost, Source: "interface",
			})
		}
	}
	if at := a.joinAddresses(); len(at) > 0 && (a.conf().Relay == config.On || a.relayOnly() ||
		a.conf().Relay == config.Auto && a.hasPublicAddress()) {
		r.Relay = &skeinv1.RelayOffer{Addresses: at}
	}
	return gossip.Sign(a.key, r)
}

// summarise counts the peers of each transport, and says it in one word.
func summarise(r *skeinv1.Record, paths map[identity.ID]path.Path) {
	for _, p := range paths {
		switch transport(p) {
		case "direct":
			r.PeersDirect++
		case "relay":
			r.PeersRelay++
		}
	}
	switch {
	case r.PeersDirect > 0 && r.PeersRelay > 0:
		r.TransportMode = "mixed"
	case r.PeersDirect > 0:
		r.TransportMode = "direct"
	case r.PeersRelay > 0:
		r.TransportMode = "relay"
	}
}

func keepSummary(next, old *skeinv1.Record) {
	next.PeersDirect, next.PeersRelay, next.TransportMode = old.GetPeersDirect(), old.GetPeersRelay(),
		old.GetTransportMode()
	next.AppliedIndex, next.StateHash = old.GetAppliedIndex(), old.GetStateHash()
}

// keepLinks keeps a relay in the record that is to be published for a while after its session was lost, where no other
// is listed or this process is late: sessions come and go on a host with too much to do, and each new record makes all
// others choose anew. Whoever sends by that relay meanwhile is told by it, and goes another way.
func (c *recordClock) keepLinks(next, old *skeinv1.Record, late bool, now time.Time) {
	lost := map[string]time.Time{}
	if len(next.GetRelayLinks()) == 0 || late || len(c.lost) > 0 {
		for _, l := range old.GetRelayLinks() {
			if slices.ContainsFunc(next.GetRelayLinks(), func(n *skeinv1.RelayLink) bool {
				return n.GetNodeId() == l.GetNodeId()
			}) {
				continue
			}
			since, known := c.lost[l.GetNodeId()]
			if !known {
				since = now
			}
			if now.Sub(since) < linksStay {
				lost[l.GetNodeId()] = since
				next.RelayLinks = append(next.RelayLinks, proto.CloneOf(l))
			}
		}
	}
	c.lost = lost
	slices.SortFunc(next.RelayLinks, func(x, y *skeinv1.RelayLink) int {
		return strings.Compare(x.GetNodeId(), y.GetNodeId())
	})
}

// A record is news for all who get it, so in a large mesh all of them have theirs in turns: some changes at once, such
// as a host has that moves, and then one for so long.
const (
	turnPerMember = 50 * time.Millisecond
	turnMost      = 5 * time.Second
	turnBurst     = 2
)

// unhurried is what is between two changes of a record that nobody waits for: there are as many such records as
// members that exchange theirs, and as many who get each. Two hundred of a kilobyte that change each minute would cost
// each member 7 kB a second, as they did one among 10,000; each ten minutes they cost 0.7.
func unhurried(members int) time.Duration {
	return min(time.Duration(members*members)*unhurriedPerPair, unhurriedMost)
}

const (
	unhurriedPerPair = 25 * time.Millisecond
	unhurriedMost    = 10 * time.Minute
)

// ownMoment reports whether this node may change anew what nobody waits for: it may so often, at moments of its own.
// Hosts that have started together, as after a power cut, do not all change their records at once.
func ownMoment(id identity.ID, last, now time.Time, every time.Duration) bool {
	phase := int64(binary.BigEndian.Uint64(id[:8]) % uint64(every))
	moment := func(t time.Time) int64 { return (t.UnixNano() - phase) / int64(every) }
	return last.IsZero() || moment(now) != moment(last)
}

// turn tells how long a change of the record has to wait where so many records are exchanged, zero: not, and counts it
// then.
func (c *recordClock) turn(now time.Time, members int) time.Duration {
	spacing := min(turnPerMember*time.Duration(members), turnMost)
	at := c.turnAt
	if at.Before(now) {
		at = now
	}
	if wait := at.Sub(now) - turnBurst*spacing; wait > 0 {
		return wait
	}
	c.turnAt = at.Add(spacing)
	return 0
}

// due is turn for a change from one record to another. What moves the traffic of others has its turn at once: packets
// are lost until they know.
func (c *recordClock) due(old, next *skeinv1.Record, now time.Time, members int) time.Duration {
	wait := c.turn(now, members)
	silent := func(a, b *skeinv1.SilentLeader) bool { return proto.Equal(a, b) }
	if old.GetLeads() != next.GetLeads() || old.GetLeaderSlot() != next.GetLeaderSlot() ||
		!slices.EqualFunc(old.GetSilentLeaders(), next.GetSilentLeaders(), silent) {
		return 0
	}
	return wait
}

// wake has the record looked at again after a while, once.
func (c *recordClock) wake(wait time.Duration, look func()) {
	if c.timer == nil {
		c.timer = time.AfterFunc(wait, look)
		return
	}
	c.timer.Reset(wait)
}

// steadyRTTs gives the links of a record that is to be published their old round-trip times where the new ones are not
// so different, or where no change is due yet. It reports whether one has changed.
func steadyRTTs(next, old *skeinv1.Record, notYet bool) (changed bool) {
	for _, l := range next.GetRelayLinks() {
		i := slices.IndexFunc(old.GetRelayLinks(), func(o *skeinv1.RelayLink) bool { return o.GetNodeId() == l.GetNodeId() })
		if i < 0 {
			continue
		}
		was := old.GetRelayLinks()[i].GetRttMicros()
		d := time.Duration(int64(l.GetRttMicros())-int64(was)) * time.Microsecond
		if notYet || d.Abs() < max(rttStep, time.Duration(was)*time.Microsecond/4) {
			l.RttMicros = was
		} else {
			changed = true
		}
	}
	return changed
}

// sameObserved compares two records without their summary.
func sameObserved(a, b *skeinv1.Record) bool {
	x, y := proto.CloneOf(a), proto.CloneOf(b)
	for _, r := range []*skeinv1.Record{x, y} {
		keepSummary(r, &skeinv1.Record{})
		r.NodeId, r.Epoch, r.Seq, r.Time = "", 0, 0, 0
	}
	return proto.Equal(x, y)
}

// offers are the addresses at which others can open a connection to this host, public ones first.
func (a *Agent) offers() []string {
	var pub, private []string
	if host, _, err := net.SplitHostPort(a.host().ForceEndpoint); err == nil {
		pub = append(pub, host)
	}
	add := func(ip netip.Addr) {
		if addr.Public(ip) {
			pub = append(pub, ip.String())
		} else {
			private = append(private, ip.String())
		}
	}
	if n := a.netcheck.Load(); n != nil {
		for _, ip := range elastic(n) {
			add(ip)
		}
		for _, c := range n.Candidates {
			if ap, err := netip.ParseAddrPort(c.GetAddress()); err == nil &&
				c.GetType() == skeinv1.CandidateType_CANDIDATE_TYPE_HOST {
				add(ap.Addr())
			}
		}
	} else {
		for _, ip := range hostaddr.Offered(a.links.Addresses(a.cfg.Dataplane.Link), a.host().InternalIP) {
			add(ip)
		}
	}
	// A relay that was asked for, and a server that others join at, may be for one network alone.
	if a.conf().Relay == config.On || a.relayOnly() || len(pub) == 0 && a.isServer() {
		pub = append(pub, private...)
	}
	var out []string
	for _, h := range pub {
		if !slices.Contains(out, h) {
			out = append(out, h)
		}
	}
	return out
}

// seeds are where a joiner can ask: this node first, then every member that relays or is a server.
func (a *Agent) seeds() []*skeinv1.JoinToken_Seed {
	var out []*skeinv1.JoinToken_Seed
	if a.listener.Load() != nil {
		for _, at := range a.joinAddresses() {
			out = append(out, &skeinv1.JoinToken_Seed{Address: at, IdentityKey: a.key.Public()})
		}
	}
	for id, e := range a.gossip.Records() {
		key, ok := a.roster.Key(id)
		if !ok || id == a.id {
			continue
		}
		for _, at := range joinAddressesOf(e.Record) {
			out = append(out, &skeinv1.JoinToken_Seed{Address: at, IdentityKey: key})
		}
	}
	return out[:min(len(out), admission.MaxSeeds)]
}

// joinAddressesOf are the addresses of a member's port for relay sessions and joiners.
func joinAddressesOf(r *skeinv1.Record) []string {
	return slices.Concat(r.GetRelay().GetAddresses(), r.GetJoinAddresses())
}

// hashAt is the state's hash as records carry it; it is remembered so that others' can be compared.
func (a *Agent) hashAt(st *events.State) []byte {
	c := &a.loop.own
	if h, ok := c.hashes[st.Index()]; ok {
		return h
	}
	full := st.Hash()
	if c.hashes == nil || len(c.hashes) >= knownHashes {
		c.hashes = map[uint64][]byte{}
	}
	c.hashes[st.Index()] = full[:stateHashSize]
	return full[:stateHashSize]
}

// checkHash compares another node's hash with this one's at the same index.
func (a *Agent) checkHash(id identity.ID, r *skeinv1.Record) {
	if len(r.GetStateHash()) == 0 {
		return
	}
	subject := "state of " + a.roster.Name(id)
	own, ok := a.loop.own.hashes[r.GetAppliedIndex()]
	if st := a.loop.state; !ok && st.Index() == r.GetAppliedIndex() {
		own, ok = a.hashAt(st), true
	}
	switch {
	case !ok:
	case string(own) != string(r.GetStateHash()):
		a.report(subject, failure, fmt.Sprintf("at index %d its state hash is %x, here it is %x", r.GetAppliedIndex(),
			r.GetStateHash(), own),
			"one of the two replicas is wrong: compare `skein state -o json` on both and see docs/recovery.md")
	default:
		a.report(subject, "", "", "")
	}
}

// joinAddresses are where others reach this host's port for relay sessions and joiners, as records and tokens tell it.
func (a *Agent) joinAddresses() []string {
	outside, _, _ := net.SplitHostPort(a.host().ForceEndpoint)
	return withRelayPort(a.offers(), outside, a.conf().Ports)
}

// withRelayPort gives hosts the port at which each is dialed: outside is the one that forwards to this host, under a
// number of its own if there is one.
func withRelayPort(hosts []string, outside string, p config.Ports) (out []string) {
	for _, h := range hosts {
		port := p.Relay
		if h == outside {
			port = cmp.Or(p.RelayOutside, p.Relay)
		}
		out = append(out, net.JoinHostPort(h, strconv.Itoa(int(port))))
	}
	return out
}

// withPort gives all hosts one port.
func withPort(hosts []string, port uint16) []string {
	var out []string
	for _, h := range hosts {
		out = append(out, net.JoinHostPort(h, strconv.Itoa(int(port))))
	}
	return out
}

func (a *Agent) hasPublicAddress() bool {
	return slices.ContainsFunc(a.links.Addresses(a.cfg.Dataplane.Link), addr.Public) || a.host().ForceEndpoint != "" ||
		len(elastic(a.netcheck.Load())) > 0
}

// elastic are the addresses that a cloud translates to this host one to one, so that all of its ports are reached
// there: the metadata service names them, and what STUN servers see from outside must not be another. A port that a
// router forwards is none: it forwards WireGuard's alone, and neither the relay's nor STUN's.
func elastic(n *candidate.Result) (out []netip.Addr) {
	if n == nil {
		return nil
	}
	for _, ip := range n.Elastic {
		other := func(o candidate.Observation) bool {
			return o.Mapped.Addr().Is4() == ip.Is4() && !slices.Contains(n.Elastic, o.Mapped.Addr())
		}
		if addr.Public(ip) && !slices.ContainsFunc(n.Mapped, other) {
			out = append(out, ip)
		}
	}
	return out
}

// tunnelOverhead is what WireGuard adds to a packet over IPv6, in bytes.
const tunnelOverhead = 80

// linkMTU is the tunnel's MTU, in bytes.
func (a *Agent) linkMTU() int {
	if mtu := a.tunnelMTU(); mtu > 0 {
		return mtu
	}
	return dataplane.MTU
}

// followMTU tells the paths when the tunnel's MTU has changed with this host's links.
func (a *Agent) followMTU() {
	s := a.settings.Load()
	if a.paths == nil || s == nil || s.MTU == a.linkMTU() {
		return
	}
	n := *s
	n.MTU = a.linkMTU()
	a.settings.Store(&n)
	a.paths.SetSettings(n)
}

// tunnelMTU fits the tunnel into the smallest of this host's links that packets may leave by.
func (a *Agent) tunnelMTU() int {
	least := a.links.SmallestMTU(a.cfg.Dataplane.Link, 1280+tunnelOverhead)
	if least == 0 {
		return 0
	}
	return min(least-tunnelOverhead, 1420)
}
