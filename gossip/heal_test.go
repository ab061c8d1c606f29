package gossip

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
)

func (s *sim) formed() {
	s.t.Helper()
	s.within(20*time.Second, "the mesh forms", s.agreed(s.nodes))
	s.within(20*time.Second, "all see all alive", s.meshed(s.nodes))
}

func (s *sim) publish(i int, site string) {
	s.t.Helper()
	if err := s.nodes[i].g.Publish(simRecord(site)); err != nil {
		s.t.Fatal(err)
	}
}

// Ten minutes is far beyond the time after which memberlist forgets dead nodes.
func TestPartitionOfTenMinutesHeals(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 21, 3)
		defer s.end()
		s.formed()
		left, right := s.nodes[:9], s.nodes[9:]
		s.net.mu.Lock()
		for _, n := range right {
			s.net.side[n.key.ID()] = 1
		}
		s.net.mu.Unlock()
		took := s.within(60*time.Second, "the left side sees the right dead", func() bool {
			return left[0].g.aliveCount() == len(left)-1
		})
		t.Logf("the other side is seen dead after %s", took)
		time.Sleep(10 * time.Minute)
		s.publish(0, "left-news")
		s.publish(20, "right-news")
		s.within(2*time.Second, "news inside a side", sees(left, left[0].key.ID(), "left-news"))
		if n := left[0].g.wide.Load().ml.NumMembers(); n != len(left) {
			t.Fatalf("memberlist on the left knows %d nodes, want only the %d of its side", n, len(left))
		}
		s.net.mu.Lock()
		clear(s.net.side)
		s.net.mu.Unlock()
		alive := s.within(20*time.Second, "all alive again", s.meshed(s.nodes))
		agreed := s.within(10*time.Second, "all agree again", s.agreed(s.nodes))
		t.Logf("healed: all alive after %s, agreed after %s", alive, alive+agreed)
	})
}

// A site of three of seven nodes is cut off, as in the demo.
func TestSiteCutOff(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 7, 18)
		defer s.end()
		s.formed()
		s.net.mu.Lock()
		for _, n := range s.nodes[4:] {
			s.net.side[n.key.ID()] = 1
		}
		s.net.mu.Unlock()
		for i, n := range s.nodes {
			rest := 3
			if i >= 4 {
				rest = 2
			}
			t.Logf("node %d knows after %s more", i, s.within(20*time.Second, "the cut is seen", func() bool {
				return n.g.aliveCount() == rest
			}))
		}
		s.net.mu.Lock()
		clear(s.net.side)
		s.net.mu.Unlock()
		t.Logf("healed after %s", s.within(10*time.Second, "all alive again", s.meshed(s.nodes)))
	})
}

// One node to which no packets get through, while streams work: anti-entropy alone must serve it.
func TestLostBroadcastsAreRepaired(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 7, 4)
		defer s.end()
		s.formed()
		deaf := s.nodes[3]
		cut := time.Now()
		s.net.mu.Lock()
		s.net.mute = func(_, to identity.ID) bool { return to == deaf.key.ID() && time.Since(cut) < 700*time.Millisecond }
		s.net.mu.Unlock()
		s.publish(0, "missed")
		took := s.within(5*time.Second, "the deaf node has the change", sees(s.nodes, s.nodes[0].key.ID(), "missed"))
		t.Logf("repaired %s after the change", took)
	})
}

func TestHeavyLossStillConverges(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 12, 5)
		defer s.end()
		s.net.loss = 0.3
		s.within(20*time.Second, "the mesh forms", s.agreed(s.nodes))
		for i := range 5 {
			s.publish(i, "lossy")
		}
		s.within(8*time.Second, "all agree", s.agreed(s.nodes))
		answered := uint64(0)
		for _, n := range s.nodes {
			answered += n.g.Stats().Answered
		}
		if answered == 0 {
			t.Error("no packet that asked for a record was answered")
		}
	})
}

func TestLargeRecordIsPulled(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 30, 6)
		defer s.end()
		s.formed()
		r := simRecord("large")
		for i := range 60 {
			r.Candidates = append(r.Candidates, &skeinv1.Candidate{
				Type: skeinv1.CandidateType_CANDIDATE_TYPE_PRFLX, Address: fmt.Sprintf("203.0.113.%d:40000", i+1), Source: "probe",
			})
		}
		if err := s.nodes[7].g.Publish(r); err != nil {
			t.Fatal(err)
		}
		took := s.within(3*time.Second, "all hold the large record", sees(s.nodes, s.nodes[7].key.ID(), "large"))
		pulls := uint64(0)
		for _, n := range s.nodes {
			pulls += n.g.Stats().Pulls
		}
		t.Logf("a record of %d bytes reached all in %s with %d pulls since the start",
			len(s.nodes[7].g.Records()[s.nodes[7].key.ID()].Signed.GetRecord()), took, pulls)
	})
}

func TestDeadNodeIsNoticedAndComesBack(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 7, 7)
		defer s.end()
		s.formed()
		id := s.nodes[2].key.ID()
		s.stop(2)
		rest := slices.Concat(s.nodes[:2], s.nodes[3:])
		took := s.within(10*time.Second, "the others see it dead", func() bool {
			return !slices.ContainsFunc(rest, func(n *simNode) bool { return n.g.Alive(id) })
		})
		t.Logf("seen dead by all after %s", took)
		if r, ok := s.nodes[0].g.Records()[id]; !ok || r.Record.GetSite() != "site-2" {
			t.Error("the record of a dead node must stay in use")
		}
		s.start(2, Config{Epoch: 2})
		took = s.within(10*time.Second, "it is back", func() bool { return s.meshed(s.nodes)() && s.agreed(s.nodes)() })
		t.Logf("alive and agreed after %s", took)
		if e := s.nodes[0].g.Records()[id].Record.GetEpoch(); e != 2 {
			t.Errorf("epoch %d, want 2", e)
		}
	})
}

// A restart that is quicker than failure detection: the others still hold its old incarnation.
func TestQuickRestart(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 5, 8)
		defer s.end()
		s.formed()
		for epoch := uint64(2); epoch < 5; epoch++ {
			s.stop(1)
			time.Sleep(200 * time.Millisecond)
			s.start(1, Config{Epoch: epoch})
			s.publish(1, fmt.Sprintf("epoch-%d", epoch))
			s.within(2*time.Second, "the new epoch is seen", sees(s.nodes, s.nodes[1].key.ID(), fmt.Sprintf("epoch-%d", epoch)))
		}
	})
}

// Gossip goes to nodes taken at random: once is not enough to see whether it leaves one out.
func TestCleanStopIsNoticedAtOnce(t *testing.T) {
	var times []time.Duration
	for i := range 100 {
		simtime.Test(t, func(t *testing.T) {
			s := newSim(t, 7, uint64(9+i))
			defer s.end()
			s.formed()
			s.nodes[6].g.Close()
			times = append(times, s.within(2*time.Second, "the others know", func() bool {
				return !slices.ContainsFunc(s.nodes[:6], func(n *simNode) bool { return n.g.Alive(s.nodes[6].key.ID()) })
			}))
		})
	}
	slices.Sort(times)
	t.Logf("known to all after %s, at most %s", times[len(times)/2], times[len(times)-1])
}

// A peer that accepts a stream and says nothing must not delay the end.
func TestCloseDoesNotWaitForAStalledPeer(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := &sim{t: t, net: newSimNet(19), roster: newRoster(simKey(0), simKey(1))}
		stalled := s.net.join(simKey(1))
		n := s.start(0, Config{})
		conn, err := stalled.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		time.Sleep(time.Second)
		start := time.Now()
		n.g.Close()
		if took := time.Since(start); took > time.Second {
			t.Errorf("closing took %s", took)
		}
		s.end()
	})
}

// Nobody flaps while a fifth of the packets is lost.
func TestNoFlappingUnderLoss(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 7, 10)
		defer s.end()
		s.formed()
		s.net.mu.Lock()
		s.net.loss = 0.2
		s.net.mu.Unlock()
		for range 5 * 60 {
			time.Sleep(time.Second)
			if !s.meshed(s.nodes)() {
				t.Fatal("a live node was taken for dead")
			}
		}
	})
}

func TestRevokedNodeIsIgnored(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 6, 11)
		defer s.end()
		s.formed()
		rest := s.nodes[:5]
		// The revoked node keeps its former roster: it still counts itself as a member.
		own := newRoster()
		for i := range 6 {
			own.add(simKey(i))
		}
		s.stop(5)
		revoked := s.start(5, Config{Epoch: 2, Roster: own})
		s.formed()

		s.roster.remove(revoked.key.ID())
		for _, n := range rest {
			n.g.RosterChanged()
			if _, ok := n.g.Records()[revoked.key.ID()]; ok || n.g.Alive(revoked.key.ID()) {
				t.Fatal("a revoked node must be gone as soon as the roster says so")
			}
		}
		last := revoked.g.Records()[revoked.key.ID()].Signed
		for i := range 30 {
			if err := revoked.g.Publish(simRecord(fmt.Sprintf("still-%d", i))); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			for _, n := range rest {
				if _, ok := n.g.Records()[revoked.key.ID()]; ok || n.g.Alive(revoked.key.ID()) {
					t.Fatal("a revoked node came back")
				}
			}
		}
		n, errs := rest[0].g.Merge([]*skeinv1.SignedRecord{last})
		if n != 0 || len(errs) != 1 || !strings.Contains(errs[0].Error(), "not in the roster") {
			t.Errorf("merge of a revoked node's record: %d taken, %v", n, errs)
		}
		for _, n := range rest {
			if st := n.g.Stats(); st.Strangers == 0 {
				t.Errorf("refusals are not counted: %+v", st)
			}
			if n.g.wide.Load().ml.NumMembers() != 5 {
				t.Errorf("memberlist still has %d members, want 5", n.g.wide.Load().ml.NumMembers())
			}
		}
		s.nodes = rest
		s.within(time.Second, "the rest agrees", s.agreed(rest))
		revoked.g.stop(false)
	})
}

func TestAdmittedNodeIsTakenIn(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 4, 12)
		defer s.end()
		s.formed()
		// The new node knows the new roster before the others do.
		news := newRoster()
		for i := range 5 {
			news.add(simKey(i))
		}
		s.start(4, Config{Roster: news})
		time.Sleep(5 * time.Second)
		if _, ok := s.nodes[0].g.Records()[simKey(4).ID()]; ok {
			t.Fatal("a node that is not in the roster was taken in")
		}
		s.roster.add(simKey(4))
		for _, n := range s.nodes[:4] {
			n.g.RosterChanged()
		}
		took := s.within(4*time.Second, "the new node is in", func() bool {
			return s.meshed(s.nodes)() && s.agreed(s.nodes)()
		})
		t.Logf("in after %s", took)
	})
}

// Keys are rotated while records change; the nodes hear of it up to two seconds apart.
func TestKeyRotation(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 7, 13)
		defer s.end()
		s.formed()
		rotate := func(k *skeinv1.GossipKeys) {
			for i, n := range s.nodes {
				if err := n.g.SetKeys(k); err != nil {
					t.Fatal(err)
				}
				s.publish(i, fmt.Sprintf("key-%d-%d", k.GetPrimary()[0], i))
				s.within(time.Second, "changes are seen while keys change",
					sees(s.nodes, n.key.ID(), fmt.Sprintf("key-%d-%d", k.GetPrimary()[0], i)))
			}
		}
		for k := byte(2); k < 5; k++ {
			rotate(gossipKeys(k, k-1))
			time.Sleep(keyUseDelay + time.Second)
			if got := s.nodes[0].g.ring.GetPrimaryKey()[0]; got != k {
				t.Fatalf("primary key %d, want %d", got, k)
			}
			rotate(gossipKeys(k))
			if got := len(s.nodes[0].g.ring.GetKeys()); got != 1 {
				t.Fatalf("%d keys, want only the new one", got)
			}
		}
		if !s.meshed(s.nodes)() {
			t.Error("a node was lost while keys changed")
		}
	})
}

func TestWrongKeyShutsOut(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 3, 14)
		defer s.end()
		s.formed()
		s.roster.add(simKey(3))
		s.start(3, Config{Keys: gossipKeys(99)})
		time.Sleep(15 * time.Second)
		if s.nodes[0].g.Alive(simKey(3).ID()) {
			t.Error("a node without the gossip key is alive")
		}
	})
}

func TestOwnRecordFromElsewhereIsJumpedOver(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 4, 15)
		defer s.end()
		s.formed()
		for i := range 20 {
			s.publish(0, fmt.Sprintf("before-%d", i))
			time.Sleep(publishSpacing)
		}
		s.within(2*time.Second, "all have it", sees(s.nodes, simKey(0).ID(), "before-19"))
		// The state directory is restored from a backup of long ago: the epoch counts from one again.
		s.stop(0)
		s.start(0, Config{Epoch: 1, Dir: t.TempDir()})
		s.publish(0, "restored")
		took := s.within(5*time.Second, "the restored node is heard", sees(s.nodes, simKey(0).ID(), "restored"))
		t.Logf("heard after %s", took)
		if s.nodes[0].g.Stats().Jumps == 0 {
			t.Error("the jump is not counted")
		}
	})
}

// Two hosts with one identity must not make each other publish without end.
func TestClonedHostDoesNotStorm(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 3, 16)
		defer s.end()
		s.formed()
		clone := func(n uint64) *skeinv1.SignedRecord {
			r := simRecord("clone")
			r.NodeId, r.Epoch, r.Seq = simKey(0).ID().String(), 5, n
			signed, err := Sign(simKey(0), r)
			if err != nil {
				t.Fatal(err)
			}
			return signed
		}
		before := s.nodes[0].g.Stats().Published
		for n := uint64(1); n <= 600; n++ {
			s.nodes[1].g.Merge([]*skeinv1.SignedRecord{clone(2 * n)})
			time.Sleep(100 * time.Millisecond)
		}
		if n := s.nodes[0].g.Stats().Published - before; n == 0 || n > 120 {
			t.Errorf("published %d times in a minute against its clone", n)
		}
	})
}

func TestEquivocationConverges(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 6, 17)
		defer s.end()
		s.formed()
		s.roster.add(simKey(6)) // a member that signs two records under one number
		for _, n := range s.nodes {
			n.g.RosterChanged()
		}
		for i := range 2 {
			r := simRecord(fmt.Sprintf("face-%d", i))
			r.NodeId, r.Epoch, r.Seq = simKey(6).ID().String(), 9, 9
			signed, err := Sign(simKey(6), r)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range s.nodes[3*i : 3*i+3] {
				if got, errs := n.g.Merge([]*skeinv1.SignedRecord{signed}); got != 1 {
					t.Fatal(errs)
				}
			}
		}
		s.within(10*time.Second, "all hold the same face", s.agreed(s.nodes))
		counted := uint64(0)
		for _, n := range s.nodes {
			counted += n.g.Stats().Equivocations
		}
		if counted == 0 {
			t.Error("nobody counted the equivocation")
		}
	})
}

// TestRecordsOfAnEndedRunAreOutdated: others know that a node has restarted before they have its new record, whether
// they noticed its absence or not. A node that was only cut off is not outdated.
func TestRecordsOfAnEndedRunAreOutdated(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s := newSim(t, 5, 31)
		defer s.end()
		s.formed()
		id, others := s.nodes[0].key.ID(), s.nodes[1:]
		outdated := func(want bool) func() bool {
			return func() bool {
				return !slices.ContainsFunc(others, func(n *simNode) bool { return !n.g.Alive(id) || n.g.Outdated(id) != want })
			}
		}
		for i, noticed := range []bool{false, true} {
			if !outdated(false)() {
				t.Error("a node that runs is outdated")
			}
			s.stop(0)
			if noticed {
				s.within(time.Minute, "its death is noticed", func() bool {
					return !slices.ContainsFunc(others, func(n *simNode) bool { return n.g.Alive(id) || n.g.Outdated(id) })
				})
			}
			s.startSilent(0, Config{Epoch: uint64(i + 2)})
			s.within(30*time.Second, "it is alive in a new run", outdated(true))
			s.publish(0, "again")
			s.within(10*time.Second, "its new record has come", outdated(false))
		}
		s.net.mu.Lock()
		s.net.side[id] = 1
		s.net.mu.Unlock()
		s.within(time.Minute, "it is cut off", func() bool {
			return !slices.ContainsFunc(others, func(n *simNode) bool { return n.g.Alive(id) })
		})
		s.net.mu.Lock()
		clear(s.net.side)
		s.net.mu.Unlock()
		s.within(time.Minute, "it is back", func() bool {
			if slices.ContainsFunc(others, func(n *simNode) bool { return n.g.Outdated(id) }) {
				t.Fatal("a node that was cut off is outdated")
			}
			return s.meshed(s.nodes)()
		})
	})
}
