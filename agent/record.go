package agent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/ownrecord"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// ownRecord is what this node last published, never nil.
func (a *Agent) ownRecord() *skeinv1.Record {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.published == nil {
		return &skeinv1.Record{}
	}
	return a.published
}

// publish gossips this node's record if it changed: at once for what paths depend on, now and then for the rest.
func (a *Agent) publish() {
	now := time.Now()
	observed := a.observed()
	a.followPlace(observed, now)
	next, wait := a.loop.own.Next(ownrecord.Input{Self: a.id, Old: a.ownRecord(), Observed: observed, State: a.loop.state,
		Paths: a.currentPaths(), Members: a.audience(), Late: a.lag.Late(now)}, now)
	if wait > 0 {
		if a.loop.ownTurn == nil {
			a.loop.ownTurn = time.AfterFunc(wait, a.wakeUp)
		} else {
			a.loop.ownTurn.Reset(wait)
		}
	}
	if next == nil {
		return
	}
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
	r.Candidates = append(slices.Clip(r.Candidates), a.reflection.Stable(r.Candidates,
		len(a.roster.Members()) == 2, time.Now())...)
	a.predictor.InRecord(r)
	offers, at := a.offers(), a.joinAddresses()
	if a.listener.Load() != nil && (a.conf().Relay != config.Off || a.relayOnly()) && len(offers) > 0 {
		r.Relay = &skeinv1.RelayOffer{Addresses: at, Udp: a.udpDriver()}
	}
	if r.Relay == nil && a.listener.Load() != nil && a.isServer() {
		r.JoinAddresses = at
	}
	if a.discovery.Server() != nil && a.opensPort() {
		r.StunAddresses = ownrecord.WithPort(slices.DeleteFunc(offers, func(h string) bool {
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
		WireguardKey: a.keys.Keys().DevicePublic[:], Site: own.Site, LeaderWish: own.Leader,
		ForcedEndpoint:      own.ForceEndpoint,
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
		r.NodeAddresses = ownrecord.WithOwn(c.NodeAddresses, addrs)
	}
	if a.relayOnly() {
		r.Role = gossip.RoleRelay
	}
	return r
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
		for _, ip := range ownrecord.Elastic(n) {
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
		for _, at := range ownrecord.JoinAddresses(e.Record) {
			out = append(out, &skeinv1.JoinToken_Seed{Address: at, IdentityKey: key})
		}
	}
	return out[:min(len(out), admission.MaxSeeds)]
}

// checkHash compares another node's hash with this one's at the same index.
func (a *Agent) checkHash(id identity.ID, r *skeinv1.Record) {
	if len(r.GetStateHash()) == 0 {
		return
	}
	subject := "state of " + a.roster.Name(id)
	own, ok := a.loop.own.HashThen(r.GetAppliedIndex(), a.loop.state)
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
	return ownrecord.WithRelayPort(a.offers(), outside, a.conf().Ports)
}

func (a *Agent) hasPublicAddress() bool {
	return slices.ContainsFunc(a.links.Addresses(a.cfg.Dataplane.Link), addr.Public) || a.host().ForceEndpoint != "" ||
		len(ownrecord.Elastic(a.netcheck.Load())) > 0
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
