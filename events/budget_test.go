package events

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// until decides commands until one is refused, and is that refusal. Its commands differ by their number.
func (w *world) until(most int, command func(i int) *skeinv1.Command) (int, error) {
	w.t.Helper()
	for i := range most {
		c := command(i)
		c.Time, c.Entropy = w.now.UnixNano(), entropy(i)
		evs, _, err := Decide(w.s, c)
		if err != nil {
			return i, err
		}
		for _, e := range evs {
			if err := w.s.Fold(e); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	w.t.Fatalf("%d commands were not refused; the state has %d bytes", most, w.s.Size())
	return 0, nil
}

// demand holds a refusal for size against its code and words.
func demand(t *testing.T, err error, words ...string) {
	t.Helper()
	if CodeOf(err) != ResourceExhausted {
		t.Fatalf("refused with %v", err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("%q does not say %q", err, word)
		}
	}
}

// TestReservedBlocksAreBounded reserves blocks for long reasons until the leader refuses: the state stays below what a
// message holds, what was reserved can be released, and nodes come and go.
func TestReservedBlocksAreBounded(t *testing.T) {
	w := newPools(t)
	long := strings.Repeat("p", MaxName)
	w.must(createPool(pool(long, 0, "10.64.0.0/14,fd02:1111:2222:3333:4444:5555:6664:0/110")))
	at := func(i int) string { return fmt.Sprintf("10.%d.%d.%d/32", 64+i>>16, i>>8&255, i&255) }
	n, err := w.until(MaxNumbers, func(i int) *skeinv1.Command {
		return reserve(long, at(i), strings.Repeat("x", MaxText))
	})
	demand(t, err, "the blocks of all pools take 24.0 MiB of the agreed state, and may take no more than 24.0 MiB: "+
		"release reserved ones (skein block list --reserved)")
	if have := w.s.Size(); have > MaxBlockBytes+1<<20 || have < MaxBlockBytes-1<<10 {
		t.Fatalf("%d reserved blocks make a state of %d bytes", n, have)
	}
	if c := w.s.Crowded(); len(c) != 1 || c[0].What != "the blocks of all pools" || c[0].Limit != MaxBlockBytes {
		t.Fatalf("crowded are %v", c)
	}
	w.must(today(admit("new", "1")))
	w.must(revoke(id("c")))
	w.must(rotateGossip())
	c := release("", long)
	c.GetReleaseBlocks().Prefix = at(7)
	before := w.s.Size()
	if w.must(c); w.s.Size() >= before {
		t.Fatalf("a released block makes the state grow from %d to %d bytes", before, w.s.Size())
	}
	w.must(allocate("b", long, 1)) // it takes less than the long reason did
	checkSame(t, "snapshot", w.s, throughBytes(t, w.s))
}

// TestNodesAreBounded joins nodes with as many labels as they may have. The refusal names them; pools are not
// concerned, and revoking frees what the labels took.
func TestNodesAreBounded(t *testing.T) {
	w := newPools(t)
	w.must(createToken("many", MaxTokenUses, false))
	labels := map[string]string{}
	for i := range 31 {
		labels[fmt.Sprint("l", i)] = strings.Repeat("v", MaxLabelText)
	}
	n, err := w.until(MaxNodeBytes/1000, func(i int) *skeinv1.Command {
		return today(admit(fmt.Sprint("n", i), "many", func(a *skeinv1.AdmitNode) { a.Node.Labels = labels }))
	})
	demand(t, err, fmt.Sprintf("%d nodes and 0 revoked ones take", n+3), "revoke those that are not used with skein "+
		"node revoke, which also ends their long labels")
	w.must(createPool(pool("p", 4, "10.64.0.0/20")))
	w.must(allocate("a", "p", 1))
	w.must(rotateKey("n0", "other"))
	w.must(promoteOf(w, "n1"))
	w.refused(changeNode("a", "", labels), ResourceExhausted, "nodes and")
	long := &skeinv1.NodeSettings{ForceEndpoint: strings.Repeat("e", 250) + ":51820"}
	_, err = w.until(50, func(i int) *skeinv1.Command { return setNode(fmt.Sprint("n", i), long, "force_endpoint") })
	demand(t, err, "nodes and")
	w.must(revoke(id("n2")))
	if r := w.s.Revoked(idOf("n2")); len(r.GetNode().GetLabels()) != 0 || r.GetReason() != "stolen" {
		t.Fatalf("%v is kept", r)
	}
	w.must(today(admit("new", "many")))
	labels["more"] = strings.Repeat("v", MaxLabelText)
	w.refused(changeNode("a", "", labels), InvalidArgument, "at most 4096 are allowed")
}

func promoteOf(w *world, name string) *skeinv1.Command {
	w.must(addServer(id(name)))
	return promote(id(name))
}

// TestPoolsAreBounded: long lists of namespaces in many pools, and imports that would not fit into an entry of the log.
func TestPoolsAreBounded(t *testing.T) {
	w := newPools(t)
	lists := func(i int) *skeinv1.Pool {
		p := pool(fmt.Sprint("p", i), 0, fmt.Sprintf("10.64.%d.%d/32", i>>8, i&255))
		for j := range 200 {
			p.Allowed = append(p.Allowed, fmt.Sprintf("%d-%s", j, strings.Repeat("n", 240)))
		}
		return p
	}
	_, err := w.until(MaxPools, func(i int) *skeinv1.Command { return createPool(lists(i)) })
	demand(t, err, "pools take 8.0 MiB of the agreed state, and may take no more than 8.0 MiB: remove pools")
	w.must(setPool("p1", &skeinv1.Pool{}, "allowed"))
	w.must(removePool("p2"))
	w.must(createPool(lists(1000)))
}

// TestImportsFitIntoAnEntry: each extension of a pool is an event with the whole pool, so few subnets of one with long
// lists make a large entry.
func TestImportsFitIntoAnEntry(t *testing.T) {
	w := newPools(t)
	huge := pool("huge", 0, "10.99.0.0/32")
	for j := range MaxPoolNamespaces {
		name := fmt.Sprintf("%d-%s", j, strings.Repeat("n", 240))
		huge.Allowed, huge.Namespaces = append(huge.Allowed, name), append(huge.Namespaces, name)
	}
	many := []*skeinv1.Pool{huge}
	for i := 1; i < 64; i++ {
		p := pool("huge", 0)
		for j := range i + 1 {
			p.Subnets = append(p.Subnets, subnetsOf(fmt.Sprintf("10.99.0.%d/32", j))...)
		}
		many = append(many, p)
	}
	w.refused(imports(false, many), InvalidArgument, "the import makes 64 changes of", "an entry of the log holds at "+
		"most 24.0 MiB: split it by pool")
	w.must(imports(false, many[:8]))
}

// TestAgentsCannotFillTheState: what a node may do for itself is bounded for each node, and others still get theirs.
func TestAgentsCannotFillTheState(t *testing.T) {
	w := newPools(t)
	p := pool("p", 0, "10.64.0.0/18")
	p.Quotas = map[string]uint32{}
	for i := range MaxQuotas {
		p.Quotas[fmt.Sprint("a", i)] = 10
	}
	w.must(createPool(p))
	q := pool("q", 0, "10.65.0.0/18")
	q.Quotas = map[string]uint32{"b": 10}
	w.must(createPool(q))
	w.must(createPool(pool("tiny", 0, "10.66.0.0/28")))

	_, err := w.until(1<<14, func(int) *skeinv1.Command { return allocate("b", "p", 1<<20) })
	demand(t, err, "node b has 8192 of the 16384 blocks of pool p, and a node may have 8192 unless the pool says "+
		"otherwise", "skein pool set p --max-blocks-per-node N")
	w.must(allocate("c", "p", 16))
	w.must(setPool("p", &skeinv1.Pool{MaxBlocksPerNode: 8193}, "max_blocks_per_node"))
	w.must(allocate("b", "p", 1<<20))
	w.refused(allocate("b", "p", 1<<20), ResourceExhausted, "a node may have 8193 there (--max-blocks-per-node)")
	w.must(allocate("b", "tiny", 16)) // a small pool has no share to leave

	_, err = w.until(MaxGrants, func(i int) *skeinv1.Command {
		return grant("b", "p", fmt.Sprint("a", i%MaxQuotas), uint32(1+i/MaxQuotas))
	})
	demand(t, err, "namespace a0 may have 10 addresses") // each grant is there, and is raised up to the quota
	w.refused(grant("b", "q", "b", 1), ResourceExhausted, "node b has 1024 grants, the most that a node may have")
	w.must(grant("c", "q", "b", 1))

	for i := range MaxNodeStatics + 1 {
		w.must(keep("q", fmt.Sprintf("10.65.%d.%d", 1+i>>8, i&255), "ns", fmt.Sprint("pod", i)))
	}
	_, err = w.until(MaxNodeStatics+1, func(i int) *skeinv1.Command {
		return claim("b", "q", fmt.Sprintf("10.65.%d.%d", 1+i>>8, i&255), "ns", fmt.Sprint("pod", i))
	})
	demand(t, err, "node b holds 1024 static addresses")
	w.must(claim("c", "q", fmt.Sprintf("10.65.%d.%d", 1+MaxNodeStatics>>8, MaxNodeStatics&255), "ns",
		fmt.Sprint("pod", MaxNodeStatics)))
}

// A lone node may have all blocks of a pool: there is nobody to leave some to.
func TestALoneNodeMayHaveAPool(t *testing.T) {
	w := newWorld(t)
	w.must(today(createCluster("10.4.0.0/16", "a")))
	w.must(createPool(pool("p", 0, "10.64.0.0/26")))
	for range 4 {
		w.must(allocate("a", "p", 64))
	}
	if n := len(w.s.BlocksOf(id("a"))); n != 64 {
		t.Fatalf("it has %d blocks", n)
	}
}

// TestBudgetNeverExceeded proposes anything under limits of a few kilobytes: no section that is held to a limit grows
// beyond it, whatever is refused leaves no trace, a state that is beyond it still takes what makes it smaller, and each
// state can be written and read.
func TestBudgetNeverExceeded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := budget{pods: rapid.IntRange(200, 2000).Draw(t, "pods")}
		for _, in := range []section{sectionNodes, sectionPools, sectionBlocks, sectionStatics, sectionGrants,
			sectionEgresses} {
			b.sections[in] = rapid.IntRange(100, 1500).Draw(t, "limit")
		}
		s := NewState()
		first := []*skeinv1.Command{today(createCluster("10.4.0.0/28", "a")), createToken("1", 5, false)}
		refused := 0
		for i := range rapid.IntRange(2, 80).Draw(t, "length") {
			c := anyCommand(t, s)
			if i < len(first) {
				c.Body = first[i].Body
			}
			evs, _, err := Decide(s, c)
			if err != nil {
				continue
			}
			next := s.Clone()
			for _, e := range evs {
				if err := next.Fold(e); err != nil {
					t.Fatalf("%v", err)
				}
			}
			grown, _, counted := growth(c, evs)
			for in := range sections {
				if counted && next.sizes[in]-s.sizes[in] > grown[in] && b.sections[in] > 0 {
					t.Fatalf("%v adds %d bytes to section %d, and %d were foreseen", c, next.sizes[in]-s.sizes[in], in, grown[in])
				}
			}
			if err := b.check(s, c, evs); err != nil {
				if CodeOf(err) != ResourceExhausted {
					t.Fatalf("%v", err)
				}
				refused++
				continue
			}
			for in, limit := range b.sections {
				if counted && limit > 0 && next.sizes[in] > max(limit, s.sizes[in]) {
					t.Fatalf("%v makes section %d %d bytes large, %d before, and %d are allowed", c, in, next.sizes[in],
						s.sizes[in], limit)
				}
			}
			if have := next.sizes.pods(); counted && have > max(b.pods, s.sizes.pods()) {
				t.Fatalf("%v makes %d bytes, and %d are allowed", c, have, b.pods)
			}
			s = next
			checkSame(t, "snapshot", s, throughBytes(t, s))
		}
	})
}

// TestBudgetAddsUp: all limits, and the most that commands may add that are never refused for their size, stay below
// what is promised to those who read the state.
func TestBudgetAddsUp(t *testing.T) {
	const late = int64(1) << 62 // a time of the most bytes
	name := strings.Repeat("n", MaxName)
	small := &skeinv1.Node{
		Id: id("a"), Name: "a", IdentityKey: key("identity", "a"), WireguardKey: key("wireguard", "a"), Ipv4: "10.0.0.1",
		Ipv6:       "fd00::1234:1234:1234:1234",
		AdmittedAt: start.UnixNano(), AdmittedIndex: 1, MinSchema: 1, MaxSchema: 1,
	}
	// A node that was revoked with a role, a drain and schemas of the most bytes. While it lives it is a server instead.
	grown := proto.CloneOf(small)
	grown.AgentsOnly, grown.Draining, grown.Admin, grown.MinSchema, grown.MaxSchema = true, true, true, 1<<31, 1<<31
	node := entrySize(sectionNodes, sizeOf(small))
	more := max(sizeOf(&skeinv1.RevokedNode{Node: grown, RevokedAt: late}),
		sizeOf(grown)+entrySize(sectionServers,
			sizeOf(&skeinv1.Server{NodeId: small.Id, Voter: true, Since: late}))) - sizeOf(small)
	slot := &skeinv1.EgressSlot{Namespace: name, Name: name, Number: MaxReplicas - 1}
	owned := proto.CloneOf(slot)
	owned.NodeId, owned.FromNodeId, owned.Reason, owned.Planned = small.Id, small.Id, strings.Repeat("r", MaxText), true
	owned.Epoch, owned.Since, owned.LeaseMillis, owned.FormerLeaseMillis = 1<<62, late, MaxEgressLease, MaxEgressLease
	token := &skeinv1.Token{
		Id: tokenID("1"), SecretHash: key("secret", "1"), CreatedAt: late, ExpiresAt: late, UsesLeft: MaxTokenUses,
		Uses:  MaxTokenUses,
		Label: strings.Repeat("l", MaxText), AgentsOnly: true, Role: string(RoleServer), Signed: true,
	}
	claim := len(small.Id) + 2 + 2*10
	all := map[string]int{
		"limits":   MaxNodeBytes + MaxPodBytes + MaxPlainBytes,
		"answers":  MaxAnswers * entrySize(sectionAnswers, largestAnswer),
		"tokens":   MaxTokens * entrySize(sectionTokens, sizeOf(token)),
		"nodes":    MaxNodeBytes / node * more,
		"slots":    MaxSlots * (sizeOf(owned) - sizeOf(slot)),
		"statics":  MaxStatics * claim,
		"settings": 4096,
	}
	sum := 0
	for _, n := range all {
		sum += n
	}
	t.Logf("%d nodes at most; %v; in all %s", MaxNodeBytes/node, all, mebibytes(sum))
	if sum > MaxStateBytes {
		t.Fatalf("%v are %d bytes, and %d are promised", all, sum, MaxStateBytes)
	}
}
