package ipam

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/simtime"
)

// Bugs of other projects, each by its number in their trackers.

// run runs the Manager in the background until the test ends; with the bubble's clock.
func (r *rig) run() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	m := r.Manager // a restart puts another in its place
	go func() {
		defer close(done)
		m.Run(ctx)
	}()
	r.t.Cleanup(cancel)
	return func() {
		cancel()
		<-done
	}
}

// burst assigns to so many pods at once and returns the errors.
func (r *rig) burst(n int, within time.Duration) (failed []error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range n {
		req := r.request(fmt.Sprint("burst-", i))
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), within)
			defer cancel()
			if _, err := r.Assign(ctx, req); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = append(failed, err)
			}
		})
	}
	wg.Wait()
	return failed
}

// Coil #368: 80 pods at once on a new node stood behind one mutex for two minutes.
func TestCoil368EightyPodsAtOnce(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 5, "10.64.0.0/16", "fd02::/112"))
		r := g.start("a")
		begin := time.Now()
		if failed := r.burst(80, 10*time.Second); failed != nil {
			t.Fatal(failed)
		}
		if d := time.Since(begin); d > time.Second {
			t.Fatalf("they waited %s", d)
		}
		if n := noDuplicates(t, r); n != 80 {
			t.Fatalf("%d have addresses", n)
		}
		if n := g.blocks("a"); n != 3 {
			t.Fatalf("80 addresses took %d blocks of 32", n)
		}
		if n := g.proposals()["AllocateBlocks"]; n > 3 {
			t.Fatalf("%d proposals for one burst", n)
		}
		stop := r.run()
		time.Sleep(time.Minute)
		stop()
		if n := g.blocks("a"); n != 4 {
			t.Fatalf("with the spare there are %d blocks", n)
		}
		r.Close()
	})
}

// Coil #271: a request while the controller was away made two blocks, one of which nobody used.
func TestCoil271NoSecondBlockAfterAnOutage(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 5, "10.64.0.0/16", ""))
		r := g.start("a")
		g.outage(true)
		for range 5 { // as kubelet does
			if _, err := r.try("p"); !codeIs(err, Unavailable) {
				t.Fatalf("without servers: %v", err)
			}
			time.Sleep(4 * time.Second)
		}
		g.outage(false)
		g.mu.Lock()
		g.late = true // committed, but the answer is lost
		g.mu.Unlock()
		if _, err := r.try("p"); !codeIs(err, Unavailable) {
			t.Fatalf("with the answer lost: %v", err)
		}
		g.mu.Lock()
		g.late = false
		r.Follow(g.state)
		g.mu.Unlock()
		time.Sleep(4 * time.Second)
		r.assign("p")
		if n := g.blocks("a"); n != 1 {
			t.Fatalf("one pod took %d blocks", n)
		}
		r.Close()
	})
}

// Coil #202: a retry loop on one node took block after block until a /16 was used up.
func TestCoil202RetriesDoNotEatThePool(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		p := poolOf("default", 2, "10.64.0.0/16", "")
		p.CooldownSeconds = 3600
		g.pool(p)
		r := g.start("a")
		stop := r.run()
		for range 1000 {
			l := r.assign("unlucky")
			r.Release(l.Key, AddFailed)
			time.Sleep(time.Second)
		}
		if n := g.blocks("a"); n > 2 {
			t.Fatalf("an ADD that failed 1,000 times took %d blocks", n)
		}
		stop()
		r.Close()
	})
}

// Coil #284: addresses were given from a pool that was being deleted.
func TestCoil284DrainingPoolGivesNothing(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		p := poolOf("default", 3, "10.64.0.0/16", "")
		p.StickySeconds = 600
		g.pool(p)
		r := g.start("a")
		stop := r.run()
		kept, left := r.assign("kept"), r.assign("left")
		time.Sleep(10 * time.Second)
		if n := g.blocks("a"); n != 2 {
			t.Fatalf("%d blocks with the spare", n)
		}
		g.drain("default")
		r.Release(left.Key, "")
		for _, req := range []Request{r.request("new"), r.request("left")} { // not even to the one that it waits for
			if l, err := r.Assign(t.Context(), req); !codeIs(err, Exhausted) {
				t.Fatalf("a draining pool gave %v, %v", l, err)
			}
		}
		time.Sleep(10 * time.Second)
		if n := g.blocks("a"); n != 1 {
			t.Fatalf("while it is drained the node has %d blocks, of which it uses one", n)
		}
		r.Release(kept.Key, "")
		time.Sleep(10 * time.Second)
		if n := g.blocks("a"); n != 0 {
			t.Fatalf("%d blocks of the drained pool are left", n)
		}
		stop()
		r.Close()
	})
}

// Coil #227: the end of an old pod removed what a live one had, since that had got the old one's address.
func TestCoil227LateDeletionSparesTheNewPod(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	g.pool(poolOf("default", 0, "10.64.0.0/32", ""))
	r := g.start("a")
	old := r.assign("old")
	r.Release(old.Key, "")
	h.add(time.Minute)
	live := r.assign("live")
	if live.IPv4 != old.IPv4 {
		t.Fatalf("of one address there are two: %v, %v", live.IPv4, old.IPv4)
	}
	if _, held := r.Release(old.Key, "once more"); held {
		t.Fatal("the old pod held something after its end")
	}
	r.Adopt(found(live))
	if l, ok := r.Lookup(live.Key); !ok || l.IPv4 != live.IPv4 {
		t.Fatalf("the live pod has %v, %v", l, ok)
	}
	if who := r.Holders(live.IPv4); len(who) != 2 || who[0].Pod != "old" || who[0].Until.IsZero() ||
		who[1].Pod != "live" || !who[1].Until.IsZero() {
		t.Fatalf("holders: %+v", who)
	}
}

// What has ended, a foreign link or a pod without a release, is freed within 75 s, but only after it was missing
// twice.
func TestWhatEndedIsLetGoOfSoon(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	g.pool(poolOf("default", 5, "10.64.0.0/16", ""))
	r := g.start("a")
	for i, ends := range []time.Duration{0, time.Second, 44 * time.Second, 46 * time.Second, 80 * time.Second} {
		pod, stays := r.assign(fmt.Sprint("ended", i)), r.assign(fmt.Sprint("stays", i))
		stranger := podnet.Found{Addr: plus(stays.IPv4, 5), Link: "veth7"}
		h.add(time.Hour)
		r.Audit(append(found(pod, stays), stranger), func(Lease) bool { return true })
		began, missed := h.now(), 0
		for {
			kernel := found(stays)
			if h.now().Sub(began) < ends {
				kernel = append(found(pod, stays), stranger)
			} else {
				missed++
			}
			freed := r.Audit(kernel, func(l Lease) bool { return l.Key == pod.Key })
			left := slices.ContainsFunc(r.Leases(), func(l Lease) bool { return l.IPv4 == stranger.Addr })
			if len(freed) == 1 && !left {
				break
			}
			if len(freed) > 0 || !left || h.now().Sub(began) > ends+5*time.Minute {
				t.Fatalf("ended after %s: of two that ended together %v was freed, and the stranger is there: %t",
					ends, freed, left)
			}
			h.add(r.NextAudit())
		}
		if took := h.now().Sub(began) - ends; took > 75*time.Second || missed != 2 {
			t.Errorf("ended after %s: let go of %s later, by %d audits", ends, took, missed)
		}
		r.Release(stays.Key, "test")
	}
}

// Calico #5044: garbage collection gave back the addresses of healthy pods.
func TestCalico5044HealthyPodsKeepTheirAddresses(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	g.pool(poolOf("default", 5, "10.64.0.0/16", ""))
	r := g.start("a")
	healthy, linkless, dead, young := r.assign("healthy"), r.assign("linkless"), r.assign("dead"), Lease{}
	h.add(time.Hour)
	gone := func(l Lease) bool { return l.Pod != "linkless" } // it lies about the healthy one, too
	freed := r.Audit(found(healthy), gone)
	h.add(10 * time.Second)
	freed = append(freed, r.Audit(found(healthy), gone)...)
	if len(freed) != 0 {
		t.Fatalf("one audit, and a second too soon, freed %v", freed)
	}
	young = r.assign("young")
	h.add(20 * time.Second)
	freed = r.Audit(found(healthy), gone)
	if len(freed) != 1 || freed[0].Key != dead.Key {
		t.Fatalf("the audit freed %v", freed)
	}
	for _, l := range []Lease{healthy, linkless, young} {
		if _, ok := r.Lookup(l.Key); !ok {
			t.Fatalf("%s lost its address", l.Pod)
		}
	}
	// Missing once, then present again: counting restarts.
	r.Audit(nil, gone)
	h.add(time.Minute)
	r.Audit(found(healthy, young), gone)
	h.add(time.Minute)
	if freed := r.Audit(found(young), gone); len(freed) != 0 {
		t.Fatalf("the second time in a row was none: %v", freed)
	}
}

// A late copy of a release must not take away a block that the node was allocated again.
func TestLateReleaseIsTheFirstOne(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 0, "10.64.0.0/31", ""))
		r := g.start("a")
		stop := r.run()
		l := r.assign("p")
		time.Sleep(10 * time.Second)
		var first *skeinv1.Command
		g.mu.Lock()
		g.refuse = func(c *skeinv1.Command) error {
			if c.GetReleaseBlocks() == nil || first != nil {
				return nil
			}
			first = proto.CloneOf(c) // still under way; the proposer gets no answer
			return errNoQuorum
		}
		g.mu.Unlock()
		r.Release(l.Key, "")
		time.Sleep(2 * idleFor)
		if n := g.blocks("a"); n != 1 || first == nil {
			t.Fatalf("with one empty block given back there are %d", n)
		}
		one, two := r.assign("q"), r.assign("r") // both blocks again
		g.must(first)
		// It is true by now that the pool is exhausted, and it is reported when the node has asked for a spare block.
		if p := r.Problems(); g.blocks("a") != 2 ||
			slices.ContainsFunc(p, func(p Problem) bool { return !strings.Contains(p.Message, "pool default is exhausted") }) {
			t.Fatalf("after the late copy the node has %d blocks, uses %v and %v: %v", g.blocks("a"), one.IPv4, two.IPv4, p)
		}
		stop()
		r.Close()
	})
}

// TestNothingFromABlockOfUnknownOwner: while it is unknown whether a block was taken back, nothing is assigned from
// it, even if it is the last one.
func TestNothingFromABlockOfUnknownOwner(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		g := newAgreement(t, time.Now)
		g.pool(poolOf("default", 0, "10.64.0.0/31", ""))
		r := g.start("a")
		stop := r.run()
		l := r.assign("p")
		time.Sleep(10 * time.Second)
		var lost *skeinv1.Command
		g.mu.Lock()
		g.refuse = func(c *skeinv1.Command) error {
			if c.GetReleaseBlocks() == nil {
				return nil
			}
			lost = proto.CloneOf(c)
			return errNoQuorum
		}
		g.mu.Unlock()
		r.Release(l.Key, "")
		time.Sleep(2 * idleFor)
		r.assign("q") // has the spare
		if l, err := r.try("r"); !codeIs(err, Exhausted) && !codeIs(err, Unavailable) {
			t.Fatalf("from a block whose owner is unknown it got %s, %v", l.IPv4, err)
		}
		g.must(lost)
		if p := r.Problems(); g.blocks("a") != 1 ||
			slices.ContainsFunc(p, func(p Problem) bool { return strings.Contains(p.Message, "in use here") }) {
			t.Fatalf("%d blocks; problems: %v", g.blocks("a"), p)
		}
		stop()
		r.Close()
	})
}
