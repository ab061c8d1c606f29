package agent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	"github.com/skeinmesh/skein/agent/witness"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// siteWitnesses is this host's part in finding leaders that do not forward.
type siteWitnesses struct {
	watcher *witness.Watcher
	mirror  *witness.Mirror
}

func (a *Agent) openWitnesses() {
	wire := &witness.Wire{
		Self: a.id, Link: a.cfg.Dataplane.Link, Port: a.cfg.Ports.Control,
		Overlay: a.roster.Overlay, Owner: a.roster.Owner, Seal: a.control.SealEcho, Open: a.control.OpenEcho,
		Count: a.control.CountEcho, MTU: a.pathMTU,
	}
	a.witnesses = &siteWitnesses{
		mirror: &witness.Mirror{Wire: wire, Admit: func(from, via identity.ID) bool {
			return mirrors(a.sitePlan.Load(), from, via)
		}},
		watcher: witness.NewWatcher(witness.WatcherConfig{
			Wire: wire, Late: a.lag.Late, Changed: a.wakeUp, Name: a.roster.Name, Log: a.log.With("component", "witness"),
		}),
	}
}

// pathMTU returns the largest tunnel packet, in bytes, that the path to a peer carries; 0: there is no live path.
func (a *Agent) pathMTU(id identity.ID) int {
	p := a.currentPaths()[id]
	switch {
	case !p.Alive:
		return 0
	case p.MTU > 0:
		return p.MTU
	}
	return a.linkMTU()
}

// mirrors reports whether this host answers a member's echo. If the echo came through a leader, that must be a leader
// of the member's site which may bring its site's packets here. If it came directly (via is zero), the member must be a
// peer.
func mirrors(p *sites.Plan, from, via identity.ID) bool {
	if p == nil || p.Full || from == p.Self {
		return false
	}
	if via.IsZero() {
		return p.Peer(from)
	}
	of, known := p.SiteOf(from)
	by, _ := p.SiteOf(via)
	return known && of == by && of != p.Site && p.Peer(via) && slices.ContainsFunc(p.Guards, func(g sites.Guard) bool {
		return g.From == via && g.Site
	})
}

// onEcho answers an echo. The control net calls it.
func (a *Agent) onEcho(from identity.ID, at, self netip.AddrPort, b []byte) {
	if a.witnesses == nil {
		return
	}
	if err := a.witnesses.mirror.Take(from, at, self, b); err != nil {
		a.log.Debug("an echo was not answered", "from", from.String(), "error", err)
	}
}

func (w *siteWitnesses) close() {
	if w != nil {
		w.watcher.Close()
	}
}

// said returns this host's reports of silent leaders.
func (w *siteWitnesses) said() []witness.Said {
	if w == nil {
		return nil
	}
	return w.watcher.Said()
}

// counts returns the echo counts of each leader.
func (w *siteWitnesses) counts() map[identity.ID]witness.Counts {
	if w == nil {
		return nil
	}
	return w.watcher.Counts()
}

// record puts the reports into the host's record.
func (w *siteWitnesses) record(r *skeinv1.Record) {
	for _, s := range w.said() {
		r.SilentLeaders = append(r.SilentLeaders,
			&skeinv1.SilentLeader{NodeId: s.Leader.String(), Kinds: s.Kinds, Since: s.Since.Unix()})
	}
}

// watchLeaders watches the leaders of which this host is a witness, and to which it has a path. A leader that it does
// not reach is ruled out by its path already.
func (a *Agent) watchLeaders() {
	p, paths := a.sitePlan.Load(), a.currentPaths()
	if a.witnesses == nil || p == nil {
		return
	}
	var targets []witness.Target
	for _, w := range p.Watched() {
		if !paths[w.Leader].Alive {
			continue
		}
		t := witness.Target{Leader: w.Leader, Mirrors: w.Mirrors}
		for _, o := range w.Others {
			if o == a.id || paths[o].Alive {
				t.Others = append(t.Others, o)
			}
		}
		targets = append(targets, t)
	}
	a.witnesses.watcher.Watch(targets)
}

// subjectSilent is the prefix of subjects of problems about leaders that do not forward.
const subjectSilent = "leader "

// noteSilent reports a problem for each leader of this host's site that its witnesses find silent.
func (a *Agent) noteSilent(p *sites.Plan) {
	told := map[string]bool{}
	for id, f := range p.Silent {
		site, _ := p.SiteOf(id)
		if site != p.Site {
			continue
		}
		subject := subjectSilent + a.roster.Name(id)
		told[subject] = true
		if !a.loop.sites.silent[subject] {
			a.metrics.Demotions.Inc()
		}
		advice := "check on that host that"
		if id == a.id {
			advice = "check on this host that"
		}
		a.report(subject, warning, fmt.Sprintf("it is alive and does not forward (%s); %s", a.findingText(f), effect(p, id)),
			advice+" its firewall lets forwarded packets of the tunnel pass, connection tracking is not full "+
				"(nf_conntrack_count, nf_conntrack_max), and IP forwarding is on; it can lead again some time after it "+
				"forwards")
	}
	for subject := range a.loop.sites.silent {
		if !told[subject] {
			a.report(subject, "", "", "")
		}
	}
	a.loop.sites.silent = told
}

// findingText says which packets are lost, which witnesses report it, and since when.
func (a *Agent) findingText(f sites.Finding) string {
	var by []string
	for _, id := range f.By {
		by = append(by, a.roster.Name(id))
	}
	slices.Sort(by)
	says := "say"
	if len(by) == 1 {
		says = "says"
	}
	return fmt.Sprintf("%s: %s %s so since %s", strings.Join(witness.Names(f.Kinds), ", "), strings.Join(by, ", "), says,
		time.Unix(f.Since, 0).Format(time.TimeOnly))
}

// effect says what follows from a finding.
func effect(p *sites.Plan, id identity.ID) string {
	site, _ := p.SiteOf(id)
	for _, l := range p.Leaders[site] {
		if l.ID == id && !l.Silent {
			return "nobody else can lead " + siteText(site) + ", so it goes on"
		}
	}
	return "others lead " + siteText(site)
}

// silentText describes the silent leaders of this host's site and of a member's site, for `skein explain`.
func (a *Agent) silentText(member identity.ID) string {
	p := a.sitePlan.Load()
	if p == nil || len(p.Silent) == 0 {
		return ""
	}
	theirs, _ := p.SiteOf(member)
	var out []string
	for id, f := range p.Silent {
		if site, _ := p.SiteOf(id); site == p.Site || site == theirs {
			out = append(out, fmt.Sprintf(" %s is alive and does not forward (%s); %s.", a.roster.Name(id), a.findingText(f),
				effect(p, id)))
		}
	}
	slices.Sort(out)
	return strings.Join(out, "")
}
