package timetravel

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/labtest"
)

const mesh = `name: timetravel
sites:
  dc:    {nat: none}
  home:  {nat: port-restricted-cone}
  cloud: {nat: symmetric}
nodes:
  dc1:    {site: dc, server: true, relay: true}
  home1:  {site: home}
  cloud1: {site: cloud}
pools:
  default: {subnets: [{ipv4: 10.100.0.0/24}], blockSizeBits: 3}
`

// moments are how many plans are noted in all, and asked for later.
const moments = 510

// noted is what a node said of its plan at a moment.
type noted struct {
	node  string
	asked int64 // Unix ns
	since int64
	index uint64
	text  string
}

// TestPlansOfThen: in a storm of cuts, commands and restarted agents, each plan that was seen comes back byte for
// byte, by the node itself and, for a server, from afar, and the steps between two moments lead from one to the other.
func TestPlansOfThen(t *testing.T) {
	l, _ := labtest.Up(t, "tt", mesh)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	nodes := l.Running()
	calm := make(chan struct{})
	var storming sync.WaitGroup
	storming.Go(func() { storm(ctx, t, l, calm) })
	all := observe(ctx, t, l, nodes)
	close(calm)
	storming.Wait()
	if err := l.Heal(ctx); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		if !slices.Contains(l.Running(), n) {
			if err := l.Start(ctx, n); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := l.WaitConverged(ctx, 60*time.Second); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		plansArePeers(ctx, t, l, n)
	}
	different := map[string]map[string]bool{}
	var slowest time.Duration
	for i, n := range all {
		began := time.Now()
		r, err := plan(ctx, l, n.node, &skeinv1.PlanRequest{AtTime: max(n.asked, n.since)})
		slowest = max(slowest, time.Since(began))
		if err != nil {
			t.Fatalf("%s at %s: %v", n.node, time.Unix(0, n.asked), err)
		}
		if r.GetText() != n.text || r.GetIndex() != n.index || r.GetTime() != n.since {
			t.Fatalf("%s said at %s a plan of %s and event %d, and says now that it was of %s and event %d; lines that it has "+
				"lost and got:\n%s",
				n.node, time.Unix(0, n.asked), time.Unix(0, n.since), n.index, time.Unix(0, r.GetTime()), r.GetIndex(),
				strings.Join(differ(n.text, r.GetText()), "\n"))
		}
		if different[n.node] == nil {
			different[n.node] = map[string]bool{}
		}
		different[n.node][n.text] = true
		if i%10 == 0 { // from afar: dc1 is a server
			r, err := plan(ctx, l, "dc1", &skeinv1.PlanRequest{Node: n.node, AtTime: max(n.asked, n.since)})
			if err != nil || r.GetText() != n.text {
				t.Fatalf("dc1 is told of %s at %s: %v\n%s", n.node, time.Unix(0, n.asked), err, r.GetText())
			}
		}
	}
	for _, n := range nodes {
		t.Logf("%s: %d different plans among those noted", n, len(different[n]))
		if len(different[n]) < 10 {
			t.Errorf("%s had %d different plans: no storm", n, len(different[n]))
		}
		stepsLead(ctx, t, l, n, all)
	}
	t.Logf("%d moments; the slowest answer took %s", len(all), slowest.Round(time.Millisecond))
	if slowest > time.Second {
		t.Errorf("a plan was told after %s; 1 s is promised", slowest)
	}
	inARow(ctx, t, l)
	refusals(ctx, t, l)
}

// inARow: who asks another node more often than it answers waits as long as that node says, and is answered.
func inARow(ctx context.Context, t *testing.T, l *lab.Lab) {
	for i := range 25 { // a node answers 20 in a row
		if _, err := plan(ctx, l, "dc1", &skeinv1.PlanRequest{Node: "home1"}); err != nil {
			t.Fatalf("question %d: %v", i, err)
		}
	}
}

// storm breaks and repairs the mesh until calm is closed, and finishes what it is at: a restart that is cut in the
// middle leaves an agent that the lab does not know of.
func storm(ctx context.Context, t *testing.T, l *lab.Lab, calm <-chan struct{}) {
	rng := rand.New(rand.NewPCG(1, 2))
	others := []string{"home1", "cloud1"}
	for n := 0; ; n++ {
		var err error
		switch rng.IntN(7) {
		case 0:
			err = l.Block(lab.Block{From: []string{others[rng.IntN(2)]}, To: []string{"dc1"}, Proto: "udp"})
		case 1:
			err = l.Heal(ctx)
		case 2:
			err = command(ctx, l, "dc1", "settings", "--keepalive", fmt.Sprint(10+rng.IntN(20)))
		case 3:
			err = command(ctx, l, "dc1", "pool", "create", fmt.Sprintf("p%d", n), "--subnet",
				fmt.Sprintf("10.101.%d.0/27", n%256))
		case 4:
			err = command(ctx, l, "dc1", "peer", "add", fmt.Sprintf("phone%d", n), "--via", "dc1")
		case 5:
			err = command(ctx, l, "dc1", "node", "set", "home1", "--persistent-keepalive", fmt.Sprint(5+n%20))
		case 6:
			node := others[rng.IntN(2)]
			if err = l.Stop(ctx, node); err == nil { // one that is killed loses what it has not written yet
				err = l.Start(ctx, node)
			}
		}
		if err != nil && ctx.Err() == nil {
			t.Logf("the storm's command %d: %v", n, err)
		}
		select {
		case <-calm:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(rng.IntN(300)) * time.Millisecond):
		}
	}
}

func command(ctx context.Context, l *lab.Lab, node string, args ...string) error {
	out, exit, err := l.Exec(ctx, node, append([]string{"skein"}, args...)...)
	if err == nil && exit != 0 {
		err = fmt.Errorf("skein %v: exit status %d: %s", args, exit, out)
	}
	return err
}

// observe asks nodes for their plans at random moments. Those that are away are asked again later.
func observe(ctx context.Context, t *testing.T, l *lab.Lab, nodes []string) (all []noted) {
	rng := rand.New(rand.NewPCG(3, 4))
	for len(all) < moments {
		node := nodes[rng.IntN(len(nodes))]
		n := noted{node: node, asked: time.Now().UnixNano()}
		r, err := plan(ctx, l, node, &skeinv1.PlanRequest{})
		switch {
		case err == nil:
			n.since, n.index, n.text = r.GetTime(), r.GetIndex(), r.GetText()
			all = append(all, n)
		case ctx.Err() != nil:
			t.Fatalf("after %d moments: %v", len(all), err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Duration(rng.IntN(200)) * time.Millisecond):
		}
	}
	return all
}

// plansArePeers holds a node's plan to what it says of its paths, and to its kernel.
func plansArePeers(ctx context.Context, t *testing.T, l *lab.Lab, node string) {
	c, err := l.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	for {
		peers, err1 := c.Peers(ctx, &skeinv1.PeersRequest{})
		p, err2 := c.Plan(ctx, &skeinv1.PlanRequest{Diff: true})
		err := errors.Join(err1, err2)
		for _, v := range peers.GetPeers() {
			line := fmt.Sprintf("peer %s endpoint %s ", v.GetName(), v.GetEndpoint())
			if v.GetPath() == "direct" && !strings.Contains(p.GetText(), line) {
				err = errors.Join(err, fmt.Errorf("%q is not in the plan:\n%s", line, p.GetText()))
			}
		}
		if len(p.GetChanges()) > 0 {
			err = errors.Join(err, fmt.Errorf("the kernel differs: %q", p.GetChanges()))
		}
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", node, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// differ are the lines of one text that the other has not, in both directions.
func differ(a, b string) (out []string) {
	for _, x := range []struct{ mark, of, in string }{{"- ", a, b}, {"+ ", b, a}} {
		there := strings.Split(x.in, "\n")
		for line := range strings.SplitSeq(x.of, "\n") {
			if !slices.Contains(there, line) {
				out = append(out, x.mark+line)
			}
		}
	}
	return out
}

func plan(ctx context.Context, l *lab.Lab, node string, q *skeinv1.PlanRequest) (*skeinv1.PlanResponse, error) {
	c, err := l.Client(node)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return c.Plan(ctx, q)
}

// stepsLead takes the lines that steps name out of the first plan and puts in those that came, which makes the last
// one.
func stepsLead(ctx context.Context, t *testing.T, l *lab.Lab, node string, all []noted) {
	all = slices.DeleteFunc(slices.Clone(all), func(n noted) bool { return n.node != node })
	first, last := all[0], all[len(all)-1]
	c, err := l.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.PlanSteps(ctx, &skeinv1.PlanStepsRequest{FromTime: first.since, ToTime: last.since})
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string]int{}
	count := func(in []string, by int) {
		for _, line := range in {
			if lines[line] += by; lines[line] == 0 {
				delete(lines, line)
			}
		}
	}
	whole := func(text string) []string { return strings.Split(strings.TrimSuffix(text, "\n"), "\n") }
	count(whole(first.text), 1)
	because := 0
	for _, s := range r.GetSteps() {
		count(s.GetRemoved(), -1)
		count(s.GetAdded(), 1)
		if len(s.GetBecause()) > 0 || s.GetIndex() > s.GetFromIndex() {
			because++
		}
	}
	count(whole(last.text), -1)
	if len(lines) > 0 {
		t.Errorf("%s: the steps do not lead from the first plan to the last one: %v", node, lines)
	}
	t.Logf("%s: %d steps, of which %d follow from events or decisions on paths", node, len(r.GetSteps()), because)
	if because*2 < len(r.GetSteps()) {
		t.Errorf("%s: of %d steps only %d have a reason", node, len(r.GetSteps()), because)
	}
}

// refusals: what is not kept, not yet, and not for everybody.
func refusals(ctx context.Context, t *testing.T, l *lab.Lab) {
	for _, c := range []struct{ node, want, args string }{
		{"dc1", "no plan of then is kept: the oldest is of ", "plan --at 48h"},
		{"dc1", "is in the future", "plan --at 2099-01-02T15:04:05Z"},
		{"dc1", "is not known here; the newest is ", "plan --at 1000000"},
		{"dc1", "compares with the kernel as it is now", "plan --diff --at 1m"},
		{"dc1", "the second moment is before the first", "diff 1s 40s --plan"},
		{"dc1", "--node home1 needs --plan", "diff 1m 1s --node home1"},
		{"dc1", "is not a moment", "diff now 1s"},
		{"home1", "only admins and servers may ask for another node's plan", "plan --node dc1"},
		{"home1", "only admins and servers may ask for another node's plan", "diff 1m 1s --plan --node dc1"},
		{"dc1", "peers of another node are known only as they are now", "peers --node home1 --at 1m"},
	} {
		out, exit, err := l.Exec(ctx, c.node, append([]string{"skein"}, strings.Fields(c.args)...)...)
		if err != nil || exit == 0 || !strings.Contains(strings.Join(strings.Fields(out), " "), c.want) {
			t.Errorf("on %s, skein %s: exit status %d, %v, want %q:\n%s", c.node, c.args, exit, err, c.want, out)
		}
	}
	for _, args := range []string{"plan --at 5s", "peers --at 5s", "state --at 5s", "diff 20s 1s", "diff 20s 1s --plan",
		"graph --at 5s"} {
		if err := command(ctx, l, "home1", strings.Fields(args)...); err != nil {
			t.Error(err)
		}
	}
}
