package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/usage"
)

const (
	siteFleetSize   = 10_000 // members, with those that run
	siteFleetSites  = 50
	siteFleetRun    = 30 // of the site that is measured
	siteFleetMemory = 96 << 20
	siteFleetCPU    = 1.0  // per cent of a core
	siteFleetRate   = 5000 // bytes a second
	siteFleetRest   = time.Minute
	siteFleetSite   = "near"  // that is measured
	siteFleetLeader = "near1" // of it
	siteFleetLead   = 2       // of each site
	siteFleetWide   = 4       // of each site: everybody has their records
	siteFleetWithin = 10 * time.Minute
	siteFleetLook   = 10 * time.Second // a status of 10,000 members costs an agent 25 ms
	// siteFleetCalm is what agents that have just started still have to do: in a large site each says what has become of
	// its paths within ten minutes.
	siteFleetCalm = 11 * time.Minute
)

// siteFleet measures what an agent costs that is one of 10,000 in 50 sites and leads nothing. It takes minutes, and is
// no part of a first look.
func (b *bench) siteFleet(ctx context.Context) []Figure {
	name := fmt.Sprintf("one agent of %d in %d sites, at rest", siteFleetSize, siteFleetSites)
	target := fmt.Sprintf("%s, ≤ %.0f %% of a core, ≤ %d kB/s", memoryTarget(siteFleetMemory), siteFleetCPU,
		siteFleetRate/1000)
	if b.opts.Quick && !slices.Contains(b.opts.Only, "site-fleet") {
		return nil
	}
	got, err := b.measureSiteFleet(ctx)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	agent, witness, leader := got[0], got[1], got[2]
	return []Figure{
		{
			Name: name + ", " + agent.driver + " WireGuard", Target: target, Got: agent.text(), Load: loadAverage(),
			Verdict: verdict(agent.steady <= siteFleetMemory && agent.cpu <= siteFleetCPU && agent.bytes <= siteFleetRate),
			How: fmt.Sprintf("an agent that leads nothing, is not to lead next and is not a leader's witness, in a site of %d "+
				"of which %d run, all of them real, with a server elsewhere. The other members are in the log; there are the "+
				"records of those of "+
				"its own site, and of %d nodes of each other site, and none of these answers. RSS when it has settled; processor "+
				"time and all bytes of its link, over %s",
				siteFleetSize/siteFleetSites, siteFleetRun, siteFleetWide, b.opts.pick(siteFleetRest, siteFleetRest/3)),
		},
		{Name: "  the same, a witness", Got: witness.text(), Load: loadAverage(),
			How: "likewise; one of the three that send echoes through a leader, which nobody answers here: five times as many " +
				"as where they are answered"},
		{Name: "  the same, a leader of that site", Got: leader.text(), Load: loadAverage(), How: "likewise"},
	}
}

// siteFleetLab is the lab: a server by itself, and a site of agents in one network, two of which lead it.
func siteFleetLab() []byte {
	var y strings.Builder
	y.WriteString("name: bench-sitefleet\nsites:\n  hub:  {nat: none}\n  near: {nat: port-restricted-cone}\n" +
		"settings: {topology: site, leadersPerSite: 2}\nnodes:\n  hub1: {site: hub, server: true, relay: true, init: true}\n")
	for i := range siteFleetRun {
		leader := ""
		if i < siteFleetLead {
			leader = ", leader: true"
		}
		fmt.Fprintf(&y, "  near%d: {site: near%s}\n", i+1, leader)
	}
	return []byte(y.String())
}

// atRest is what an agent costs that nobody uses.
type atRest struct {
	residence
	cpu   float64 // per cent of a core
	bytes float64 // of its link, both ways, a second
	sent  float64 // of these
}

func (r atRest) text() string {
	return fmt.Sprintf("%.1f MiB (%.1f of its own, %.1f of files), %.1f MiB at most; %.2f %%; "+
		"%.1f kB/s both ways, %.1f of them sent",
		mib(r.steady), mib(r.private), mib(r.files), mib(r.peak), r.cpu, r.bytes/1000, r.sent/1000)
}

// siteFleetMembers are the members that run no agent: with those that do, the sites are equally large. Of each site
// whose leaders run none two lead it, and there are four nodes whose records everybody has: leaders, and who would be
// next.
func siteFleetMembers(spec *lab.Spec) (out []fleetMember) {
	var names []string
	running, lead := map[string]int{}, map[string]int{}
	for _, s := range spec.Sites {
		names = append(names, s.Name)
	}
	for _, n := range spec.Nodes {
		running[n.Site]++
		if n.Leader || n.Server {
			lead[n.Site]++
		}
	}
	for i := len(names); i < siteFleetSites; i++ {
		names = append(names, fmt.Sprintf("far-%d", i))
	}
	for _, site := range names {
		for i := range siteFleetSize/siteFleetSites - running[site] {
			m := fleetMember{number: len(out), site: site, said: true, scope: skeinv1.RecordScope_RECORD_SCOPE_SITE}
			if at := i + lead[site]; at < siteFleetWide {
				m.scope, m.public = skeinv1.RecordScope_RECORD_SCOPE_BOTH, true
				if at < siteFleetLead {
					m.slot = uint32(at + 1)
				}
			}
			out = append(out, m)
		}
	}
	return out
}

// siteFleetSpeakers are those of them of which a node of this site has records: its own site's, and of the others those
// whose records everybody has.
func siteFleetSpeakers(members []fleetMember, site string) (out []fleetMember) {
	for _, m := range members {
		if m.site == site || m.wide() {
			out = append(out, m)
		}
	}
	return out
}

// measureSiteFleet tells what three agents cost at rest: one that only its own site knows of, a witness of a leader,
// and a leader.
func (b *bench) measureSiteFleet(ctx context.Context) (_ []atRest, err error) {
	l, down, err := b.raise(ctx, siteFleetLab())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	if err := b.feedSiteFleet(ctx, l); err != nil {
		return nil, fmt.Errorf("prepare a state of %d members: %w", siteFleetSize, err)
	}
	began := time.Now()
	agree := func() error { return agreesOnFleet(ctx, l) }
	if err := b.untilEvery(ctx, siteFleetLook, siteFleetWithin, agree); err != nil {
		return nil, err
	}
	b.note("site-fleet: all agents know all, %s after their start", time.Since(began).Round(time.Second))
	if err := b.pause(ctx, b.opts.pick(siteFleetCalm, siteFleetCalm/4)); err != nil {
		return nil, err
	}
	ordinary, witness, err := simpleNodes(ctx, l)
	if err != nil {
		return nil, err
	}
	b.note("site-fleet: measuring %s, and %s, a witness", ordinary, witness)
	return b.measureRest(ctx, l, ordinary, witness, siteFleetLeader)
}

// simpleNodes are two whose records their own site alone needs, since they lead nothing and are not to lead next: one
// that watches no leader, and one that does.
func simpleNodes(ctx context.Context, l *lab.Lab) (ordinary, witness string, err error) {
	var running []sites.Node // of the site
	var leaders []identity.ID
	simple := map[string]identity.ID{}
	for _, n := range l.Spec.Nodes {
		if n.Site != siteFleetSite {
			continue
		}
		c, err := l.Client(n.Name)
		if err != nil {
			return "", "", err
		}
		st, err := c.Status(ctx, &skeinv1.StatusRequest{})
		if err != nil {
			return "", "", fmt.Errorf("node %s: %w", n.Name, err)
		}
		id, err := identity.ParseID(st.GetNodeId())
		if err != nil {
			return "", "", fmt.Errorf("node %s: %w", n.Name, err)
		}
		running = append(running, sites.Node{ID: id, Site: n.Site, Alive: true})
		switch {
		case n.Leader:
			leaders = append(leaders, id)
		case st.GetGossip().GetWith() == "site":
			simple[n.Name] = id
		}
	}
	watches := map[identity.ID]bool{}
	for _, leader := range leaders {
		for _, id := range sites.Witnesses(running, leader) {
			watches[id] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(simple)) {
		if watches[simple[name]] {
			witness = cmp.Or(witness, name)
		} else {
			ordinary = cmp.Or(ordinary, name)
		}
	}
	if ordinary == "" || witness == "" {
		return "", "", fmt.Errorf("of site %s no node is both ordinary and seen by its own site alone (%q), or no witness "+
			"is (%q)",
			siteFleetSite, ordinary, witness)
	}
	return ordinary, witness, nil
}

// feedSiteFleet stops all agents, gives the server the other members by its log, and starts all again. Each finds on
// its disk what it would have if all had been there before.
func (b *bench) feedSiteFleet(ctx context.Context, l *lab.Lab) error {
	if err := l.Stop(ctx, l.Spec.NodeNames()...); err != nil {
		return err
	}
	server, err := l.Node("hub1")
	if err != nil {
		return err
	}
	dir, members := stateDir(server), siteFleetMembers(l.Spec)
	b.note("site-fleet: admitting %d members", len(members))
	state, err := admitMembers(ctx, dir, members)
	if err != nil {
		return err
	}
	key, _, err := identity.LoadOrCreate(dir)
	if err != nil {
		return err
	}
	speakers := siteFleetSpeakers(members, siteFleetSite)
	b.note("site-fleet: the agents keep the log, and the records of %d members", len(speakers))
	for _, n := range l.Spec.Nodes {
		info, err := l.Node(n.Name)
		if err != nil {
			return err
		}
		records, err := recordsOf(siteFleetSpeakers(speakers, n.Site), key.ID())
		if err == nil {
			err = keepState(stateDir(info), state)
		}
		if err == nil {
			at := gossip.Place{Sited: true, Site: n.Site, Wide: true, Home: homesIn(state)}
			err = keepRecords(stateDir(info), state, at, records)
		}
		if err != nil {
			return fmt.Errorf("state and records for %s: %w", n.Name, err)
		}
	}
	return l.Start(ctx, l.Spec.NodeNames()...)
}

// homesIn tells the site in whose range of addresses a member is.
func homesIn(st *events.State) func(identity.ID) (string, bool) {
	homes := map[identity.ID]string{}
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		at, aerr := netip.ParseAddr(n.GetIpv4())
		if err != nil || aerr != nil {
			continue // no state that was folded has such a member
		}
		if r, ok := st.RangeAt(at); ok {
			homes[id] = r.Site
		}
	}
	return func(id identity.ID) (string, bool) { site, ok := homes[id]; return site, ok }
}

func stateDir(n lab.Info) string { return filepath.Join(n.Dir, "state") }

// agreesOnFleet tells whether all agents have the same state, and those of the site that is measured find each other
// alive, have its nodes as peers, and go by its leaders. The questions are those that cost an agent little.
func agreesOnFleet(ctx context.Context, l *lab.Lab) error {
	const each = siteFleetSize / siteFleetSites
	var first *skeinv1.StatusResponse
	for _, n := range l.Spec.Nodes {
		c, err := l.Client(n.Name)
		if err != nil {
			return err
		}
		asking, cancel := context.WithTimeout(ctx, 10*time.Second)
		st, err := c.Status(asking, &skeinv1.StatusRequest{})
		cancel()
		switch {
		case err != nil:
			return fmt.Errorf("node %s: %w", n.Name, err)
		case st.GetPhase() != "running" || st.GetNodes() != siteFleetSize:
			return fmt.Errorf("node %s is %s and knows %d members, want %d", n.Name, st.GetPhase(), st.GetNodes(), siteFleetSize)
		case first != nil && st.GetStateHash() != first.GetStateHash():
			return fmt.Errorf("nodes %s and %s do not have the same state yet", first.GetName(), n.Name)
		case n.Server:
		case st.GetNodesAlive() < siteFleetRun:
			return fmt.Errorf("node %s finds %d members alive", n.Name, st.GetNodesAlive())
		case n.Leader:
		case st.GetPeers() != each-1:
			return fmt.Errorf("node %s has %d peers, want those of its site", n.Name, st.GetPeers())
		case !st.GetEventsByLeader() || len(st.GetSiteLeaders()) != siteFleetLead:
			return fmt.Errorf("node %s has its events from %q and is led by %q", n.Name, st.GetEventsFromName(),
				st.GetSiteLeaders())
		}
		if first == nil {
			first = st
		}
	}
	return nil
}

// measureRest tells what agents cost at rest, when their memory has settled.
func (b *bench) measureRest(ctx context.Context, l *lab.Lab, nodes ...string) (out []atRest, err error) {
	for _, node := range nodes {
		r, err := watchMemory(ctx, l, node, b.opts.pick(50*time.Second, 6*time.Second))
		if err != nil {
			return nil, err
		}
		out = append(out, atRest{residence: r})
	}
	links := func() (map[string]linkCount, error) {
		sum := map[string]linkCount{}
		for _, node := range nodes {
			info, err := l.Node(node)
			if err != nil {
				return nil, err
			}
			if sum[node], err = linkBytes(info.PID, fabric.HostLink); err != nil {
				return nil, err
			}
		}
		return sum, nil
	}
	before, err := l.Usage(ctx, nodes...)
	if err != nil {
		return nil, err
	}
	then, err := links()
	if err != nil {
		return nil, err
	}
	if err := b.pause(ctx, b.opts.pick(siteFleetRest, siteFleetRest/3)); err != nil {
		return nil, err
	}
	now, err := links()
	if err != nil {
		return nil, err
	}
	after, err := l.Usage(ctx, nodes...)
	if err != nil {
		return nil, err
	}
	for i, node := range nodes {
		rates, err := usage.Between(before[node], after[node])
		if err != nil {
			return nil, err
		}
		r, seconds := &out[i], float64(rates.GetIntervalNanos())/1e9
		r.cpu, r.sent = rates.GetCpuPercent(), (now[node].sent-then[node].sent)/seconds
		r.bytes = r.sent + (now[node].received-then[node].received)/seconds
	}
	return out, nil
}

// linkCount are the bytes that a link has passed.
type linkCount struct{ received, sent float64 }

// linkBytes counts those of a link of a process's network namespace.
func linkBytes(pid int, link string) (n linkCount, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", pid))
	if err != nil {
		return n, err
	}
	for line := range strings.Lines(string(text)) {
		name, rest, _ := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if strings.TrimSpace(name) != link || len(f) < 9 {
			continue
		}
		if n.received, err = strconv.ParseFloat(f[0], 64); err != nil {
			return n, err
		}
		n.sent, err = strconv.ParseFloat(f[8], 64)
		return n, err
	}
	return n, fmt.Errorf("process %d has no link %s", pid, link)
}
