package projection_test

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// ranged is a cluster whose sites speak through leaders, and have ranges.
type ranged struct {
	t     interface{ Fatalf(string, ...any) }
	s     *events.State
	ids   []identity.ID
	sites map[identity.ID]string
	n     int
}

func newRanged(t interface{ Fatalf(string, ...any) }, overlay string, pools ...*skeinv1.Pool) *ranged {
	r := &ranged{t: t, s: events.NewState(), sites: map[identity.ID]string{}}
	first := r.node("site0")
	r.do(&skeinv1.Command{Body: &skeinv1.Command_CreateCluster{CreateCluster: &skeinv1.CreateCluster{
		ClusterId: "0123456789abcdef0123456789abcdef", OverlayIpv4: overlay, FirstNode: first,
		Settings: &skeinv1.Settings{Topology: "site"}}}})
	r.note(first, "site0")
	secret := sha256.Sum256([]byte("secret"))
	r.do(&skeinv1.Command{Body: &skeinv1.Command_CreateToken{CreateToken: &skeinv1.CreateToken{
		Id: "0000000000000001", SecretHash: secret[:], LifetimeNanos: int64(time.Hour), Uses: 100000}}})
	for _, p := range pools {
		r.do(&skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{Pool: p}}})
	}
	return r
}

func (r *ranged) do(c *skeinv1.Command) *skeinv1.Answer {
	r.n++
	h := sha256.Sum256(fmt.Append(nil, "entropy ", r.n))
	c.Time, c.Entropy = int64(time.Hour)+int64(r.n), append(h[:], h[:]...)
	evs, a, err := events.Decide(r.s, c)
	if err != nil {
		r.t.Fatalf("%v: %v", c, err)
	}
	for _, e := range evs {
		if err := r.s.Fold(e); err != nil {
			r.t.Fatalf("%v", err)
		}
	}
	return a
}

func (r *ranged) node(site string) *skeinv1.NewNode {
	seed := sha256.Sum256(fmt.Append(nil, "node ", len(r.ids)))
	return &skeinv1.NewNode{Name: fmt.Sprintf("n%d", len(r.ids)),
		IdentityKey:  ed25519.NewKeyFromSeed(seed[:]).Public().(ed25519.PublicKey),
		WireguardKey: seed[:], MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax, Site: site, SiteSaid: true}
}

func (r *ranged) note(n *skeinv1.NewNode, site string) identity.ID {
	id := identity.IDOf(n.GetIdentityKey())
	r.ids = append(r.ids, id)
	r.sites[id] = site
	return id
}

// join has a node join that says that it is at a site.
func (r *ranged) join(site string, said bool) identity.ID {
	n := r.node(site)
	n.SiteSaid = said
	secret := sha256.Sum256([]byte("secret"))
	r.do(&skeinv1.Command{Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
		Node: n, TokenId: "0000000000000001", TokenSecret: []byte("secret"), TokenSecretHash: secret[:],
		ClusterId: r.s.Cluster().GetId()}}})
	return r.note(n, site)
}

func (r *ranged) block(id identity.ID, site string) {
	r.do(&skeinv1.Command{Body: &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{
		NodeId: id.String(), Pool: "p", Total: uint32(len(r.s.BlocksOf(id.String())) + 1), Site: site, SiteSaid: true}}})
}

func (r *ranged) overlay(id identity.ID) netip.Addr {
	return netip.MustParseAddr(r.s.Node(id).GetIpv4())
}

// has are the prefixes of a member.
func (r *ranged) has(id identity.ID) []netip.Prefix {
	n := r.s.Node(id)
	var out []netip.Prefix
	for _, text := range []string{n.GetIpv4(), n.GetIpv6()} {
		a := netip.MustParseAddr(text)
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	for _, b := range r.s.BlocksOf(id.String()) {
		for _, text := range []string{b.GetIpv4(), b.GetIpv6()} {
			if text != "" {
				out = append(out, netip.MustParsePrefix(text))
			}
		}
	}
	return out
}

// longest is the value of the longest prefix around an address.
func longest[V any](a netip.Addr, all []V, of func(V) netip.Prefix) (best V, ok bool) {
	for _, v := range all {
		if p := of(v); p.Contains(a) && (!ok || p.Bits() > of(best).Bits()) {
			best, ok = v, true
		}
	}
	return best, ok
}

func hopPrefix(r dataplane.HopRoute) netip.Prefix  { return r.Prefix }
func narrowPrefix(n dataplane.Narrow) netip.Prefix { return n.Prefix }
func itself(p netip.Prefix) netip.Prefix           { return p }

// ends are the first and the last address of a prefix.
func ends(p netip.Prefix) []netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return []netip.Addr{p.Addr(), last}
}

// TestAggregatesLeadAsSingleRoutesDo: in whatever mesh, what a member has goes by the way of that member alone, comes
// in from whom that member's packets may come, and nothing else that is somebody's is covered.
func TestAggregatesLeadAsSingleRoutesDo(t *testing.T) {
	aggregated := 0
	rapid.Check(t, func(t *rapid.T) {
		pool := &skeinv1.Pool{Name: "p", BlockSizeBits: 2,
			Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/23", Ipv6: "fd02::/119"}}}
		r := newRanged(t, "10.4.0.0/24", pool)
		site := rapid.SampledFrom([]string{"site0", "site1", "site2"})
		for range rapid.IntRange(3, 40).Draw(t, "nodes") {
			id := r.join(site.Draw(t, "site"), rapid.IntRange(0, 9).Draw(t, "says it") > 0)
			if rapid.IntRange(0, 9).Draw(t, "moves") == 0 {
				r.sites[id] = site.Draw(t, "moved to")
			}
		}
		for _, id := range r.ids {
			if len(r.s.Blocks()) < 100 && rapid.Bool().Draw(t, "block") {
				r.block(id, site.Draw(t, "block's site"))
			}
		}
		for range rapid.IntRange(0, 3).Draw(t, "reserved") {
			at := netip.AddrFrom4([4]byte{10, 64, byte(rapid.IntRange(0, 1).Draw(t, "high")),
				byte(rapid.IntRange(0, 255).Draw(t, "low"))})
			if _, _, b := r.s.BlockAt(at); b.GetNodeId() == "" {
				r.do(&skeinv1.Command{Body: &skeinv1.Command_ReserveBlock{ReserveBlock: &skeinv1.ReserveBlock{Pool: "p",
					Prefix: at.String()}}})
			}
		}
		self := rapid.SampledFrom(r.ids).Draw(t, "self")
		in := projection.Input{Self: self, State: r.s, Complete: true, Records: map[identity.ID]*skeinv1.Record{},
			Endpoints: map[identity.ID]projection.Endpoint{}}
		isPeer, ways, known, guards := map[identity.ID]bool{}, map[identity.ID]projection.Way{}, maps.Clone(r.sites),
			[]projection.Guard(nil)
		var peers []identity.ID
		for _, id := range r.ids {
			if id != self && (len(peers) == 0 || r.sites[id] == r.sites[self] || rapid.IntRange(0, 4).Draw(t, "peer") == 0) {
				peers = append(peers, id)
				isPeer[id] = true
				if rapid.Bool().Draw(t, "passed") {
					ways[id] = projection.Way{Via: id, Passed: true}
				}
				in.Endpoints[id] = projection.Endpoint{MTU: rapid.SampledFrom([]int{0, 1300, 1350}).Draw(t, "MTU")}
			}
		}
		few := peers[:min(len(peers), rapid.IntRange(1, 3).Draw(t, "leaders"))]
		for _, id := range r.ids {
			if id != self && !isPeer[id] && rapid.IntRange(0, 15).Draw(t, "no way") > 0 {
				ways[id] = projection.Way{Via: rapid.SampledFrom(few).Draw(t, "via")}
			}
			if rapid.IntRange(0, 30).Draw(t, "unknown") == 0 {
				delete(known, id)
			}
		}
		of := map[identity.ID]map[identity.ID]bool{}
		for _, from := range few {
			of[from] = map[identity.ID]bool{}
			kind := rapid.IntRange(0, 3).Draw(t, "guard")
			g := projection.Guard{From: from}
			for _, id := range r.ids {
				take := []bool{id == from, r.sites[id] == r.sites[from], r.sites[id] != r.sites[self],
					rapid.Bool().Draw(t, "of")}[kind]
				if id != self && take {
					of[from][id] = true
					g.Of = append(g.Of, id)
				}
			}
			guards = append(guards, g)
		}
		in.Reach = sites.NewReach(r.sites[self], isPeer, ways, known, guards)
		spec, refused := projection.Project(in)
		if len(refused) > 0 {
			t.Fatalf("refused: %v", refused)
		}
		led := slices.DeleteFunc(slices.Clone(spec.Hops.Routes), func(h dataplane.HopRoute) bool { return h.Last })
		for _, h := range led {
			if h.Prefix.Bits() < 30 {
				aggregated++
			}
		}
		for _, id := range r.ids {
			way, hop := in.Reach.Way(id)
			hop = hop && !way.Passed
			for _, p := range r.has(id) {
				for _, a := range ends(p) {
					got, ok := longest(a, spec.Hops.Routes, hopPrefix)
					ok = ok && !got.Last // own packets go straight there
					if ok != hop || ok && got.Via != r.overlay(way.Via) {
						t.Fatalf("%s of %s goes by %v, %t; want %v, %t\n%s", a, id, got, ok, way, hop, text(spec))
					}
					_, target := longest(a, spec.Targets, itself)
					if target != (id != self) {
						t.Fatalf("%s of %s is a target: %t", a, id, target)
					}
					n, _ := longest(a, spec.Link.Narrow, narrowPrefix)
					if n.MTU == dataplane.MTU {
						n.MTU = 0
					}
					if want := mtuOf(in, id); id != self && n.MTU != want {
						t.Fatalf("%s of %s has MTU %d, want %d", a, id, n.MTU, want)
					}
					if p.Bits() < a.BitLen() {
						n, ok := longest(a, spec.Pods.Remote, narrowPrefix)
						if ok != (id != self) || ok && n.MTU != mtuOf(in, id) {
							t.Fatalf("%s of %s has the pods' route %v, %t", a, id, n, ok)
						}
					}
					for from, set := range of {
						i := slices.IndexFunc(spec.Hops.Guards, func(g dataplane.HopGuard) bool { return g.From == r.overlay(from) })
						if _, may := longest(a, spec.Hops.Guards[i].Sources, itself); may != set[id] {
							t.Fatalf("%s may bring %s of %s: %t, want %t", from, a, id, may, set[id])
						}
					}
				}
			}
		}
		for _, p := range spec.Pods.Elsewhere {
			for _, a := range ends(p) {
				_, hop := longest(a, led, hopPrefix)
				_, target := longest(a, spec.Targets, itself)
				if hop || target {
					t.Fatalf("%s is elsewhere, and leads into the tunnel", a)
				}
			}
		}
	})
	if aggregated == 0 {
		t.Error("no mesh had a route for more than a block")
	}
}

// mtuOf is what a member's single route would have.
func mtuOf(in projection.Input, id identity.ID) int {
	way, hop := in.Reach.Way(id)
	mtu := in.Endpoints[id].MTU
	if hop {
		mtu = in.Endpoints[way.Via].MTU
	}
	switch {
	case hop && !way.Passed && mtu == 0:
		return dataplane.MTU - dataplane.HopOverhead
	case hop && mtu > 0:
		return mtu - dataplane.HopOverhead
	}
	return mtu
}

// tenSites is a mesh of ten sites of 100 nodes, of which two each lead, with a block of pods on each node or without.
func tenSites(t interface{ Fatalf(string, ...any) }, blocks bool) *ranged {
	pool := &skeinv1.Pool{Name: "p", BlockSizeBits: 5,
		Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16", Ipv6: "fd02::/112"}}}
	r := newRanged(t, "10.4.0.0/16", pool)
	for i := 1; i < 1000; i++ {
		r.join(fmt.Sprintf("site%d", i%10), true)
	}
	for _, id := range r.ids {
		if blocks {
			r.block(id, r.sites[id])
		}
	}
	return r
}

// input is that of one of the hosts, by the plan that it makes. Of hidden it has no record.
func (r *ranged) input(self identity.ID, hidden ...identity.ID) projection.Input {
	in := sites.Input{Self: self, Settings: r.s.Settings(), Records: map[identity.ID]*skeinv1.Record{},
		Alive: func(identity.ID) bool { return true }, Members: r.members()}
	for i, id := range r.ids {
		v := &skeinv1.Record{Site: r.sites[id]}
		if i < 20 {
			v.Leads, v.LeaderWish = 1, true
		}
		if !slices.Contains(hidden, id) {
			in.Records[id] = v
		}
	}
	return r.inputOf(in)
}

// members are the mesh's, as plans need them.
func (r *ranged) members() *sites.Members {
	return sites.NewMembers(r.s.Nodes(), func(id identity.ID) (string, bool) {
		v, ok := r.s.RangeAt(netip.MustParseAddr(r.s.Node(id).GetIpv4()))
		return v.Site, ok
	}, r.s.Slices())
}

// inputOf is that of a host that plans from this.
func (r *ranged) inputOf(in sites.Input) projection.Input {
	return projection.Input{Self: in.Self, State: r.s, Records: in.Records, Complete: true,
		Endpoints: map[identity.ID]projection.Endpoint{}, Keys: &projection.Keys{}, Reach: reachOf(sites.Make(in))}
}

// reachOf is how a host reaches the others by its first plan, while all leaders live.
func reachOf(p *sites.Plan) *projection.Reach {
	var f sites.Follower
	yes := func(identity.ID) bool { return true }
	f.Follow(p, time.Time{})
	return f.Reach(yes, yes, func(p *sites.Plan, to identity.ID) (sites.Way, bool) {
		return p.Way(to, func(identity.ID) bool { return false })
	}, time.Time{})
}

// size counts what a host has of a mesh.
type size struct{ peers, routes4, routes6, last, narrow, pods4, pods6, targets, guards, sources int }

func sizeOf(s dataplane.Spec) (n size) {
	n = size{peers: len(s.WireGuard.Peers), targets: len(s.Targets), guards: len(s.Hops.Guards),
		narrow: len(s.Link.Narrow)}
	for _, r := range s.Hops.Routes {
		switch {
		case r.Last:
			n.last++
		case r.Prefix.Addr().Is4():
			n.routes4++
		default:
			n.routes6++
		}
	}
	for _, p := range s.Pods.Remote {
		if p.Prefix.Addr().Is4() {
			n.pods4++
		} else {
			n.pods6++
		}
	}
	for _, g := range s.Hops.Guards {
		n.sources += len(g.Sources)
	}
	return n
}

// without is the same host with a route for each member, as before there were ranges.
func without(in projection.Input) projection.Input {
	p := in.State.Proto()
	p.SiteRanges = nil
	s, err := events.FromProto(p)
	if err != nil {
		panic(err)
	}
	in.State = s
	return in
}

// TestTenSitesOfAHundred: what a host knows of the others follows from the number of sites, and not from that of nodes.
func TestTenSitesOfAHundred(t *testing.T) {
	for _, blocks := range []bool{false, true} {
		r := tenSites(t, blocks)
		for what, self := range map[string]identity.ID{"member": r.ids[100], "leader": r.ids[0]} {
			in := r.input(self)
			spec, refused := projection.Project(in)
			if len(refused) > 0 {
				t.Fatal(refused)
			}
			before, _ := projection.Project(without(in))
			n := sizeOf(spec)
			t.Logf("%s, blocks %t: %+v; with a route for each member: %+v", what, blocks, n, sizeOf(before))
			if max(n.peers, n.pods4, n.pods6, n.routes4, n.routes6) > 120 || what == "member" && n.sources > 120 {
				t.Errorf("%s, blocks %t: %+v", what, blocks, n)
			}
		}
	}
}

// TestAJoinChangesNothingElsewhere: neither when the log admits a node of another site, nor when it gets a block, nor
// when its record comes. The same holds for a leader elsewhere.
func TestAJoinChangesNothingElsewhere(t *testing.T) {
	r := tenSites(t, true)
	member, leader := r.ids[100], r.ids[0]
	was, _ := projection.Project(r.input(member))
	led, _ := projection.Project(r.input(leader))
	for range 3 {
		id := r.join("site7", true)
		r.block(id, "site7")
		for what, in := range map[string]projection.Input{"before its record came": r.input(member, id),
			"after": r.input(member)} {
			if now, _ := projection.Project(in); !now.Equal(was) {
				t.Errorf("%s: a join elsewhere changes this:\n%s", what, difference(text(was), text(now)))
			}
		}
	}
	if now, _ := projection.Project(r.input(leader)); !now.Equal(led) {
		t.Errorf("three joins elsewhere change this of a leader's:\n%s", difference(text(led), text(now)))
	}
}

// difference are the lines that one text has and the other has not.
func difference(a, b string) string {
	x, y := strings.Split(a, "\n"), strings.Split(b, "\n")
	var out []string
	for _, l := range x {
		if !slices.Contains(y, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range y {
		if !slices.Contains(x, l) {
			out = append(out, "+ "+l)
		}
	}
	return strings.Join(out, "\n")
}

// BenchmarkProjectSites also measures the processor's time, which other programs disturb less. Routes are those of one
// address family, of overlay addresses and of pods.
func BenchmarkProjectSites(b *testing.B) {
	r := tenSites(b, true)
	for what, self := range map[string]identity.ID{"member": r.ids[100], "leader": r.ids[0]} {
		in := r.input(self)
		for kind, in := range map[string]projection.Input{"": in, " with a route for each": without(in)} {
			b.Run(what+kind, func(b *testing.B) {
				before := processor(b)
				for b.Loop() {
					projection.Project(in)
				}
				b.ReportMetric((processor(b)-before).Seconds()*1000/float64(b.N), "cpu-ms/op")
				spec, _ := projection.Project(in)
				n := sizeOf(spec)
				b.ReportMetric(float64(n.peers), "peers")
				b.ReportMetric(float64(max(n.routes4+n.pods4, n.routes6+n.pods6)), "routes")
			})
		}
	}
}

// processor is the time that this process has used.
func processor(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
