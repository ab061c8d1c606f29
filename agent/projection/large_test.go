package projection_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// BenchmarkTenThousand is what a change costs a host that is one of 10,000 in 50 sites, step by step: its plan, how it
// reaches the others, and the Spec. It has the records of its own site, and of four nodes of each other one; one node
// of ten has a block of pods.
func BenchmarkTenThousand(b *testing.B) {
	const inAll, inSites, wide = 10_000, 50, 4
	r := newRanged(b, "10.4.0.0/16", &skeinv1.Pool{Name: "p", BlockSizeBits: 5,
		Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/14", Ipv6: "fd02::/110"}}})
	for i := 1; i < inAll; i++ {
		r.join(fmt.Sprint("site", i%inSites), true)
	}
	for i, id := range r.ids {
		if i%10 == 0 {
			r.block(id, r.sites[id])
		}
	}
	yes, now := func(identity.ID) bool { return true }, time.Unix(1e9, 0)
	way := func(p *sites.Plan, to identity.ID) (sites.Way, bool) {
		return p.Way(to, func(identity.ID) bool { return false })
	}
	for what, self := range map[string]identity.ID{"member": r.ids[500], "leader": r.ids[0]} {
		in := sites.Input{Self: self, Settings: r.s.Settings(), Records: map[identity.ID]*skeinv1.Record{}, Alive: yes,
			Members: r.members()}
		for i, id := range r.ids {
			if r.sites[id] == r.sites[self] || i < wide*inSites {
				in.Records[id] = &skeinv1.Record{Site: r.sites[id]}
			}
			if i < 2*inSites {
				in.Records[id].Leads, in.Records[id].LeaderWish = 1, true
			}
		}
		b.Run(what+"/plan", func(b *testing.B) {
			var c sites.Course
			for b.Loop() {
				c.Plan(in, now.Add(-time.Hour), yes, now)
			}
		})
		p := sites.Make(in)
		b.Run(what+"/reach", func(b *testing.B) {
			var f sites.Follower
			for b.Loop() {
				f.Follow(p, now)
				f.Reach(yes, yes, way, now)
			}
		})
		at := r.inputOf(in)
		b.Run(what+"/spec", func(b *testing.B) {
			for b.Loop() {
				projection.Project(at)
			}
			spec, _ := projection.Project(at)
			b.ReportMetric(float64(len(spec.WireGuard.Peers)), "peers")
		})
	}
}
