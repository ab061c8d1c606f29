package bench

import (
	"context"
	"os"
	"testing"

	"github.com/skeinmesh/skein/chaos/lab"
)

// TestSiteFleetMembers: with those that run, all sites are equally large, and as many lead each and are known
// everywhere.
func TestSiteFleetMembers(t *testing.T) {
	spec, err := lab.Parse("sitefleet.yaml", siteFleetLab())
	if err != nil {
		t.Fatal(err)
	}
	in, lead, wide, numbers := map[string]int{}, map[string]int{}, map[string]int{}, map[int]bool{}
	for _, n := range spec.Nodes {
		in[n.Site]++
		if n.Leader || n.Server {
			lead[n.Site]++
			wide[n.Site]++
		}
	}
	members := siteFleetMembers(spec)
	for _, m := range members {
		in[m.site]++
		numbers[m.number] = true
		if m.slot > 0 {
			lead[m.site]++
		}
		if m.wide() {
			wide[m.site]++
		}
	}
	leader, ok := spec.Node(siteFleetLeader)
	if !ok || !leader.Leader || leader.Site != siteFleetSite {
		t.Errorf("%s, which is measured as a leader, is %+v", siteFleetLeader, leader)
	}
	if len(in) != siteFleetSites || len(numbers)+len(spec.Nodes) != siteFleetSize {
		t.Errorf("%d members in %d sites beside %d nodes", len(numbers), len(in), len(spec.Nodes))
	}
	for site, n := range in {
		if n != siteFleetSize/siteFleetSites || lead[site] != siteFleetLead || wide[site] != siteFleetWide {
			t.Errorf("site %s has %d members, %d of them lead, %d are known everywhere", site, n, lead[site], wide[site])
		}
	}
	speaking := map[string]int{}
	for _, m := range siteFleetSpeakers(members, siteFleetSite) {
		speaking[m.site]++
	}
	for site, n := range speaking {
		want := siteFleetWide
		if site == siteFleetSite {
			want = siteFleetSize / siteFleetSites
		}
		for _, n := range spec.Nodes {
			if n.Site == site {
				want--
			}
		}
		if n != want {
			t.Errorf("%d simulated nodes of site %s gossip, want %d", n, site, want)
		}
	}
}

// TestSiteFleetTakesItsTime: a first look leaves it out unless it is asked for.
func TestSiteFleetTakesItsTime(t *testing.T) {
	b := &bench{opts: Options{Quick: true}}
	if f := b.siteFleet(context.Background()); f != nil {
		t.Errorf("%+v", f)
	}
}

func TestLinkBytes(t *testing.T) {
	if _, err := linkBytes(os.Getpid(), "lo"); err != nil {
		t.Error(err)
	}
	if n, err := linkBytes(os.Getpid(), "nolink"); err == nil {
		t.Errorf("a link that is not there has passed %+v", n)
	}
}
