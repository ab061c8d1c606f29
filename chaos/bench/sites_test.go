package bench

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

func testSites(t *testing.T) *siteField {
	t.Helper()
	spec, err := lab.Parse("sites.yaml", sitesLab)
	if err != nil {
		t.Fatal(err)
	}
	f := &siteField{field: &field{bench: &bench{}, lab: &lab.Lab{Spec: spec}, names: spec.NodeNames()}}
	for _, s := range spec.Sites {
		f.sites = append(f.sites, s.Name)
	}
	return f
}

// TestSitePairs: every two sites have traffic, every member has some with each other site, and both ends begin.
func TestSitePairs(t *testing.T) {
	f := testSites(t)
	pairs := f.sitePairs()
	met, begins := map[pair]int{}, map[string]int{}
	for _, p := range pairs {
		a, b := f.site(p.from), f.site(p.to)
		met[pair{min(a, b), max(a, b)}]++
		begins[p.from]++
		begins[p.to]--
		for _, n := range []string{p.from, p.to} {
			if node, ok := f.lab.Spec.Node(n); !ok || node.Leader || node.Server {
				t.Errorf("%s: %s is not there, or leads, or is a server", p, n)
			}
		}
	}
	if len(pairs) != 12 || len(met) != 6 {
		t.Errorf("%d pairs between %d pairs of sites, want 12 and 6: %v", len(pairs), len(met), pairs)
	}
	for n, more := range begins {
		if more == 3 || more == -3 {
			t.Errorf("%s begins all of its streams, or none", n)
		}
	}
	for _, s := range f.sites {
		for _, n := range f.leaders(s) {
			if node, ok := f.lab.Spec.Node(n); !ok || !node.Leader || node.Site != s {
				t.Errorf("%s is not a leader of %s", n, s)
			}
		}
	}
}

// outcome is a stream of which so many of ten were lost, a second apart.
func outcome(from, to, kind string, lost int) siteOutcome {
	var tally ping.Tally
	at := time.Unix(1000, 0)
	for i := range 10 {
		n := tally.Sent(at.Add(time.Duration(i) * time.Second))
		if i < 1 || i > lost {
			tally.Received(n, at.Add(time.Duration(i)*time.Second+time.Millisecond))
		}
	}
	return siteOutcome{pair: pair{from, to}, kind: kind, Report: tally.Report(at.Add(time.Minute), time.Second)}
}

func TestSplitByLeader(t *testing.T) {
	bound := map[string]string{"home3": "home1", "home4": "home2", "dc3": "dc1", "dc4": "dc1"}
	all := []siteOutcome{
		outcome("home3", "dc3", streamEcho, 0),
		outcome("dc4", "home3", streamConnect, 3),
		outcome("home4", "dc3", streamEcho, 1),
	}
	r := split(all, "home1", bound)
	if len(r.through) != 2 || len(r.others) != 1 || r.others[0].from != "home4" {
		t.Errorf("through %d, others %d", len(r.through), len(r.others))
	}
	d, which := worst(r.through)
	if d < 3*time.Second || d > 4*time.Second+time.Millisecond || which != "new connections dc4→home3" {
		t.Errorf("worst: %s, %s", d, which)
	}
	var sum tallied
	sum.add("run 1", r.others)
	if f := sum.figure("x", "0", ""); f.Verdict != Missed || f.Got != "1 of 10 lost" || len(f.Detail) != 1 {
		t.Errorf("%+v", f)
	}
	broken := outcome("home4", "dc3", streamTCP, 0)
	broken.broken = true
	sum = tallied{}
	sum.add("run 1", []siteOutcome{broken, outcome("a", "b", streamTCP, 0)})
	const want = "0 of 20 lost, 1 of 2 open connections broken"
	if f := sum.figure("x", "0", ""); f.Verdict != Missed || f.Got != want {
		t.Errorf("%+v", f)
	}
	if f := (&tallied{}).figure("x", "0", ""); f.Verdict != Missed {
		t.Errorf("nothing was sent, and %+v", f)
	}
}

// TestOwnLeader: a member that leads, or did, goes to other sites by their leaders, or directly.
func TestOwnLeader(t *testing.T) {
	f := testSites(t)
	others := []string{"dc3", "cloud3"}
	for _, c := range []struct {
		hops map[string]string
		want string
		fail bool
	}{
		{map[string]string{"dc3": "home1", "cloud3": "home1"}, "home1", false},
		{map[string]string{"dc3": "dc1", "cloud3": "cloud2"}, "", false},
		{map[string]string{"dc3": "dc1"}, "", false},
		{map[string]string{"dc3": "home1", "cloud3": "home2"}, "", true},
		{map[string]string{"dc3": "home1"}, "", true},
	} {
		got, err := ownLeader("home3", others, c.hops, f.site)
		if got != c.want || (err != nil) != c.fail {
			t.Errorf("%v: %q, %v", c.hops, got, err)
		}
	}
}

func TestShareOfNodesThatMove(t *testing.T) {
	for _, f := range shareFigures() {
		if f.Verdict != Reached {
			t.Errorf("%+v", f)
		}
	}
}

func TestFaultsAreChosenByName(t *testing.T) {
	for _, n := range Faults() {
		if err := (Options{Faults: []string{n}}).checkFaults(); err != nil {
			t.Error(err)
		}
	}
	err := Options{Faults: []string{"kiled"}}.checkFaults()
	if err == nil || !strings.Contains(err.Error(), "allowed: killed, paused, cut, zombie-new") {
		t.Errorf("%v", err)
	}
	if !slices.Contains(Groups(), "sites") {
		t.Error("there is no group sites")
	}
	for _, c := range []struct {
		o    Options
		want int
	}{{Options{}, 30}, {Options{Quick: true}, 3}, {Options{Runs: 7, Quick: true}, 7}} {
		if n := c.o.siteRuns(); n != c.want {
			t.Errorf("%+v: %d runs, want %d", c.o, n, c.want)
		}
	}
}
