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

// siteState is what the loop remembers about sites.
type siteState struct {
	course  sites.Course
	seen    planSeen    // inputs of the newest plan
	due     time.Time   // when to make a plan although nothing has changed; zero: never
	timer   *time.Timer // wakes the loop at due
	settled *skeinv1.NodeSettings
	silent  map[string]bool // subjects of problems about leaders that do not forward
	// kubernetes is set while any member says that it is a Kubernetes Node.
	kubernetes bool
}

// planSeen holds the inputs of a plan.
type planSeen struct {
	members *sites.Members // another value when the members or the settings change
	placed  map[identity.ID]string
	of      map[identity.ID]memberSeen // members with a record here, and this host
}

// memberSeen holds the inputs of a plan that concern one member.
type memberSeen struct {
	record                   *skeinv1.Record
	alive, outdated, reached bool
}

// same reports whether both inputs give the same plan.
func (m memberSeen) same(o memberSeen) bool {
	return m.alive == o.alive && m.outdated == o.outdated && m.reached == o.reached &&
		(m.record.GetKubernetesNode() == "") == (o.record.GetKubernetesNode() == "") && sites.Alike(m.record, o.record)
}

// seeSites reads the inputs of a plan, and reports whether they would give another plan than those read before.
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

// planSites makes a new plan for this host if its inputs have changed, or if a new one is due. Among ten thousand
// members most rounds of the loop are about something else.
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

// makePlan makes a plan from the inputs that seeSites read, and wakes the loop when the next one is due.
func (a *Agent) makePlan(settings *skeinv1.Settings, now time.Time) *sites.Plan {
	s := &a.loop.sites
	of := maps.Clone(s.seen.of) // the plan may call Alive and Outdated later
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

// ownSite returns the record that this host has published, with the site that it claims now. The published site is that
// of the gossip pool, which in turn depends on the plan.
func ownSite(published, claimed *skeinv1.Record) *skeinv1.Record {
	switch {
	case published == nil: // nothing is published yet
		return claimed
	case published.GetSite() == claimed.GetSite():
		return published
	}
	r := proto.CloneOf(published)
	r.Site = claimed.GetSite()
	return r
}

// announceTerm makes the record say that this host leads once its data plane forwards: others begin to send as soon as
// they read it.
func (a *Agent) announceTerm(applied bool) {
	if applied && a.loop.sites.course.Tell() {
		a.wakeUp()
	}
}

// Subjects of problems about sites.
const (
	subjectLeader     = "site leader"
	subjectInternalIP = "internal IP"
)

// warnOfSites warns of settings that this host cannot fulfil well: to lead without a reachable endpoint, and a public
// internal IP.
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

// siteStatus fills in how this node takes part in its site.
func (a *Agent) siteStatus(r *skeinv1.StatusResponse) {
	p := a.sitePlan.Load()
	if p == nil {
		return
	}
	r.Topology, r.SiteLeads = p.Topology(p.Site), p.Leads(a.id)
	if r.GetTopology() == sites.Site {
		for id := range p.Order(a.id) {
			r.SiteLeaders = append(r.SiteLeaders, a.roster.Name(id))
		}
	}
}

// setByLog replaces what a host's configuration and parts say with what the log sets for this node.
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

// followSettings applies what the log sets for this node, if that has changed.
func (a *Agent) followSettings() {
	set := a.self().GetSettings()
	if proto.Equal(set, a.loop.sites.settled) {
		return
	}
	a.loop.sites.settled = set
	a.applyHost()
}
