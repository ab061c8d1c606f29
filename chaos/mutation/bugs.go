package main

import "slices"

// The tests that more than one bug must not pass.
var (
	histories = check{"./consensus", "TestNothingIsGivenTwice"} // Porcupine, and the audit of the log
	anyPool   = check{"./events", "TestAnyPoolHistory"}
	restOrder = check{"./events", "TestRestOrder"}
)

// allBugs are the mutations, made one at a time.
func allBugs() []bug { return append(slices.Clone(agreedBugs), nodeBugs...) }

// agreedBugs are those of who decides, and of how it is agreed. Where a later check of the product would make up for
// one (Fold refuses what Decide should not have decided, replicas refuse what was decided on another index), the
// mutation is made all the same: what clients were told is then not what is agreed, and that must show.
var agreedBugs = []bug{
	{
		name: "a block's addresses begin one block late",
		why:  "the block of one node covers the addresses that another's number stands for",
		edits: []edit{{"events/layout.go",
			"hi, lo := shiftLeft(n-r.first, l.bits)\n\t\t\treturn part(",
			"hi, lo := shiftLeft(n-r.first+1, l.bits)\n\t\t\treturn part("}},
		found: []check{histories, {"./events", "TestAnyPoolHistory"}},
	},
	{
		name: "the blocks of a second subnet are numbered one too low",
		why:  "the last block of the first subnet and the first of the second share a number",
		edits: []edit{{"events/layout.go",
			"r.first = l.blocks\n",
			"r.first = max(l.blocks, 1) - 1\n"}},
		found: []check{histories, {"./events", "TestBlockAt"}, {"./events", "TestGoldenHash"}},
	},
	{
		name: "no barrier after an election",
		why:  "a new leader decides before it has folded what its predecessor committed",
		edits: []edit{{"consensus/lead.go",
			"err := t.server.wait(t.server.raft.Barrier(0))\n",
			"var err error\n"}},
		found: []check{{"./consensus", "TestNewLeaderDecidesOnAllThatWasCommitted"}},
	},
	{
		name: "no barrier, and the base of an entry is not checked",
		why:  "what a new leader decided too early is folded on another state than it was decided on",
		edits: []edit{
			{"consensus/lead.go", "err := t.server.wait(t.server.raft.Barrier(0))\n", "var err error\n"},
			{"consensus/lead.go", "if state.Index() == at {\n", "if state.Index() == at || at > 0 {\n"},
			{"consensus/fsm.go", "at := f.at.Load(); b.Base != at {\n", "at := f.at.Load(); b.Base > at {\n"},
		},
		found: []check{histories, {"./consensus", "TestForgedBatchOnAnotherIndexIsRefusedEverywhere"}},
	},
	{
		name: "request IDs are forgotten",
		why:  "a retry whose first answer was lost is decided a second time",
		edits: []edit{{"events/decide.go", "if a := s.remembered(c); a != nil {", "if a := s.remembered(c); a != nil && " +
			"a.Index == 0 {"}},
		found: []check{histories, {"./consensus", "TestRepeatedRequestGetsTheFirstAnswer"}, {"./events", "TestAnyHistory"}},
		quick: true,
	},
	{
		name: "blocks are released for whoever asks",
		why:  "a node gives back a block that pods of another use",
		edits: []edit{{"events/decide_block.go",
			"if b.GetNodeId() != c.GetNodeId() {\n",
			"if b.GetNodeId() != c.GetNodeId() && b.GetNodeId() == \"\" {\n"}},
		found: []check{histories, {"./events", "TestOnlyTheOwnerGivesBack"}},
	},
	{
		name: "a freed block is given before those that never were",
		why:  "the block just returned comes again while others are free",
		edits: []edit{{"events/decide_block.go",
			"if r.freed.n >= MaxFreed {\n",
			"if r.freed.n > 0 {\n"}},
		found: []check{restOrder, histories, {"./events", "TestBlocksComeInOrder"}},
		quick: true,
	},
	{
		name: "blocks rest by number and not by time",
		why:  "the block just returned comes again while others are free for longer",
		edits: []edit{{"events/decide_block.go",
			"for n := range r.order.all() {\n\t\tif f, _ := r.freed.get(n, \"\"); in(n) && !resting(f.GetAt(), " +
				"cooldown(r.pool), now) {\n\t\t\tif out = append(out, n)",
			"for f := range r.freed.all() {\n\t\tif n := f.GetNumber(); in(n) && !resting(f.GetAt(), cooldown(r.pool), now) " +
				"{\n\t\t\tif out = append(out, n)"}},
		found: []check{histories, restOrder},
	},
	{
		name: "the cooldown is ignored",
		why:  "an address comes again while others still talk to the pod that had it",
		edits: []edit{{"events/pool.go",
			"return cooldown > 0 && now-int64(cooldown) < at\n",
			"return cooldown < 0 && now-int64(cooldown) < at\n"}},
		found: []check{histories, restOrder, {"./events", "TestCooldown"}},
	},
	{
		name: "the log's time follows a clock that steps back",
		why:  "a new leader with a slow clock revives what has expired, and rests look longer than they were",
		edits: []edit{
			{"consensus/clock.go", "t := max(clock, p.base+int64(passed/2), newest)\n", "t := max(clock, " +
				"p.base+int64(passed/2)-p.base)\n"},
			{"consensus/clock.go", "return max(min(t, most), newest)\n", "return min(t, most)\n"},
		},
		found: []check{histories, {"./consensus", "TestPace"}},
	},
	{
		name: "the sum of grants is not held against the quota",
		why:  "the nodes together give more addresses of a namespace than it may have",
		edits: []edit{{"events/decide_static.go",
			"case sum-uint64(have.GetAddresses())+uint64(c.GetAddresses()) > uint64(quota):",
			"case uint64(c.GetAddresses()) > uint64(quota) && sum > 0:"}},
		found: []check{histories, {"./events", "TestGrants"}},
	},
	{
		name: "a draining pool gives blocks",
		why:  "pods get addresses of a pool that is being deleted (Coil #284)",
		edits: []edit{{"events/decide_block.go",
			"if r.pool.GetDraining() {\n\t\treturn refuseDraining(r.pool)\n\t}\n\ttotal :=",
			"total :="}},
		found: []check{histories, {"./events", "TestDrainingGivesNothing"}},
	},
	{
		name: "a pool over another's subnet is taken",
		why:  "two nodes own the same addresses under two names",
		edits: []edit{{"events/pool.go",
			"if j >= 0 && j < len(s.spans) && s.spans[j].prefix.Overlaps(p) {",
			"if j >= 0 && j < len(s.spans) && s.spans[j].prefix == p {"}},
		found: []check{{"./events", "TestOverlappingPoolsAreRefused"}, {"./events", "TestContradictionsAboutPools"}},
	},
	{
		name: "Fold gives a block that belongs to a node to another",
		why:  "an event that should never have been appended takes a block from who has it",
		edits: []edit{{"events/fold_pool.go",
			"have.GetNodeId() != \"\" || b.GetNodeId() == \"\" || statics ||\n", "statics ||\n"}},
		found: []check{{"./events", "TestContradictionsAboutPools"}},
	},
	{
		name: "the speculative state outlives a lost append",
		why:  "what follows is decided on a state that never came to be",
		edits: []edit{{"consensus/lead.go",
			"if e.err != nil {\n\t\t\t\tspec = nil\n\t\t\t}\n",
			""}},
		found: []check{{"./consensus", "TestRefusedAppendResetsTheSpeculativeState"}},
	},
	{
		name: "a command is answered before it is committed",
		why:  "a node uses a block that the log never gives it, and another gets it",
		edits: []edit{{"consensus/lead.go",
			"if e.err == nil || future != nil {\n\t\t\tif err := t.outcome(ctx, future)",
			"if e.err == nil && future == nil {\n\t\t\tif err := t.outcome(ctx, future)"}},
		found: []check{histories, {"./consensus", "TestAcknowledgedCommandsSurvive"}},
		quick: true,
	},
	{
		name: "a leader that was deposed goes on refusing",
		why:  "a client is told of a state that is no more",
		edits: []edit{{"consensus/lead.go",
			"return t.verified(ctx)",
			"return nil"}},
		found: []check{{"./consensus", "TestDeposedLeaderRefusesNothing"}},
	},
	{
		name: "asking for a block again makes another",
		why:  "a request during an outage makes two blocks, and one leaks (Coil #271)",
		edits: []edit{
			{"events/decide_block.go", "if uint64(held.n) >= uint64(c.GetTotal()) {\n", "if c.GetTotal() == 0 {\n"},
			{"events/decide_block.go", "d.blocksFor(r, int(min(total-uint64(held.n), MaxBlocksAtOnce)), n, site, ranged)",
				"d.blocksFor(r, 1, n, site, ranged)"},
		},
		found: []check{histories, {"./events", "TestAskedTwiceGivenOnce"}},
	},
	{
		name: "a node takes as many blocks as it likes",
		why:  "a retry loop on one node eats the pool (Coil #202)",
		edits: []edit{{"events/decide_block.go",
			"if limit := d.s.blockLimit(r); limit > 0 {",
			"if limit := d.s.blockLimit(r); limit > 1<<32 {"}},
		found: []check{histories, {"./events", "TestOneNodeDoesNotEatThePool"}},
	},
	{
		name: "a revoked node keeps its blocks",
		why:  "blocks stay stuck after a node died (Coil #204)",
		edits: []edit{{"events/decide_node.go",
			"\td.giveAllBack(n.GetId(), \"revoked\")\n", ""}},
		found: []check{histories, anyPool, {"./events", "TestRevokedNodeLeavesNothing"}},
	},
	{
		name: "a static address goes to a second node",
		why:  "the same address runs on two nodes",
		edits: []edit{
			{"events/decide_static.go", "case v.GetNodeId() != \"\":\n\t\treturn refuse(FailedPrecondition, \"address %s of " +
				"pool %s is held by node %s since", "case v.GetNodeId() == \"-\":\n\t\treturn refuse(FailedPrecondition, " +
				"\"address %s of pool %s is held by node %s since"},
		},
		found: []check{histories, {"./events", "TestStaticAddresses"}},
	},
}
