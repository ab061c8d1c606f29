package main

var anyLife = check{"./agent/ipam", "TestAnyLifeOfANode"}

// nodeBugs are those of the agent that gives a block's addresses to pods, and of what makes their links.
var nodeBugs = []bug{
	{
		name: "the file of leases is not read after a restart",
		why:  "the address of a pod whose link is not there yet is given to another",
		edits: []edit{{"agent/ipam/file.go", "records, err := readRecords(f.path)\n\tswitch {", "var records " +
			"[]record\n\t_, err = readRecords(f.path)\n\tswitch {"}},
		found: []check{anyLife},
		quick: true,
	},
	{
		name: "an address is handed out before it is written down",
		why:  "an agent that is killed gives it again",
		edits: []edit{{"agent/ipam/manager.go",
			"func (m *Manager) given(r record, now moment) (Lease, error) {\n\tif err := m.write(r, now); err != nil {",
			"func (m *Manager) given(r record, now moment) (Lease, error) {\n\tm.core.apply(now.stamp(r), now.at)\n\tif err " +
				":= m.fileErr; err != nil {"}},
		found: []check{anyLife},
	},
	{
		name: "what the kernel has is ignored",
		why:  "after the file was lost, or beside another program, an address that is in use is given",
		edits: []edit{{"agent/ipam/decide.go", "for _, f := range found {\n\t\tk := f.Key\n",
			"for _, f := range found[:0] {\n\t\tk := f.Key\n"}},
		found: []check{anyLife, {"./agent/ipam", "TestAdoptRebuildsALostFile"}, {"./agent/ipam", "TestStrangersInTheKernel"}},
	},
	{
		name:  "an address does not rest on its node",
		why:   "the pool's cooldown is ignored: others still talk to the pod that had it",
		edits: []edit{{"agent/ipam/block.go", "case p.fast:\n", "case p.fast || s.Cooldown > 0:\n"}},
		found: []check{anyLife, {"./agent/ipam", "TestCooldownAndSticky"}},
	},
	{
		name:  "the next address is searched from the block's beginning",
		why:   "the address just returned comes again as soon as it may, while others were never used",
		edits: []edit{{"agent/ipam/block.go", "start = (cursor + 1) % b.size", "start = min(cursor, 0)"}},
		found: []check{{"./agent/ipam", "TestNextAfterTheLast"}},
	},
	{
		name:  "the addresses of a block are counted from one",
		why:   "the last address of a block is the first of the next node's",
		edits: []edit{{"agent/ipam/block.go", "v4 = plus(b.view.IPv4.Addr(), off)", "v4 = plus(b.view.IPv4.Addr(), off+1)"}},
		found: []check{anyLife, {"./agent/ipam", "TestLargeBlock"}},
	},
	{
		name:  "a block that is being given back is used",
		why:   "its addresses go to pods here while the log gives it to another node",
		edits: []edit{{"agent/ipam/decide.go", "if b.leaving == \"\" && b.nbusy < b.size &&", "if b.nbusy < b.size &&"}},
		found: []check{{"./agent/ipam", "TestPlan"}},
	},
	{
		name:  "giving a block back has no request ID of its own",
		why:   "a late copy takes the block away that the node got again",
		edits: []edit{{"agent/ipam/command.go", "c := &skeinv1.Command{RequestId: t.id}", "c := &skeinv1.Command{}"}},
		found: []check{{"./agent/ipam", "TestGivingBackSaysWhat"}},
	},
	{
		name:  "a grant that is being lowered is used to the full",
		why:   "addresses beyond the quota are given while the log takes them back",
		edits: []edit{{"agent/ipam/plan.go", "n = min(n, limit)", "n = max(n, limit)"}},
		found: []check{{"./agent/ipam", "TestLoweredGrantIsNotUsed"}},
	},
	{
		name: "an audit frees what the kernel has",
		why:  "healthy pods lose their addresses (Calico #5044)",
		edits: []edit{{"agent/ipam/decide.go",
			"if links[k] || addrs[h.IPv4] || addrs[h.IPv6] || now.Sub(h.born) < youngFor {", "if now.Sub(h.born) < youngFor {"}},
		found: []check{anyLife, {"./agent/ipam", "TestCalico5044HealthyPodsKeepTheirAddresses"}},
	},
	{
		name: "a failed ADD keeps its address",
		why:  "addresses leak until none is left",
		edits: []edit{{"agent/cniserver/verbs.go", "s.cfg.Allocator.Release(l.Key, reason)\n\treturn cause\n",
			"_ = reason\n\treturn cause\n"}},
		found: []check{{"./agent/cniserver", "TestAFailedAddLeavesNothing"}},
	},
	{
		name:  "GC frees what is listed",
		why:   "pods that run lose their links and addresses",
		edits: []edit{{"agent/cniserver/verbs.go", "if valid[l.Key] || !collectable(", "if !collectable("}},
		found: []check{{"./agent/cniserver", "TestGCRemovesOnlyWhatIsNotListed"}},
	},
	{
		name: "DEL frees the address before the link is gone",
		why:  "another pod gets the address while the first still answers for it",
		edits: []edit{{"agent/cniserver/verbs.go",
			"if err := s.kernel(ctx, func() error { return s.cfg.Network.Del(netns, key) }); err != nil " +
				"{\n\t\treturn fmt.Errorf(\"remove",
			"s.cfg.Allocator.Release(key, reason)\n\tif err := s.kernel(ctx, func() error { return s.cfg." +
				"Network.Del(netns, key) }); err != nil {\n\t\treturn fmt.Errorf(\"remove"}},
		found: []check{{"./agent/cniserver", "TestTheAddressGoesAfterTheLink"}},
	},
	{
		name:  "a second ADD replaces a link that is there",
		why:   "a pod that runs loses its address to another",
		edits: []edit{{"agent/cniserver/verbs.go", "case there:\n", "case there && !leased:\n"}},
		found: []check{{"./agent/cniserver", "TestAddTwice"}},
	},
	{
		name: "an Add that fails leaves the link",
		why:  "the link answers for an address that goes to another pod",
		edits: []edit{{"dataplane/podnet/add.go", "if err != nil { // the pod's end", "if err != nil && w.hostEnd.index == " +
			"0 { // the pod's end"}},
		found: []check{{"./dataplane/podnet", "TestFailedAddLeavesNothing"}},
	},
	{
		name: "a link is made for an address that another link has",
		why:  "two pods answer for one address",
		edits: []edit{{"dataplane/podnet/add.go", "if !errors.Is(err, unix.EEXIST) {\n\t\t\treturn err\n",
			"if errors.Is(err, unix.EEXIST) || err == nil {\n\t\t\treturn nil\n\t\t} else if err != nil {\n\t\t\treturn err\n"}},
		found: []check{{"./dataplane/podnet", "TestFailedAddLeavesNothing"}},
	},
}
