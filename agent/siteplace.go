package agent

import (
	"encoding/hex"
	"time"

	"github.com/skeinmesh/skein/agent/metrics"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// wideFor is how long everybody has a node's record after the last reason for it has gone: until then others may still
// treat the node as the leader that it was.
const wideFor = sites.Grace + sites.ForwardOn

// placeClock remembers whether everybody is to have this node's record.
type placeClock struct {
	needed  time.Time // when there was a reason last
	because string    // that one
}

// next takes the reason that there is now, empty: none. One that is not sure, since it follows from who is known,
// counts once the node has been up for a while, unless everybody has its record already: who has just started, and
// knows nobody of its site yet, elects itself. It returns how long until it is to be asked again, 0: when something
// changes.
func (c *placeClock) next(why string, sure bool, unsettled time.Duration, now time.Time) (
	wide bool, wait time.Duration) {
	left := wideFor - now.Sub(c.needed)
	wide = !c.needed.IsZero() && left > 0
	switch {
	case why != "" && (sure || wide || unsettled <= 0):
		c.needed, c.because = now, why
		return true, 0
	case wide:
		return true, left
	case why != "":
		return false, unsettled
	}
	return false, 0
}

// placeState is what the loop remembers of with whom this node gossips.
type placeState struct {
	clock placeClock
	set   gossip.Place
	homes *roster.Homes // of set
	sited bool          // this node has been in a site's pool
	site  string        // the last one's
	timer *time.Timer
}

// duties are what a node does besides what its record says, as far as other sites need its record for it.
type duties struct {
	server     bool
	plain      bool // the log has it carry plain peers
	kubernetes bool // there are Kubernetes Nodes, whose pods find members by their names
}

// whyWide is why everybody is to have a node's record, by its plan, by the log and by what it says itself; empty: its
// site alone needs it. sure is false where that follows from which nodes of the site are known.
func whyWide(p *sites.Plan, n *skeinv1.Node, r *skeinv1.Record, d duties) (why string, sure bool) {
	switch {
	case p.Topology(p.Site) != sites.Site:
		return "its site does not speak through leaders", true
	case d.server:
		return "it is a server", true
	case r.GetRelay() != nil || r.GetRole() == gossip.RoleRelay:
		return "it relays", true
	case len(r.GetStunAddresses()) > 0 || len(r.GetJoinAddresses()) > 0:
		return "it answers nodes of all sites at a public address", true
	case r.GetLeads() > 0:
		return "it leads its site", true
	case len(r.GetSilentLeaders()) > 0:
		return "it finds that a leader does not forward", true
	case len(r.GetNodeAddresses()) > 0 || len(n.GetPodCidrs().GetCidrs()) > 0:
		return "networks are behind it", true
	case d.plain || len(r.GetPlainSessions()) > 0:
		return "it may carry plain peers", true
	case r.GetKubernetesNode() != "":
		return "it is a Kubernetes Node", true
	case d.kubernetes:
		return "Kubernetes knows it as a member", true
	case p.Elected || p.Forwards:
		return "it is elected to lead its site", false
	case p.Next:
		return "it may lead its site next", false
	}
	return "", false
}

// alone reports whether no other member is known to be of this host's site.
func alone(p *sites.Plan, members []identity.ID, h *roster.Homes) bool {
	for _, id := range members {
		if id == p.Self {
			continue
		}
		site, known := p.SiteOf(id)
		if !known {
			site, known = h.Site(id)
		}
		if known && site == p.Site {
			return false
		}
	}
	return true
}

// carriesPlain reports whether the log has a member carry plain peers.
func (a *Agent) carriesPlain(id identity.ID) bool {
	for _, p := range a.loop.state.PlainPeers() {
		for _, c := range p.GetCarriers() {
			if c.GetNodeId() == id.String() {
				return true
			}
		}
	}
	return false
}

// placeOf is with whom a node gossips. Without homes no site speaks through leaders, or a member is too old.
func placeOf(h *roster.Homes, site, topology string, wide bool) gossip.Place {
	switch {
	case h == nil:
		return gossip.Place{}
	case topology != sites.Site:
		return gossip.Place{Site: site, Wide: true, Home: h.Site, Chosen: h.Leads}
	}
	return gossip.Place{Sited: true, Site: site, Wide: wide, Home: h.Site, Chosen: h.Leads}
}

// firstPlace is with whom this node gossips before it has made a plan.
func (a *Agent) firstPlace() gossip.Place {
	h := a.roster.Placed()
	site, _ := sites.Of(a.self(), a.claimed())
	return placeOf(h, site, sites.Topology(a.replica.State().Settings(), site), a.isServer() || a.relayOnly())
}

// resumePlace has everybody keep this node's record who had it before this start: the node may lead.
func (a *Agent) resumePlace(first gossip.Place, now time.Time) {
	s := &a.loop.place
	s.set, s.homes, s.sited, s.site = first, a.roster.Placed(), first.Sited, first.Site
	if former := a.gossip.Former(); former != nil && gossip.Wide(former) {
		s.clock.needed, s.clock.because = now, "it has started again"
		if s.set.Sited && !s.set.Wide {
			s.set.Wide = true
			a.gossip.SetPlace(s.set)
		}
	}
}

// followPlace has gossip follow the newest plan and what this node is about to say of itself.
func (a *Agent) followPlace(own *skeinv1.Record, now time.Time) {
	s, p, h := &a.loop.place, a.sitePlan.Load(), a.roster.Placed()
	if p == nil {
		return
	}
	why, sure := "", false
	if h != nil {
		why, sure = whyWide(p, a.self(), own, duties{a.isServer(), a.carriesPlain(a.id), a.loop.sites.kubernetes})
	} else {
		why, sure = "every node has every other node's record", true
	}
	unsettled := sites.ElectionRests - now.Sub(a.started)
	if !sure && why != "" && unsettled > 0 && alone(p, a.roster.Members(), h) {
		unsettled = 0
	}
	wide, wait := s.clock.next(why, sure, unsettled, now)
	next := placeOf(h, p.Site, p.Topology(p.Site), wide)
	if next.Sited {
		s.sited, s.site = true, next.Site
	}
	next.Left = !next.Sited && s.sited && s.site != p.Site
	if next.Sited != s.set.Sited || next.Left != s.set.Left || next.Site != s.set.Site ||
		next.Wide != s.set.Wide || h != s.homes {
		s.set, s.homes = next, h
		a.gossip.SetPlace(next)
	}
	a.notePlace(why)
	if wait <= 0 {
		return
	}
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, a.wakeUp)
	} else {
		s.timer.Reset(wait)
	}
}

// placed tells with whom this node gossips where sites speak through leaders. It is not changed.
type placed struct {
	wide    bool
	because string // everybody has its record; empty: its site alone has it
}

// notePlace keeps for status what was decided, and the reason that there is now.
func (a *Agent) notePlace(why string) {
	s := &a.loop.place
	if s.homes == nil {
		a.placed.Store(nil)
		return
	}
	v := placed{wide: s.set.Wide}
	switch {
	case v.wide && why == "":
		v.because = "until recently " + s.clock.because
	case v.wide:
		v.because = why
	}
	if old := a.placed.Load(); old == nil || *old != v {
		a.placed.Store(&v)
	}
}

// audience is how many nodes exchange the records that this one gets.
func (a *Agent) audience() int {
	if a.loop.place.set.Sited {
		return len(a.gossip.Records())
	}
	return len(a.roster.Members())
}

// elsewhere is the site of a member of which there is no record here: as it has told everybody, or as the log implies.
func (a *Agent) elsewhere(id identity.ID) (site string, ok bool) {
	if site, ok := a.gossip.SiteOf(id); ok {
		return site, ok
	}
	if h := a.roster.Homes(); h != nil {
		return h.Site(id)
	}
	return "", false
}

// siteOf is a member's site as far as it is known here, its record here or not.
func (a *Agent) siteOf(n *skeinv1.Node, r *skeinv1.Record) (site string, known bool) {
	if site, known = sites.Of(n, r); known {
		return site, known
	}
	id, err := identity.ParseID(n.GetId())
	if err != nil {
		return "", false
	}
	return a.elsewhere(id)
}

// placeStatus tells with whom this node gossips.
func (a *Agent) placeStatus(r *skeinv1.StatusResponse) {
	v := a.placed.Load()
	if v == nil {
		return
	}
	everybody, site := recordCounts(a.gossip.Records())
	r.Gossip = &skeinv1.GossipStatus{With: metrics.WithSite, Records: uint32(everybody), SiteRecords: uint32(site)}
	if h := a.gossip.Held().SiteHash; h != ([32]byte{}) {
		r.Gossip.SiteRecordsHash = hex.EncodeToString(h[:])
	}
	if v.wide {
		r.Gossip.With, r.Gossip.Because = metrics.WithEverybody, v.because
	}
}

// recordCounts are how many records a node keeps that everybody has, and that its site alone has.
func recordCounts(records map[identity.ID]gossip.Entry) (everybody, site int) {
	for _, e := range records {
		if gossip.Wide(e.Record) {
			everybody++
		} else {
			site++
		}
	}
	return everybody, site
}

// joinerIsKnown reports whether a joiner's first record is of no use here: others lead its site, and it finds them by
// their records, which it gets. The record of a node that leads nothing is not for everybody.
func (a *Agent) joinerIsKnown(st *events.State, joiner identity.ID) bool {
	p, h := a.sitePlan.Load(), a.roster.Placed()
	if p == nil || h == nil || st.Server(joiner) != nil {
		return false
	}
	site, known := h.Site(joiner)
	if !known {
		return false
	}
	for _, l := range p.Leaders[site] {
		if l.Acting && l.Term > 0 && l.ID != joiner && (l.ID == a.id || a.gossip.Alive(l.ID)) {
			return true
		}
	}
	return false
}
