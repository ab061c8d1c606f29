package bench

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

//go:embed sites.yaml
var sitesLab []byte

const (
	leadersEach  = 2                // of each site in sitesLab: NAME1 and NAME2, which wish to lead
	membersEach  = 2                // NAME3 and NAME4, which do not
	sitesPort    = 80               // that members serve
	siteSettled  = 90 * time.Second // within which a site has its leaders again
	siteBefore   = 25               // answers of each stream before a fault
	sitePatience = 15 * time.Second // a fault that takes longer counts as that long

	// siteCalm is four half-lives of what an agent remembers of its own lateness, see internal/lag. Nineteen agents
	// that start at once wake late, and who wakes late waits longer for answers.
	siteCalm = 16 * time.Second
)

// siteField is the lab of the group sites.
type siteField struct {
	*field
	sites []string
}

// inSites runs fn in a new lab whose sites have their leaders.
func (b *bench) inSites(ctx context.Context, fn func(*siteField) error) (err error) {
	l, down, err := b.raise(ctx, sitesLab)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	f := &siteField{field: &field{bench: b, lab: l, names: l.Spec.NodeNames()}}
	for _, s := range l.Spec.Sites {
		f.sites = append(f.sites, s.Name)
	}
	if err := f.prepare(ctx); err != nil {
		return errors.Join(err, f.keep(ctx))
	}
	if err := fn(f); err != nil {
		return errors.Join(err, f.keep(ctx))
	}
	return nil
}

// prepare waits until the mesh stands: all paths that count are direct, and the leaders of all sites lead.
func (f *siteField) prepare(ctx context.Context) error {
	if err := f.lab.WaitConverged(ctx, siteSettled); err != nil {
		return err
	}
	var members []string
	for _, s := range f.sites {
		members = append(members, f.members(s)...)
	}
	if err := f.lab.Serve(lab.Serve{Nodes: members, Port: sitesPort}); err != nil {
		return err
	}
	if err := f.direct(ctx); err != nil {
		return err
	}
	for _, s := range f.sites {
		if err := f.awaitSettled(ctx, s); err != nil {
			return err
		}
	}
	return f.pause(ctx, f.opts.pick(siteCalm, 0))
}

// direct waits until no leader is the relay of a path that another leader's streams take: all leaders have direct paths
// to each other, and members to theirs. A path that has died is not trusted again for some seconds.
func (f *siteField) direct(ctx context.Context) error {
	path := []string{"direct"}
	var leaders []string
	for _, s := range f.sites {
		leaders = append(leaders, f.leaders(s)...)
		own := lab.Expect{From: f.members(s), To: f.leaders(s), Path: path}
		if err := f.lab.Expect(ctx, siteSettled, own); err != nil {
			return err
		}
	}
	return f.lab.Expect(ctx, siteSettled, lab.Expect{From: leaders, To: leaders, Path: path})
}

func (f *siteField) leaders(site string) []string { return numbered(site, 1, leadersEach) }
func (f *siteField) members(site string) []string { return numbered(site, 1+leadersEach, membersEach) }

func numbered(site string, from, count int) (out []string) {
	for i := range count {
		out = append(out, fmt.Sprintf("%s%d", site, from+i))
	}
	return out
}

// awaitSettled waits until the members of every site see that a site's leaders lead it, and reach it through them. Its
// own members must go by them, one that has led meanwhile goes by itself for a while longer, and be reached by the one
// that they send through: who has just lost its path to a leader goes by another one for some seconds.
func (f *siteField) awaitSettled(ctx context.Context, site string) error {
	return f.untilEvery(ctx, 200*time.Millisecond, siteSettled, func() error {
		for _, s := range f.sites {
			for _, m := range f.members(s) {
				if err := f.sees(ctx, m, site); err != nil {
					return err
				}
			}
		}
		bound := map[string]string{}
		for _, m := range f.members(site) {
			leader, err := f.boundTo(ctx, m)
			if err == nil && leader == "" {
				err = fmt.Errorf("%s goes to other sites by itself", m)
			}
			if err != nil {
				return err
			}
			bound[m] = leader
		}
		for _, s := range f.sites {
			if s == site {
				continue
			}
			for _, l := range f.leaders(s) {
				hops, err := f.hops(ctx, l)
				if err != nil {
					return err
				}
				for m, leader := range bound {
					if hops[m] != leader {
						return fmt.Errorf("%s sends through %s, and is reached by %s through %q", m, leader, l, hops[m])
					}
				}
			}
		}
		return nil
	})
}

// sees tells whether a member sees the leaders of a site lead it, and what is in another site behind a leader.
func (f *siteField) sees(ctx context.Context, member, site string) error {
	c, err := f.lab.Client(member)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	nodes, err := c.Nodes(ctx, &skeinv1.NodesRequest{})
	if err != nil {
		return err
	}
	var lead []string
	for _, n := range nodes.GetNodes() {
		if n.GetSite() == site && n.GetSiteLeads() == "leader" {
			lead = append(lead, n.GetNode().GetName())
		}
	}
	slices.Sort(lead)
	if want := f.leaders(site); !slices.Equal(lead, want) {
		return fmt.Errorf("%s is led by %q as %s sees it, want %q", site, lead, member, want)
	}
	hops, err := f.hops(ctx, member)
	if err != nil {
		return err
	}
	for _, s := range f.sites {
		if s == f.site(member) || s != site && site != f.site(member) {
			continue
		}
		for _, to := range f.members(s) {
			if hops[to] == "" {
				return fmt.Errorf("%s has no leader to %s", member, to)
			}
		}
	}
	return nil
}

// hops says by which leader of its own site a node reaches others.
func (f *siteField) hops(ctx context.Context, from string) (map[string]string, error) {
	c, err := f.lab.Client(from)
	if err != nil {
		return nil, err
	}
	r, err := c.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask %s for its peers: %w", from, err)
	}
	out := map[string]string{}
	for _, p := range r.GetPeers() {
		if p.GetPath() == "hop" {
			out[p.GetName()] = p.GetRelayName()
		}
	}
	return out, nil
}

// boundTo is the leader of its own site that a member sends through, the same one to all other sites, and back; "":
// none, as it leads itself, or did until a moment ago.
func (f *siteField) boundTo(ctx context.Context, member string) (string, error) {
	hops, err := f.hops(ctx, member)
	if err != nil {
		return "", err
	}
	var others []string
	for _, s := range f.sites {
		if s != f.site(member) {
			others = append(others, f.members(s)...)
		}
	}
	return ownLeader(member, others, hops, f.site)
}

// ownLeader is boundTo for what a member says: by whom it goes to others.
func ownLeader(member string, others []string, hops map[string]string, site func(string) string) (string, error) {
	leader, first := "", true
	for _, to := range others {
		by := hops[to]
		if by != "" && site(by) != site(member) {
			by = "" // it is in touch with the other site's leaders
		}
		if !first && by != leader {
			return "", fmt.Errorf("%s goes to %s by %q of its site, and elsewhere by %q", member, to, by, leader)
		}
		leader, first = by, false
	}
	return leader, nil
}

// siteStream is traffic between two members of different sites.
type siteStream struct {
	pair
	kind string
	flow interface {
		Answered(context.Context, int) error
		Stop() ping.Report
	}
	count func() int
	tcp   *lab.FlowStream // a connection that stays open; nil: none
}

// siteTraffic is what goes on between all sites during a run.
type siteTraffic struct{ streams []siteStream }

// Kinds of streams.
const (
	streamEcho    = "echo"
	streamConnect = "new connections"
	streamTCP     = "open connection"
)

// sitePairs are the pairs of members that have traffic: each site's third node with each other site's, and likewise the
// fourth ones, with either end beginning in turns. Every leader that some member is bound to is passed by three pairs
// at least.
func (f *siteField) sitePairs() (out []pair) {
	for n := range membersEach {
		for i, a := range f.sites {
			for j, b := range f.sites[i+1:] {
				p := pair{f.members(a)[n], f.members(b)[n]}
				if j%2 == 1 {
					p = pair{p.to, p.from}
				}
				out = append(out, p)
			}
		}
	}
	return out
}

// start begins, on each pair, 50 echoes a second with size bytes of data and a new TCP connection each 20 ms; with open
// also a connection that stays, with 50 numbers a second there and back. All have been answered when it returns.
func (f *siteField) start(ctx context.Context, size int, open bool) (t *siteTraffic, err error) {
	t = &siteTraffic{}
	defer func() {
		if err != nil {
			t.stop()
		}
	}()
	for _, p := range f.sitePairs() {
		dst, err := f.lab.Overlay(p.to, "ipv4")
		if err != nil {
			return t, err
		}
		echo, err := f.lab.PingSized(p.from, dst, pingEvery, 0, size)
		if err != nil {
			return t, err
		}
		answered := func() int { return echo.Report().Received }
		t.streams = append(t.streams, siteStream{pair: p, kind: streamEcho, flow: echo, count: answered})
		at := netip.AddrPortFrom(dst, sitesPort)
		connects, err := f.lab.Connect(p.from, at, pingEvery)
		if err != nil {
			return t, err
		}
		t.streams = append(t.streams, siteStream{pair: p, kind: streamConnect, flow: connects, count: connects.Count})
		if !open {
			continue
		}
		dial, cancel := context.WithTimeout(ctx, sitePatience)
		tcp, err := f.lab.OpenFlow(dial, p.from, at, "tcp", pingEvery)
		cancel()
		if err != nil {
			return t, err
		}
		t.streams = append(t.streams, siteStream{pair: p, kind: streamTCP, flow: tcp, count: tcp.Count, tcp: tcp})
	}
	return t, t.answered(ctx, siteBefore)
}

// answered waits until each stream has had so many more answers.
func (t *siteTraffic) answered(ctx context.Context, more int) error {
	ctx, cancel := context.WithTimeout(ctx, sitePatience)
	defer cancel()
	want := make([]int, len(t.streams))
	for i, s := range t.streams {
		want[i] = s.count() + more
	}
	for i, s := range t.streams {
		if err := s.flow.Answered(ctx, want[i]); err != nil {
			return fmt.Errorf("%s of %s: %w", s.kind, s.pair, err)
		}
	}
	return nil
}

// siteOutcome is what became of one stream.
type siteOutcome struct {
	pair
	kind string
	ping.Report
	broken bool // a connection that was open
}

func (t *siteTraffic) stop() []siteOutcome {
	out := make([]siteOutcome, len(t.streams))
	var wg sync.WaitGroup
	for i, s := range t.streams {
		wg.Go(func() {
			out[i] = siteOutcome{pair: s.pair, kind: s.kind, Report: s.flow.Stop()}
			out[i].broken = s.tcp != nil && s.tcp.Broken() != nil
		})
	}
	wg.Wait()
	t.streams = nil
	return out
}

// siteRun is what a fault of one leader did to all streams.
type siteRun struct {
	leader          string
	through, others []siteOutcome // streams with an end that is bound to the leader, and all others
}

// split tells streams that pass a leader from others. bound is the leader of each member.
func split(all []siteOutcome, leader string, bound map[string]string) (r siteRun) {
	r.leader = leader
	for _, o := range all {
		if bound[o.from] == leader || bound[o.to] == leader {
			r.through = append(r.through, o)
		} else {
			r.others = append(r.others, o)
		}
	}
	return r
}

// worst is the stream that stood still for longest.
func worst(all []siteOutcome) (longest time.Duration, which string) {
	for _, o := range all {
		if d := o.Longest(); d >= longest {
			longest, which = d, fmt.Sprintf("%s %s", o.kind, o.pair)
		}
	}
	return longest, which
}

// total adds up what streams lost, of what they sent, and how many connections broke.
func total(all []siteOutcome) (lost, sent, broken, open int) {
	for _, o := range all {
		lost, sent = lost+o.Lost(), sent+o.Sent
		if o.broken {
			broken++
		}
		if o.kind == streamTCP {
			open++
		}
	}
	return lost, sent, broken, open
}
