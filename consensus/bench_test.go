package consensus

import (
	"context"
	"crypto/sha256"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
)

// Three voters on this machine, every entry fsynced by each, over TCP on loopback; 512 callers wait for
// their own answers. The goal is 2,000 commands/s.
func BenchmarkCommit(b *testing.B) {
	c := newCluster(b)
	c.net.tcp = true
	c.form(3)
	leader := c.leader()
	id := leader.id.String()
	before := leader.raft.Stats().LogIndex
	propose := func(i int) error {
		_, err := leader.decide(context.Background(), label(id, i))
		return err
	}
	latencies := hammer(b, 512, propose)
	report(b, latencies)
	b.ReportMetric(float64(len(latencies))/float64(leader.raft.Stats().LogIndex-before), "commands/entry")
}

// The same through an agent: RPC to a server, which may forward it.
func BenchmarkCommitFromAgent(b *testing.B) {
	c := newCluster(b)
	c.net.tcp = true
	c.form(3)
	agent := c.add("agent", false)
	c.join(agent)
	id := agent.id.String()
	report(b, hammer(b, 128, func(i int) error {
		_, err := agent.client.Propose(context.Background(), label(id, i))
		return err
	}))
}

// One command after another: the price of a commit.
func BenchmarkCommitOne(b *testing.B) {
	c := newCluster(b)
	c.net.tcp = true
	c.form(3)
	leader := c.leader()
	id := leader.id.String()
	report(b, hammer(b, 1, func(i int) error {
		_, err := leader.decide(context.Background(), label(id, i))
		return err
	}))
}

// BenchmarkBlocks is how fast address blocks are given: many nodes that each want one more at the same time, and one
// after another. The goals are 2,000/s, and 10 ms at the 99th percentile.
func BenchmarkBlocks(b *testing.B) {
	for _, callers := range []int{512, 1} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			c := newCluster(b)
			c.net.tcp = true
			c.form(3)
			leader := c.leader()
			c.propose(leader, &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{
				Pool: &skeinv1.Pool{Name: "default", BlockSizeBits: 5,
					Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/10", Ipv6: "fd01::/106"}}}}}})
			nodes := admitMany(b, leader, 1024)
			report(b, hammer(b, callers, func(i int) error {
				_, err := leader.decide(context.Background(), &skeinv1.Command{RequestId: fmt.Sprint("block ", i),
					Body: &skeinv1.Command_AllocateBlocks{
						AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: nodes[i%len(nodes)], Pool: "default",
							Total: uint32(i/len(nodes) + 1)}}})
				return err
			}))
			seen := map[string]bool{}
			for _, k := range leader.replica.State().Blocks() {
				if seen[k.GetIpv4()] || seen[k.GetIpv6()] {
					b.Fatalf("block %s was given twice", k)
				}
				seen[k.GetIpv4()], seen[k.GetIpv6()] = true, true
			}
			if len(seen) != 2*b.N {
				b.Fatalf("%d prefixes were given for %d requests", len(seen), b.N)
			}
		})
	}
}

// BenchmarkThousandNodes is how long it takes until each of 1,000 nodes that ask at once has a block.
func BenchmarkThousandNodes(b *testing.B) {
	c := newCluster(b)
	c.net.tcp = true
	c.form(3)
	leader := c.leader()
	nodes := admitMany(b, leader, 1000)
	var all []time.Duration
	for i := range b.N {
		pool := fmt.Sprintf("pool%d", i)
		c.propose(leader, &skeinv1.Command{Body: &skeinv1.Command_CreatePool{CreatePool: &skeinv1.CreatePool{
			Pool: &skeinv1.Pool{Name: pool, BlockSizeBits: 5,
				Subnets: []*skeinv1.PoolSubnet{{Ipv4: fmt.Sprintf("10.%d.0.0/16", 64+i)}}}}}})
		began := time.Now()
		var wg sync.WaitGroup
		for _, id := range nodes {
			wg.Go(func() {
				if _, err := leader.client.Propose(context.Background(), &skeinv1.Command{RequestId: pool + " " + id,
					Body: &skeinv1.Command_AllocateBlocks{
						AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: id, Pool: pool, Total: 1}}}); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		all = append(all, time.Since(began))
		s := leader.replica.State()
		if use := s.PoolUse(pool); use.Owned != uint64(len(nodes)) || use.Nodes != len(nodes) {
			b.Fatalf("%d blocks belong to %d nodes, want one for each of %d", use.Owned, use.Nodes, len(nodes))
		}
	}
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)-1].Microseconds())/1000, "worst-ms")
	b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, "p50-ms")
}

// admitMany makes members that nobody runs.
func admitMany(b *testing.B, leader *node, n int) (ids []string) {
	secret := sha256.Sum256([]byte("many"))
	create := tokenCommand(tokenID(1), secret[:])
	create.GetCreateToken().Uses = uint32(n)
	leader.c.propose(leader, create)
	ids = make([]string, n)
	var all sync.WaitGroup
	for i := range ids {
		all.Go(func() {
			key, wg := sha256.Sum256(fmt.Append(nil, "identity", i)), sha256.Sum256(fmt.Append(nil, "wireguard", i))
			a, err := leader.decide(context.Background(), &skeinv1.Command{RequestId: fmt.Sprint("admit ", i),
				Body: &skeinv1.Command_AdmitNode{AdmitNode: &skeinv1.AdmitNode{
					Node: &skeinv1.NewNode{Name: fmt.Sprintf("n%d", i), IdentityKey: key[:], WireguardKey: wg[:],
						MinSchema: events.SchemaMin, MaxSchema: events.SchemaMax},
					TokenId: tokenID(1), TokenSecretHash: secret[:], ClusterId: testCluster}}})
			if err != nil {
				b.Error(err)
			}
			ids[i] = a.GetNode().GetId()
		})
	}
	all.Wait()
	return ids
}

func hammer(b *testing.B, callers int, f func(i int) error) []time.Duration {
	var mu sync.Mutex
	var wg sync.WaitGroup
	next, all := 0, make([]time.Duration, 0, b.N)
	b.ResetTimer()
	for range callers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= b.N {
					return
				}
				began := time.Now()
				if err := f(i); err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				all = append(all, time.Since(began))
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	b.StopTimer()
	return all
}

func report(b *testing.B, all []time.Duration) {
	if len(all) == 0 {
		return
	}
	slices.Sort(all)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(float64(len(all))/b.Elapsed().Seconds(), "commands/s")
	b.ReportMetric(ms(all[len(all)/2]), "p50-ms")
	b.ReportMetric(ms(all[len(all)*99/100]), "p99-ms")
}

// grown is a state with many nodes.
func grown(tb testing.TB, nodes int) *events.State {
	h, _ := newHistory(tb)
	p := h.state.Proto()
	for i := range nodes {
		key := sha256.Sum256(fmt.Append(nil, i))
		p.Nodes = append(p.Nodes, &skeinv1.Node{
			Id: fmt.Sprintf("%016x", i+1), Name: fmt.Sprintf("node-%d", i), IdentityKey: key[:],
			WireguardKey: append([]byte{1}, key[1:]...),
			Ipv4:         fmt.Sprintf("10.4.%d.%d", 1+i/250, 1+i%250), Ipv6: fmt.Sprintf("fd00:102:304::%x", i+1),
			Labels: map[string]string{"rack": fmt.Sprint(i % 40)}, AdmittedIndex: 1, MinSchema: 1, MaxSchema: 1,
		})
	}
	s, err := events.FromProto(p)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// BenchmarkFollower is what a follower pays per event, durably, in a cluster of 1,000 nodes: in batches
// of ten commands as a busy leader makes them. It reports the memory that its replica holds then.
func BenchmarkFollower(b *testing.B) {
	r := openReplica(b, b.TempDir())
	h := &history{t: b, state: grown(b, 1000)}
	before := heap()
	if err := r.reset(h.state.Clone()); err != nil {
		b.Fatal(err)
	}
	n := 0
	for b.Loop() {
		b.StopTimer()
		batch := h.labels(10)
		b.StartTimer()
		if err := r.Apply(batch); err != nil {
			b.Fatal(err)
		}
		n += len(batch.Events)
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "events/s")
	h.state = nil
	b.ReportMetric((heap()-before)/(1<<20), "MiB")
	runtime.KeepAlive(r)
}

func heap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// BenchmarkOpen is a restart with 100,000 events in the archive: every byte is checked.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	r, err := OpenReplica(dir, quiet)
	if err != nil {
		b.Fatal(err)
	}
	if err := r.makeLazy(); err != nil {
		b.Fatal(err)
	}
	h, first := newHistory(b)
	for batch := first; h.state.Index() < 100_000; batch = h.labels(500) {
		if err := r.Apply(batch); err != nil {
			b.Fatal(err)
		}
	}
	if err := r.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		r, err := OpenReplica(dir, quiet)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		r.Close()
		b.StartTimer()
	}
}
