package events

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// allocateBlocks gives a node the blocks that it lacks, as far as there are any.
func (d *decision) allocateBlocks(c *skeinv1.AllocateBlocks) error {
	n, err := d.node(c.GetNodeId())
	if err != nil {
		return err
	}
	r, err := d.pool(c.GetPool())
	if err != nil {
		return err
	}
	h, _ := hexKey(n.GetId())
	held, _ := r.holders.get(h, n.GetId())
	if uint64(held.n) >= uint64(c.GetTotal()) {
		return nil
	}
	if r.pool.GetDraining() {
		return refuseDraining(r.pool)
	}
	total := uint64(c.GetTotal())
	if limit := d.s.blockLimit(r); limit > 0 {
		if uint64(held.n) >= limit {
			return refuseMoreBlocks(r, n, held.n, limit)
		}
		total = min(total, limit)
	}
	if all := d.s.blockCount(n.GetId()); all+int(total-uint64(held.n)) > MaxNodeBlocks {
		if all >= MaxNodeBlocks {
			return refuse(ResourceExhausted, "node %s has %d blocks, and a node may have %d in all pools; use pools with "+
				"larger blocks", n.GetName(), all, MaxNodeBlocks)
		}
		total = uint64(held.n + MaxNodeBlocks - all)
	}
	if err := CheckSite("the blocks' node", c.GetSite()); err != nil {
		return err
	}
	site, ranged := rangedSite(d.s.settings.get(), n, c.GetSite(), c.GetSiteSaid())
	numbers := d.blocksFor(r, int(min(total-uint64(held.n), MaxBlocksAtOnce)), n, site, ranged)
	if len(numbers) == 0 {
		return d.refuseExhausted(r)
	}
	for _, number := range numbers {
		d.answer.Blocks = append(d.answer.Blocks, d.emitBlock(r, number, n.GetId(), ""))
	}
	return nil
}

// smallShare is how many blocks of a pool a node may have at least when the pool says nothing else.
const smallShare = 16

// blockLimit is how many blocks of a pool a node may have; 0: as many as there are. A pool that says nothing leaves
// half of itself to the others: a member that was broken into shall not take all.
func (s *State) blockLimit(r *poolState) uint64 {
	if limit := uint64(r.pool.GetMaxBlocksPerNode()); limit > 0 {
		return limit
	}
	if s.nodes.n == 1 {
		return 0
	}
	return max(r.layout.blocks/2, smallShare)
}

func refuseMoreBlocks(r *poolState, n *skeinv1.Node, have int, limit uint64) error {
	name := r.pool.GetName()
	if r.pool.GetMaxBlocksPerNode() == 0 {
		return refuse(ResourceExhausted, "node %s has %d of the %d blocks of pool %s, and a node may have %d unless the "+
			"pool says otherwise; remove pods from it, add a subnet with skein pool extend %s, or allow more with skein "+
			"pool set %s --max-blocks-per-node N",
			n.GetName(), have, r.layout.blocks, name, limit, name, name)
	}
	return refuse(ResourceExhausted, "node %s has %d blocks of pool %s, and a node may have %d there "+
		"(--max-blocks-per-node); remove pods from it, or raise the limit with skein pool set %s --max-blocks-per-node N",
		n.GetName(), have, name, limit, name)
}

// blockCount is how many blocks a node has in all pools.
func (s *State) blockCount(nodeID string) (n int) {
	h, _ := hexKey(nodeID)
	for _, name := range s.poolNames {
		held, _ := s.poolState(name).holders.get(h, nodeID)
		n += held.n
	}
	return n
}

func refuseDraining(p *skeinv1.Pool) error {
	return refuse(FailedPrecondition, "pool %s is being drained, and nothing new is taken from it; use another pool, or "+
		"end it with skein pool drain %s --undo", p.GetName(), p.GetName())
}

// nextBlocks is up to want blocks that may be given now, in the order in which they are to be given: first those that
// never were, then those that are free for the longest. So a block that was just returned comes last.
//
// Two bounds turn the order around, so that a huge pool does not grow the state for ever: when MaxFreed of its blocks
// wait, or MaxNumbers in all pools are known, those that rested come first.
//
// What lies in a site's range is for that site, as long as there is anything else. Those in except are chosen already.
func (d *decision) nextBlocks(r *poolState, want int, except ...uint64) []uint64 {
	outside := func(n uint64) bool { return !slices.Contains(except, n) && r.rangeAt(n) == nil }
	fresh := func(want int) (out []uint64) {
		want = min(want, MaxNumbers-d.s.numbers-len(except))
		for n := r.outer; len(out) < want && n < r.layout.blocks; n++ {
			if b := r.rangeAt(n); b != nil {
				n = b.last
			} else if !r.given(n) && outside(n) {
				out = append(out, n)
			}
		}
		return out
	}
	var out []uint64
	if r.freed.n >= MaxFreed {
		out = r.rested(want, d.c.GetTime(), outside)
		out = append(out, fresh(want-len(out))...)
	} else {
		out = fresh(want)
		out = append(out, r.rested(want-len(out), d.c.GetTime(), outside)...)
	}
	if len(r.ranges) == 0 || len(out) >= want {
		return out
	}
	others := slices.DeleteFunc(d.blocksIn(r, want+len(except), r.ranges, 0), func(n uint64) bool {
		return slices.Contains(except, n)
	})
	return append(out, others[:min(len(others), want-len(out))]...)
}

// rested is up to want freed blocks that have rested: those that are free for the longest first. Usually the
// first ones have; only a clock that stepped back makes it look further, or that all rest, or others' ranges.
func (r *poolState) rested(want int, now int64, in func(uint64) bool) (out []uint64) {
	if want <= 0 {
		return nil
	}
	for n := range r.order.all() {
		if f, _ := r.freed.get(n, ""); in(n) && !resting(f.GetAt(), cooldown(r.pool), now) {
			if out = append(out, n); len(out) == want {
				break
			}
		}
	}
	return out
}

// emitBlock gives a block to a node, or reserves it when no node is named.
func (d *decision) emitBlock(r *poolState, number uint64, nodeID, reason string) *skeinv1.Block {
	ipv4, ipv6, _ := r.layout.block(number)
	b := &skeinv1.Block{
		Pool: r.pool.GetName(), Number: number, Ipv4: text(ipv4), Ipv6: text(ipv6),
		NodeId: nodeID, Reason: reason, Since: d.c.GetTime(), Index: d.nextIndex(),
	}
	if nodeID == "" {
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_BlockReserved{BlockReserved: &skeinv1.BlockReserved{Block: b}}})
	} else {
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_BlockAllocated{BlockAllocated: &skeinv1.BlockAllocated{Block: b}}})
	}
	return b
}

// refuseExhausted says why a pool has nothing to give, who has it, and what to do.
func (d *decision) refuseExhausted(r *poolState) error {
	name := r.pool.GetName()
	rests, first := 0, int64(0)
	for f := range r.freed.all() {
		if rests++; rests == 1 || f.GetAt() < first {
			first = f.GetAt()
		}
	}
	switch {
	case rests > 0:
		until := time.Unix(0, first).Add(cooldown(r.pool)).UTC()
		return refuse(ResourceExhausted, "pool %s has no block to give now: of its %d blocks %d rest after use (%s), the "+
			"first until %s, and %d belong to %s; try again then, or add a subnet with skein pool extend %s",
			name, r.layout.blocks, rests, cooldown(r.pool), until.Format(time.RFC3339), r.blocks.n, d.s.holdersOf(r), name)
	case uint64(r.blocks.n) < r.layout.blocks:
		return refuse(ResourceExhausted, "pool %s gets no new block: all pools have %d blocks together, the most that are "+
			"allowed; use larger blocks, or remove pools that are not used", name, d.s.numbers)
	}
	return refuse(ResourceExhausted, "pool %s is exhausted: its %d blocks belong to %s; add a subnet with skein pool "+
		"extend %s, or remove pods where the most blocks are",
		name, r.layout.blocks, d.s.holdersOf(r), name)
}

// holdersOf names those that have the most blocks of a pool.
func (s *State) holdersOf(r *poolState) string {
	const shown = 5
	all := s.PoolHolders(r.pool.GetName())
	var parts []string
	owned := uint64(0)
	for i, h := range all {
		if owned += h.Blocks; i < shown {
			parts = append(parts, fmt.Sprintf("%s (%d)", s.nameOf(h.NodeID), h.Blocks))
		}
	}
	if n := len(all) - shown; n > 0 {
		parts = append(parts, fmt.Sprintf("%d more nodes", n))
	}
	if reserved := uint64(r.blocks.n) - owned; reserved > 0 {
		parts = append(parts, fmt.Sprintf("nobody (%d reserved)", reserved))
	}
	if len(parts) == 0 {
		return "nobody"
	}
	return strings.Join(parts, ", ")
}

// nameOf is what to call a node in a message.
func (s *State) nameOf(id string) string {
	if n := find(&s.nodes, id); n != nil {
		return n.GetName()
	}
	if r := find(&s.revoked, id); r != nil {
		return r.GetNode().GetName() + " (revoked)"
	}
	return id
}

// owner names who has a block.
func (s *State) ownerOf(b *skeinv1.Block) string {
	switch {
	case b == nil:
		return "nobody"
	case b.GetNodeId() != "":
		return "node " + s.nameOf(b.GetNodeId())
	case b.GetReason() == "":
		return "nobody (reserved)"
	}
	return fmt.Sprintf("nobody (reserved: %s)", b.GetReason())
}

// blockAt is the block that a prefix or an address names. The pool may be left out.
func (d *decision) blockAt(pool, prefix string) (*poolState, uint64, error) {
	a, bits, err := parseEither(prefix)
	if err != nil {
		return nil, 0, refuse(InvalidArgument, "%.80q is neither an address nor a block's prefix; write one like "+
			"10.64.0.32/27", prefix)
	}
	r, err := d.poolAt(pool, a)
	if err != nil {
		return nil, 0, err
	}
	n, _, _ := r.layout.find(a)
	ipv4, ipv6, _ := r.layout.block(n)
	block := ipv4
	if a.Is6() {
		block = ipv6
	}
	if bits != block.Bits() && bits != a.BitLen() || bits == block.Bits() && a != block.Addr() {
		return nil, 0, refuse(InvalidArgument, "%s is not a block of pool %s: the block there is %s", prefix,
			r.pool.GetName(), block)
	}
	return r, n, nil
}

// poolAt is the pool that an address lies in. The pool's name may be left out.
func (d *decision) poolAt(pool string, a netip.Addr) (*poolState, error) {
	r := d.s.poolAt(a)
	if pool != "" {
		named, err := d.pool(pool)
		if err != nil {
			return nil, err
		}
		if r != named {
			return nil, refuse(InvalidArgument, "%s does not lie in pool %s: skein pool show %s shows its subnets", a, pool,
				pool)
		}
	}
	if r == nil {
		return nil, refuse(NotFound, "%s lies in no pool: skein pool list shows their subnets", a)
	}
	return r, nil
}

// parseEither reads an address or a prefix.
func parseEither(s string) (netip.Addr, int, error) {
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return a, a.BitLen(), nil
	}
	p, err := netip.ParsePrefix(s)
	return p.Addr(), p.Bits(), err
}

// reserveBlock keeps a block from being given. One that is reserved stays as it is.
func (d *decision) reserveBlock(c *skeinv1.ReserveBlock) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	r, n, err := d.blockAt(c.GetPool(), c.GetPrefix())
	if err != nil {
		return err
	}
	b, err := d.reserve(r, n, c.GetReason())
	if err == nil {
		d.answer.Blocks = []*skeinv1.Block{b}
	}
	return err
}

// reserve is the reserved block; it reserves it if it is free.
func (d *decision) reserve(r *poolState, n uint64, reason string) (*skeinv1.Block, error) {
	b := r.block(n)
	if b.GetNodeId() != "" {
		return nil, refuse(FailedPrecondition, "block %s of pool %s belongs to %s since %s; it can be reserved when it is "+
			"given back",
			blockName(b), b.GetPool(), d.s.ownerOf(b), when(b.GetSince()))
	}
	if b != nil {
		return b, nil
	}
	if r.pool.GetDraining() {
		return nil, refuseDraining(r.pool)
	}
	if f, _ := r.freed.get(n, ""); f != nil && resting(f.GetAt(), cooldown(r.pool), d.c.GetTime()) {
		return nil, refuse(FailedPrecondition, "block %d of pool %s was given back at %s and rests until %s; try again "+
			"then, or take another",
			n, r.pool.GetName(), when(f.GetAt()), when(f.GetAt()+int64(cooldown(r.pool))))
	}
	if d.s.numbers >= MaxNumbers && !r.given(n) {
		return nil, d.refuseExhausted(r)
	}
	return d.emitBlock(r, n, "", reason), nil
}

func when(at int64) string { return time.Unix(0, at).UTC().Format(time.RFC3339) }

// blockName is a block's prefix as users write it.
func blockName(b *skeinv1.Block) string {
	if b.GetIpv4() != "" {
		return b.GetIpv4()
	}
	return b.GetIpv6()
}

// releaseBlocks gives blocks back: all of them or, when one belongs to somebody else, none.
func (d *decision) releaseBlocks(c *skeinv1.ReleaseBlocks) error {
	if err := checkText("the reason", c.GetReason(), MaxText); err != nil {
		return err
	}
	if n := len(c.GetNumbers()); n > MaxReleased {
		return refuse(InvalidArgument, "%d blocks cannot be released at once: at most %d are allowed; release them in "+
			"parts", n, MaxReleased)
	}
	if id := c.GetNodeId(); id != "" && find(&d.s.revoked, id) == nil {
		if _, err := d.node(id); err != nil {
			return err
		}
	}
	r, numbers, err := d.named(c)
	if err != nil {
		return err
	}
	since, err := givenAt(c)
	if err != nil {
		return err
	}
	for _, n := range numbers {
		if n >= r.layout.blocks {
			return refuse(NotFound, "pool %s has no block %d: its blocks are 0 to %d", r.pool.GetName(), n, r.layout.blocks-1)
		}
		b := r.block(n)
		if b == nil {
			continue // free already
		}
		if at, said := since[n]; said && at != b.GetIndex() {
			continue // given anew: this is a late copy of a request that was carried out
		}
		if b.GetNodeId() != c.GetNodeId() {
			return d.refuseNotYours(b, c.GetNodeId())
		}
		if v := r.staticIn(n); v != nil {
			return refuse(FailedPrecondition, "block %s of pool %s holds the static address %s of %s/%s; release that first",
				blockName(b), b.GetPool(), staticAddr(v), v.GetNamespace(), v.GetPod())
		}
		if d.s.egressesIn(b.GetPool(), n) > 0 {
			return refuse(FailedPrecondition, "block %s of pool %s holds addresses of egress %s; remove that, or change its "+
				"addresses, first",
				blockName(b), b.GetPool(), d.s.egressesOf(r, func(number uint64) bool { return number == n }))
		}
		d.emitReleased(b, c.GetReason())
	}
	return nil
}

// givenAt is which event gave a block, as who gives it back has it.
func givenAt(c *skeinv1.ReleaseBlocks) (map[uint64]uint64, error) {
	if len(c.GetIndexes()) == 0 {
		return nil, nil
	}
	if len(c.GetIndexes()) != len(c.GetNumbers()) {
		return nil, refuse(InvalidArgument, "%d blocks are named with %d indexes: name one for each", len(c.GetNumbers()),
			len(c.GetIndexes()))
	}
	out := make(map[uint64]uint64, len(c.GetNumbers()))
	for i, n := range c.GetNumbers() {
		out[n] = c.GetIndexes()[i]
	}
	return out, nil
}

// named is the pool and the blocks that a command names, each once.
func (d *decision) named(c *skeinv1.ReleaseBlocks) (*poolState, []uint64, error) {
	if c.GetPrefix() != "" {
		r, n, err := d.blockAt(c.GetPool(), c.GetPrefix())
		return r, []uint64{n}, err
	}
	r, err := d.pool(c.GetPool())
	return r, slices.Compact(slices.Sorted(slices.Values(c.GetNumbers()))), err
}

func (d *decision) refuseNotYours(b *skeinv1.Block, nodeID string) error {
	switch {
	case nodeID != "":
		return refuse(FailedPrecondition, "block %s of pool %s does not belong to node %s but to %s: only its owner can "+
			"give it back", blockName(b), b.GetPool(), d.s.nameOf(nodeID), d.s.ownerOf(b))
	default:
		return refuse(FailedPrecondition, "block %s of pool %s is not reserved: it belongs to %s, which gives it back when "+
			"no pod uses it, or when the node is revoked (skein node revoke)",
			blockName(b), b.GetPool(), d.s.ownerOf(b))
	}
}

func (d *decision) emitReleased(b *skeinv1.Block, reason string) {
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_BlockReleased{BlockReleased: &skeinv1.BlockReleased{
		Pool: b.GetPool(), Number: b.GetNumber(), NodeId: b.GetNodeId(), Reason: reason,
	}}})
}

// staticIn is a static address in the block, or nil.
func (r *poolState) staticIn(n uint64) *skeinv1.StaticAddress {
	if _, ok := r.staticsIn.get(n, ""); !ok {
		return nil
	}
	for v := range r.statics.all() {
		if at, _, _ := r.layout.find(staticAddr(v)); at == n {
			return v
		}
	}
	return nil
}

// grantees names the nodes that hold the most addresses of a namespace.
func (s *State) grantees(r *poolState, namespace string) string {
	const shown = 5
	var all []*skeinv1.Grant
	for g := range r.grants.all() {
		if g.GetNamespace() == namespace {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(x, y *skeinv1.Grant) int {
		if x.GetAddresses() != y.GetAddresses() {
			return int(int64(y.GetAddresses()) - int64(x.GetAddresses()))
		}
		return strings.Compare(x.GetNodeId(), y.GetNodeId())
	})
	var parts []string
	for _, g := range all[:min(len(all), shown)] {
		parts = append(parts, fmt.Sprintf("%s %d", s.nameOf(g.GetNodeId()), g.GetAddresses()))
	}
	if len(parts) == 0 {
		return "nobody"
	}
	return strings.Join(parts, ", ") + more(len(all)-shown)
}

// giveAllBack ends what a node has of pools, before it is revoked: nothing may stay with a node that is gone.
func (d *decision) giveAllBack(id, reason string) {
	for _, v := range d.s.StaticsOf(id) {
		d.emitClaimed(v, "")
	}
	for _, b := range d.s.BlocksOf(id) {
		d.emitReleased(b, reason)
	}
	for _, g := range d.s.GrantsOf(id) {
		d.emit(&skeinv1.Event{Body: &skeinv1.Event_GrantSet{GrantSet: &skeinv1.GrantSet{Grant: &skeinv1.Grant{
			Pool: g.GetPool(), Namespace: g.GetNamespace(), NodeId: g.GetNodeId(),
		}}}})
	}
}

// emitClaimed gives a static address to a node, or to none, and is the address then.
func (d *decision) emitClaimed(v *skeinv1.StaticAddress, nodeID string) *skeinv1.StaticAddress {
	v = proto.CloneOf(v)
	v.NodeId, v.Since, v.Index = nodeID, d.c.GetTime(), d.nextIndex()
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_AddressClaimed{AddressClaimed: &skeinv1.AddressClaimed{
		Pool: v.GetPool(), Address: staticAddr(v).String(), NodeId: nodeID,
	}}})
	return v
}
