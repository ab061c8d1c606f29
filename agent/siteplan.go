package agent

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/addr"
)

// siteState is what the loop remembers of sites.
type siteState struct {
	course  sites.Course
	seen    planSeen    // what the newest plan was made of
	due     time.Time   // when it is to be made anew although nothing has changed; zero: never
	timer   *time.Timer // looks again then
	settled *skeinv1.NodeSettings
	silent  map[string]bool // subjects of problems about leaders that do not forward
	// kubernetes is set while a member says that it is a Node.
	kubernetes bool
}

// planSeen is what a plan was made of.
type planSeen struct {
	members *sites.Members // and with them the settings
	placed  map[identity.ID]string
	of      map[identity.ID]memberSeen // those of which there are records
}

// memberSeen is what a plan follows from of one member.
type memberSeen struct {
	record                   *skeinv1.Record
	alive, outdated, reached bool
}

// same reports whether a plan follows from both alike.
func (m memberSeen) same(o memberSeen) bool {
	return m.alive == o.alive && m.outdated == o.outdated && m.reached == o.reached &&
		(m.record.GetKubernetesNode() == "") == (o.record.GetKubernetesNode() == "") && sites.Alike(m.record, o.record)
}

// seeSites looks at what a plan is made of, and reports whether a plan would be another one now than by the last look.
func (a *Agent) seeSites() (changed bool) {
	s := &a.loop.sites.seen
	members, placed := a.roster.ForPlans(), a.gossip.Placed()
	changed = s.members != members || !maps.Equal(s.placed, placed)
	s.members, s.placed = members, placed
	if s.of == nil {
		s.of = map[identity.ID]memberSeen{}
	}
	records, paths := a.gossip.Records(), a.currentPaths()
	note := func(id identity.ID, m memberSeen) {
		old, known := s.of[id]
		if known && old == m {
			return
		}
		s.of[id] = m
		changed = changed || !known || !m.same(old)
	}
	for id, e := range records {
		if id != a.id {
			note(id, memberSeen{e.Record, a.gossip.Alive(id), a.gossip.Outdated(id), paths[id].Alive})
		}
	}
	note(a.id, memberSeen{record: ownSite(records[a.id].Record, a.claimed()), alive: true})
	for id := range s.of {
		if _, known := records[id]; !known && id != a.id {
			delete(s.of, id)
			changed = true
		}
	}
	return changed
}

// planSites makes the plan by which this host takes part in the sites' mesh, if it may be another one than before:
// among ten thousand members most rounds are for something else.
func (a *Agent) planSites(now time.Time) {
	st, s := a.loop.state, &a.loop.sites
	if st == nil || a.self() == nil {
		return
	}
	changed, p := a.seeSites(), a.sitePlan.Load()
	if changed || p == nil || !s.due.IsZero() && !now.Before(s.due) {
		p = a.makePlan(st.Settings(), now)
		a.leaderChanges.Note(a.sitePlan.Load(), p)
		a.sitePlan.Store(p)
	}
	a.warnOfSites(p, s.seen.of[a.id].record)
	a.noteSilent(p)
}

// makePlan makes the plan of now, and sees to it that the next one is made in time.
func (a *Agent) makePlan(settings *skeinv1.Settings, now time.Time) *sites.Plan {
	s := &a.loop.sites
	of := maps.Clone(s.seen.of) // the plan may be asked later
	in := sites.Input{Self: a.id, Settings: settings, Members: s.seen.members,
		Records:  make(map[identity.ID]*skeinv1.Record, len(of)),
		Outdated: func(id identity.ID) bool { return of[id].outdated },
		Alive: func(id identity.ID) bool {
			m, seen := of[id]
			return m.alive || !seen && a.gossip.Alive(id)
		},
	}
	s.kubernetes = false
	for id, m := range of {
		in.Records[id] = m.record
		s.kubernetes = s.kubernetes || m.record.GetKubernetesNode() != ""
	}
	if placed := s.seen.placed; len(placed) > 0 && sites.InUse(settings) {
		in.Elsewhere = func(id identity.ID) (site string, ok bool) {
			site, ok = placed[id]
			return site, ok
		}
	}
	p, wait := s.course.Plan(in, a.started, func(id identity.ID) bool { return of[id].reached }, now)
	s.due = time.Time{}
	if wait > 0 {
		s.due = now.Add(wait)
		if s.timer == nil {
			s.timer = time.AfterFunc(wait, a.wakeUp)
		} else {
			s.timer.Reset(wait)
		}
	}
	return p
}

// ownSite is what a host has published of itself, with the site that it claims now: gossip puts the site in whose pool
// it is into the record, and that follows from the plan.
func ownSite(published, claimed *skeinv1.Record) *skeinv1.Record {
	switch {
	case published == nil: // not yet
		return claimed
	case published.GetSite() == claimed.GetSite():
		return published
	}
	r := proto.CloneOf(published)
	r.Site = claimed.GetSite()
	return r
}

// tellTerm has the record say that this host leads once its data plane passes packets on: others begin to send as soon
// as they hear it.
func (a *Agent) tellTerm(applied bool) {
	if applied && a.loop.sites.course.Tell() {
		a.wakeUp()
	}
}

// Subjects of problems about sites.
const (
	subjectLeader     = "site leader"
	subjectInternalIP = "internal IP"
)

// warnOfSites tells of what this host is asked for and cannot do well.
func (a *Agent) warnOfSites(p *sites.Plan, own *skeinv1.Record) {
	set := a.self().GetSettings()
	message, advice := "", ""
	wishes := set.GetLeader() == "yes" || set.GetLeader() != "no" && own.GetLeaderWish()
	if wishes && p.Topology(p.Site) == sites.Site && a.netcheck.Load() != nil && a.host().ForceEndpoint == "" &&
		!sites.Reachable(own) {
		message = fmt.Sprintf("this node shall lead %s, and it has no endpoint that other sites can send to first",
			siteText(p.Site))
		advice = fmt.Sprintf("forward UDP port %d to this host and name the address with `skein node set %s "+
			"--force-endpoint HOST:PORT`, or let a node with a public address lead; "+
			"until then other sites' leaders reach it as they reach any node behind its NAT, perhaps by relay",
			a.cfg.Ports.WireGuard, a.self().GetName())
	}
	a.report(subjectLeader, warning, message, advice)
	message, advice = "", ""
	if ip := a.host().InternalIP; ip.IsValid() && addr.Public(ip) {
		message = fmt.Sprintf("%s is a public address, and nodes of this site would use it as one inside of the site",
			ip)
		advice = "set internalIP to the host's address in the site's own network, or remove it; a public one belongs in " +
			"forceEndpoint"
	}
	a.report(subjectInternalIP, warning, message, advice)
}

func siteText(site string) string {
	if site == "" {
		return "the default site"
	}
	return fmt.Sprintf("site %q", site)
}

// leads is what a node is in its site: leader, reserve, or elected, before it acts; silent: found not to forward;
// empty: nothing.
func leads(p *sites.Plan, id identity.ID) string {
	if p == nil {
		return ""
	}
	if _, found := p.Silent[id]; found {
		return "silent"
	}
	site, _ := p.SiteOf(id)
	for _, l := range p.Leaders[site] {
		switch {
		case l.ID != id:
		case !l.Acting:
			return "elected"
		case l.Reserve:
			return "reserve"
		default:
			return "leader"
		}
	}
	return ""
}

// siteStatus tells how this node takes part in its site.
func (a *Agent) siteStatus(r *skeinv1.StatusResponse) {
	p := a.sitePlan.Load()
	if p == nil {
		return
	}
	r.Topology, r.SiteLeads = p.Topology(p.Site), leads(p, a.id)
	if r.GetTopology() == sites.Site {
		for id := range p.Order(a.id) {
			r.SiteLeaders = append(r.SiteLeaders, a.roster.Name(id))
		}
	}
}

// setByLog lays what the log says of this node over what its configuration and its parts say.
func setByLog(h *part.Wishes, s *skeinv1.NodeSettings) {
	if s.GetSiteSet() {
		h.Site = s.GetSite()
	}
	switch s.GetLeader() {
	case "yes":
		h.Leader = true
	case "no":
		h.Leader = false
	}
	if ip, err := netip.ParseAddr(s.GetInternalIp()); err == nil {
		h.InternalIP = ip
	}
	h.ForceEndpoint = cmp.Or(s.GetForceEndpoint(), h.ForceEndpoint)
	h.PersistentKeepalive = cmp.Or(s.GetPersistentKeepalive(), h.PersistentKeepalive)
}

// followSettings applies what the log says of this node, when that has changed.
func (a *Agent) followSettings() {
	set := a.self().GetSettings()
	if proto.Equal(set, a.loop.sites.settled) {
		return
	}
	a.loop.sites.settled = set
	a.applyHost()
}
