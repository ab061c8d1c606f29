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

// wideFor is how long every node keeps this node's record after the last reason for it has gone: until then others may
// still treat the node as a leader.
const wideFor = sites.Grace + sites.ForwardOn

// placeClock remembers whether every node is to have this node's record.
type placeClock struct {
	needed  time.Time // when there was last a reason
	because string    // that reason
}

// next takes the present reason for giving every node this node's record; empty: none. A reason that is not sure
// depends on which other nodes are known: a node that has just started and knows nobody of its site elects itself. Such
// a reason counts only when unsettled, the time until this node is expected to know the others, is over, or while every
// node has the record already. next returns how long until the next call; 0: until something changes.
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

// placeState is what the loop remembers of whom this node gossips with.
type placeState struct {
	clock placeClock
	set   gossip.Place
	homes *roster.Homes // that set was made with
	sited bool          // this node has been in a site's gossip pool
	site  string        // of that pool; the last one if there were several
	timer *time.Timer
}

// duties are tasks of a node that its record does not name, and for which other sites need the record.
type duties struct {
	server     bool
	plain      bool // the log has it carry plain peers
	kubernetes bool // there are Kubernetes Nodes, whose pods find members by their names
}

// whyWide returns why every node is to have a node's record, by its plan, the log and the record itself; empty: only
// its site needs it. sure is false if the reason depends on which nodes of the site are known.
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

// alone reports whether this host knows no other member of its site.
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

// carriesPlain reports whether the log makes a member a carrier of plain peers.
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

// placeOf returns with whom a node gossips. h is nil while no site uses leaders, or while a member's version is too
// old.
func placeOf(h *roster.Homes, site, topology string, wide bool) gossip.Place {
	switch {
	case h == nil:
		return gossip.Place{}
	case topology != sites.Site:
		return gossip.Place{Site: site, Wide: true, Home: h.Site, Chosen: h.Leads}
	}
	return gossip.Place{Sited: true, Site: site, Wide: wide, Home: h.Site, Chosen: h.Leads}
}

// firstPlace returns with whom this node gossips before it has made a plan.
func (a *Agent) firstPlace() gossip.Place {
	h := a.roster.Placed()
	site, _ := sites.Of(a.self(), a.claimed())
	return placeOf(h, site, sites.Topology(a.replica.State().Settings(), site), a.isServer() || a.relayOnly())
}

// resumePlace keeps this node's record with every node, if every node had it before this start: the node may still be a
// leader.
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

// followPlace sets with whom this node gossips, by the newest plan and the record that it is about to publish.
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

// placed says with whom this node gossips, where sites use leaders. It is immutable.
type placed struct {
	wide    bool
	because string // why every node has its record; empty: only its site has it
}

// notePlace stores the decision and its present reason for the status.
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

// audience returns how many nodes exchange the records that this node receives.
func (a *Agent) audience() int {
	if a.loop.place.set.Sited {
		return len(a.gossip.Records())
	}
	return len(a.roster.Members())
}

// elsewhere returns the site of a member whose record is not here: as the member has announced it, or as the log
// implies it.
func (a *Agent) elsewhere(id identity.ID) (site string, ok bool) {
	if site, ok := a.gossip.SiteOf(id); ok {
		return site, ok
	}
	if h := a.roster.Homes(); h != nil {
		return h.Site(id)
	}
	return "", false
}

// siteOf returns a member's site if it is known here, with or without the member's record.
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

// placeStatus fills in with whom this node gossips.
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

// recordCounts counts the kept records that every node has, and those that only this node's site has.
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

// joinerIsKnown reports whether this node need not spread a joiner's first record: other nodes lead the joiner's site,
// and the joiner gets their records and reaches them by these. The record of a node that leads nothing is not for every
// node.
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
