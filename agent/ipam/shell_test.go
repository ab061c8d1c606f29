package ipam

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/internal/simtime"
)

// TestOutage: free addresses are still assigned, and without a free one a request fails at once.
func TestOutage(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 2, "10.64.0.0/16", ""))
		r := g.start("a")
		stop := r.run()
		r.assign("p")
		time.Sleep(10 * time.Second)
		g.outage(true)
		for range 7 {
			if begin := time.Now(); r.assign("p").IPv4.IsValid() && time.Since(begin) > 0 {
				t.Fatal("a free address took time")
			}
		}
		time.Sleep(10 * time.Second)
		for range 10 {
			begin := time.Now()
			_, err := r.try("p")
			if !codeIs(err, Unavailable) || !strings.Contains(err.Error(), "no server decides") {
				t.Fatalf("the outage shows as %v", err)
			}
			if d := time.Since(begin); d > probeWithin {
				t.Fatalf("it took %s", d)
			}
			time.Sleep(700 * time.Millisecond)
		}
		if err := r.Ready(); !codeIs(err, Unavailable) || len(r.Problems()) != 1 {
			t.Fatalf("ready: %v; problems: %v", err, r.Problems())
		}
		g.outage(false)
		time.Sleep(2 * backoffMax)
		r.assign("p")
		if err := r.Ready(); err != nil || len(r.Problems()) != 0 {
			t.Fatalf("after the outage: %v; problems: %v", err, r.Problems())
		}
		stop()
		r.Close()
	})
}

// TestLeaderlessClusterIsNotAsked: without a leader for longer than an election takes, requests fail at once,
// including the first. During an election they wait.
func TestLeaderlessClusterIsNotAsked(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 0, "10.64.0.0/24", ""))
		var since time.Time
		r := g.start("a", func(c *Config) {
			c.Leaderless = func() time.Duration {
				if since.IsZero() {
					return 0
				}
				return time.Since(since)
			}
		})
		r.assign("p")
		g.outage(true)
		since = time.Now().Add(-leaderlessFor - time.Second)
		before, begin := g.proposals(), time.Now()
		_, err := r.try("q")
		if !codeIs(err, Unavailable) || !strings.Contains(err.Error(), "no server has led the cluster for 3s") ||
			time.Since(begin) > 0 || !maps.Equal(g.proposals(), before) {
			t.Fatalf("%v after %s", err, time.Since(begin))
		}
		g.outage(false)
		since = time.Now().Add(-time.Second)
		r.assign("q")
		r.Close()
	})
}

// TestSpareWithoutNoise: a pod that comes and goes causes no events, and the spare is finally returned.
func TestSpareWithoutNoise(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 0, "10.64.0.0/24", ""))
		r := g.start("a")
		stop := r.run()
		r.assign("stays")
		time.Sleep(10 * time.Second)
		before := g.proposals()
		var wait time.Duration
		for i := range 100 {
			begin := time.Now()
			l := r.assign("comes and goes")
			if i > 0 {
				wait += time.Since(begin)
			}
			time.Sleep(time.Minute)
			r.Release(l.Key, "")
			time.Sleep(time.Minute)
		}
		after := g.proposals()
		if n := after["AllocateBlocks"] - before["AllocateBlocks"]; n > 3 || after["ReleaseBlocks"] > 2 || wait > 0 {
			t.Fatalf("100 pods one after the other: %v, then %v; they waited %s", before, after, wait)
		}
		for _, l := range r.Leases() {
			r.Release(l.Key, "")
		}
		time.Sleep(idleFor + time.Minute)
		if n := g.blocks("a"); n != 1 {
			t.Fatalf("an idle node has %d blocks", n)
		}
		time.Sleep(unusedFor)
		if n := g.blocks("a"); n != 0 {
			t.Fatalf("a node that was idle for an hour has %d blocks", n)
		}
		stop()
		r.Close()
	})
}

// TestIdleForChanges: a shorter IdleFor also applies to blocks that are already empty.
func TestIdleForChanges(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 0, "10.64.0.0/24", ""))
		r := g.start("a")
		stop := r.run()
		for _, l := range []Lease{r.assign("p"), r.assign("q"), r.assign("r")} {
			r.Release(l.Key, "")
		}
		r.SetIdleFor(time.Hour)
		time.Sleep(2 * idleFor)
		if n := g.blocks("a"); n < 3 {
			t.Fatalf("%d blocks are left of those that rest for an hour", n)
		}
		r.SetIdleFor(0)
		time.Sleep(10 * time.Second)
		if n := g.blocks("a"); n != 1 {
			t.Fatalf("%d blocks rest, though five minutes are over", n)
		}
		stop()
		r.Close()
	})
}

func TestExhausted(t *testing.T) {
	g := newAgreement(t, newHand().now)
	p := poolOf("default", 1, "10.64.0.0/30", "")
	p.MaxBlocksPerNode = 1
	g.pool(p)
	g.admit("b")
	r, b := g.start("a"), g.start("b")
	r.assign("p")
	r.assign("p")
	if _, err := r.try("p"); !codeIs(err, Exhausted) || !strings.Contains(err.Error(), "raise max_blocks_per_node") {
		t.Fatalf("at the limit of blocks: %v", err)
	}
	g.must(&skeinv1.Command{Body: &skeinv1.Command_ChangePool{ChangePool: &skeinv1.ChangePool{Name: "default",
		Set: &skeinv1.Pool{}, Fields: []string{"max_blocks_per_node"}}}})
	b.assign("p")
	if _, err := r.try("p"); !codeIs(err, Exhausted) || !strings.Contains(err.Error(), "skein pool extend default") {
		t.Fatalf("in a pool that is used up: %v", err)
	}
	if err := r.Ready(); !codeIs(err, Exhausted) {
		t.Fatalf("ready: %v", err)
	}
	if l := r.Problems(); len(l) != 1 || l[0].Subject != "pool default" {
		t.Fatalf("problems: %v", l)
	}
	if err := b.Ready(); err != nil {
		t.Fatalf("the other node has one left: %v", err)
	}
}

// TestStatic: only one node at a time assigns a static address, and gives it up when its pod is gone.
func TestStatic(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 2, "10.64.0.0/16", "fd02::/112"))
		g.admit("b")
		g.must(&skeinv1.Command{Body: &skeinv1.Command_ReserveAddress{ReserveAddress: &skeinv1.ReserveAddress{Pool: "default",
			Address: "10.64.7.9", Namespace: "ns", Pod: "db-0"}}})
		a, b := g.start("a"), g.start("b")
		stopA, stopB := a.run(), b.run()
		l := a.assign("db-0")
		if l.IPv4.String() != "10.64.7.9" || l.IPv6.String() != "fd02::709" || !l.Static {
			t.Fatalf("it got %+v", l)
		}
		if _, err := a.try("db-0"); !codeIs(err, Unavailable) {
			t.Fatalf("while its old container is there: %v", err)
		}
		g.show(b)
		if _, err := b.try("db-0"); !codeIs(err, Unavailable) || !strings.Contains(err.Error(), "is held by node") {
			t.Fatalf("on another node: %v", err)
		}
		req := b.request("thief")
		req.Addresses = []netip.Addr{l.IPv4}
		if _, err := b.Assign(t.Context(), req); !codeIs(err, Denied) || !strings.Contains(err.Error(),
			"is reserved for pod ns/db-0") {
			t.Fatalf("to another pod: %v", err)
		}
		a.Release(l.Key, "")
		l = a.assign("db-0") // at once, without asking anybody
		if n := g.proposals()["ClaimAddress"]; n != 1 {
			t.Fatalf("%d claims", n)
		}
		time.Sleep(time.Hour)
		a.restart(found(l)...)
		stopA()
		stopA = a.run()
		a.Release(l.Key, "")
		g.mu.Lock()
		g.late = true // given up, but this node does not know
		g.mu.Unlock()
		time.Sleep(2 * giveUpAfter)
		g.mu.Lock()
		g.late = false
		b.Follow(g.state)
		g.mu.Unlock()
		if l := b.assign("db-0"); l.IPv4.String() != "10.64.7.9" {
			t.Fatalf("on the other node it got %v", l)
		}
		if l, err := a.try("db-0"); !codeIs(err, Unavailable) {
			t.Fatalf("given here, too: %v, %v", l, err)
		}
		noDuplicates(t, a, b)
		stopA()
		stopB()
		a.Close()
		b.Close()
	})
}

// TestQuotaOfTheCluster: grants keep a namespace within its quota on all nodes together, and unused parts are
// returned.
func TestQuotaOfTheCluster(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		p := poolOf("default", 5, "10.64.0.0/16", "")
		p.Quotas = map[string]uint32{"ns": 10}
		g.pool(p)
		g.admit("b")
		a, b := g.start("a"), g.start("b")
		stopA, stopB := a.run(), b.run()
		count := func(r *rig) (n int) {
			for {
				g.show(r)
				if _, err := r.try("p"); err != nil {
					if !codeIs(err, Exhausted) {
						t.Fatal(err)
					}
					return n
				}
				n++
			}
		}
		one := a.assign("p")
		if n := count(b); n != 5 { // of 10 five are granted to a
			t.Fatalf("b got %d", n)
		}
		if n := count(a); n != 4 {
			t.Fatalf("a got %d more", n)
		}
		other := a.request("q")
		other.Namespace = "other"
		if _, err := a.Assign(t.Context(), other); err != nil {
			t.Fatalf("without a quota: %v", err)
		}
		for _, l := range a.Leases() {
			if l.Key != one.Key && l.Namespace == "ns" {
				a.Release(l.Key, "")
			}
		}
		time.Sleep(3 * grantWindow)
		if n := count(b); n != 4 {
			t.Fatalf("b got %d of the 4 that a gave back", n)
		}
		stopA()
		stopB()
		a.Close()
		b.Close()
	})
}

// TestReleaseEndsAWaitingRequest: a DEL during its waiting ADD leaves nothing behind.
func TestReleaseEndsAWaitingRequest(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 2, "10.64.0.0/16", ""))
		r := g.start("a")
		g.outage(true)
		req := r.request("p")
		done := make(chan error)
		go func() {
			_, err := r.Assign(t.Context(), req)
			done <- err
		}()
		time.Sleep(time.Second)
		if _, err := r.Assign(t.Context(), req); !codeIs(err, Exists) {
			t.Fatalf("the same request again: %v", err)
		}
		if _, held := r.Release(req.Key, ""); held {
			t.Fatal("it held something")
		}
		if err := <-done; !codeIs(err, Unavailable) {
			t.Fatalf("the request ended with %v", err)
		}
		g.outage(false)
		r.Close()
		if n := len(r.Leases()); n != 0 {
			t.Fatalf("%d leases are left", n)
		}
	})
}

// TestLostBlock: pods whose block was taken away keep their addresses, and a problem is reported.
func TestLostBlock(t *testing.T) {
	g := newAgreement(t, newHand().now)
	g.pool(poolOf("default", 2, "10.64.0.0/16", ""))
	r := g.start("a")
	l := r.assign("p")
	r.Adopt([]podnet.Found{{Addr: netip.MustParseAddr("192.0.2.1"), Link: "veth9"}})
	g.must(&skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{Pool: "default",
		Numbers: []uint64{0}, NodeId: r.self}}})
	var text []string
	for _, p := range r.Problems() {
		text = append(text, p.Subject+": "+p.Message)
	}
	want := []string{
		"address 192.0.2.1: it lies in no address pool, and in use here: 192.0.2.1 of somebody else's link veth9",
		"block 10.64.0.0/30 of pool default: it no longer belongs to this node, and in use here: 10.64.0.0 of pod ns/p",
	}
	if !slices.Equal(text, want) {
		t.Fatalf("problems: %q", text)
	}
	if n := r.assign("q"); n.IPv4 == l.IPv4 || len(r.Leases()) != 3 {
		t.Fatalf("q has %s; leases: %v", n.IPv4, r.Leases())
	}
}

// TestManyAtOnce runs all operations concurrently, for the race detector.
func TestManyAtOnce(t *testing.T) {
	g := newAgreement(t, time.Now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", "fd02::/112"))
	r := g.start("a", func(c *Config) { c.OnChange = func() {} })
	stop := r.run()
	var wg sync.WaitGroup
	var reqs []Request
	for range 400 {
		reqs = append(reqs, r.request("p"))
	}
	for i := range 8 {
		wg.Go(func() {
			for j := i; j < len(reqs); j += 8 {
				l, err := r.Assign(t.Context(), reqs[j])
				if err != nil {
					t.Errorf("assign: %v", err)
					return
				}
				if rand.N(3) == 0 {
					r.Release(l.Key, "")
				}
			}
		})
		wg.Go(func() {
			for range 50 {
				r.Audit(found(r.Leases()...), func(Lease) bool { return true })
				r.Holders(netip.MustParseAddr("10.64.0.3"))
				r.Pools()
				r.Problems()
				if err := r.Ready(); err != nil {
					t.Errorf("ready: %v", err)
				}
			}
		})
	}
	wg.Wait()
	stop()
	want := r.Leases()
	noDuplicates(t, r)
	r.restart(found(want...)...)
	if have := r.Leases(); !slices.Equal(offsets(have), offsets(want)) {
		t.Fatalf("after a restart there are %d leases, before %d", len(have), len(want))
	}
}

// TestThousandNodes: a thousand Managers on one log, through outages of the quorum, lost answers and restarts. No
// address is assigned twice, and finally no block remains with a node that does not use it.
func TestThousandNodes(t *testing.T) {
	nodes := 1000
	if testing.Short() {
		nodes = 100
	}
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 3, "10.64.0.0/16", "fd02::/112"))
		random := rand.New(rand.NewPCG(1, 2))
		var rigs []*rig
		var stops []func()
		for i := range nodes {
			name := fmt.Sprint("n", i)
			g.admit(name)
			r := g.start(name)
			rigs, stops = append(rigs, r), append(stops, r.run())
		}
		for round := range 6 {
			g.outage(round%3 == 2)
			g.mu.Lock()
			g.late = round == 4
			g.mu.Unlock()
			churn(t, rigs, rand.New(rand.NewPCG(uint64(round), 7)))
			time.Sleep(20 * time.Second)
			noDuplicates(t, rigs...)
			for range nodes / 20 {
				i := random.IntN(nodes)
				stops[i]()
				rigs[i].restart(found(rigs[i].Leases()...)...)
				stops[i] = rigs[i].run()
			}
		}
		g.outage(false)
		for _, r := range rigs {
			g.show(r) // of what was committed without their knowing
			for _, l := range r.Leases() {
				r.Release(l.Key, "")
			}
		}
		time.Sleep(2 * unusedFor)
		for i, r := range rigs {
			stops[i]()
			r.Close()
		}
		if u := g.state.PoolUse(events.DefaultPool); u.Owned != 0 {
			t.Fatalf("%d blocks are left with nodes that have no pods", u.Owned)
		}
	})
}

// churn starts and stops pods on all nodes at once.
func churn(t *testing.T, rigs []*rig, random *rand.Rand) {
	var wg sync.WaitGroup
	for _, r := range rigs {
		n, seed := random.IntN(12), random.Uint64()
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, 3))
			for range n {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				l, err := r.Assign(ctx, r.request("p"))
				cancel()
				if err != nil && !codeIs(err, Unavailable) {
					t.Errorf("%s: %v", r.node, err)
				}
				if err == nil && random.IntN(3) == 0 {
					r.Release(l.Key, "")
				}
			}
		})
	}
	wg.Wait()
}
